"""A small language model drafts token by token: the classic pair of Leviathan 2211.17192 and Chen 2302.01318."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec.cache.base import Cache
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.errors import ModelError, UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel, load_model
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocab import align, fit_logits
from specdec.sampling import probabilities, sample
from specdec.types import PADDING, Draft, Verdict
from specdec.uniforms import Purpose, Uniforms


class DraftModelDrafter(Drafter):
    """Any causal language model with the target's tokenizer.

    Its cache holds a prefix of each request's tokens. Whatever lies beyond is fed before drafting; that also covers
    the last draft token of a fully accepted step, which the draft model has drawn but never read.
    """

    def __init__(self, draft: LoadedModel) -> None:
        self.model: LanguageModel = draft.model
        self._draft = draft
        self._num_real_ids = draft.model.vocab_size
        self._target_vocab_size = draft.model.vocab_size
        self._cache: Cache = self.model.new_cache(1, 1)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "auto",
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> DraftModelDrafter:
        """From an embedded model's name, a local directory or a hub id; see `specdec.models.loading.load_model`."""
        return cls(
            load_model(
                model,
                dtype=dtype,
                device=device,
                device_map=device_map,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
        )

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Refuse another tokenizer; align vocabularies that differ in padding alone."""
        self._target_vocab_size = target.vocab_size
        if tokenizer is not None:
            self._num_real_ids = align(self._draft.tokenizer, tokenizer, self._draft.name, target.name)
        elif self.model.vocab_size != target.vocab_size:
            raise UsageError(
                f"draft {self._draft.name} has {self.model.vocab_size} token ids and target {target.name} "
                f"{target.vocab_size}; pass the tokenizer so that they can be aligned"
            )

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Allocate the draft model's own cache."""
        if self.model.max_batch is not None and num_slots > self.model.max_batch:
            raise UsageError(
                f"draft {self._draft.name} takes at most {self.model.max_batch} sequences at once, not {num_slots}"
            )
        self._cache = self.model.new_cache(num_slots, capacity)

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """Forget the slots' earlier requests and read the prompts; the first emitted token is left to `propose`."""
        for slot in context.slots:
            self._cache.free(slot)
        if max(context.num_prompt) <= self.model.max_positions:
            self._read(replace(context, tokens=tuple(tokens[:-1] for tokens in context.tokens)))

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Chains drawn from the draft model under each request's sampling options.

        Near the end of the draft model's own window drafts get shorter, then empty: plain decoding goes on.
        """
        room = [self.model.max_positions - len(tokens) for tokens in context.tokens]
        limits = torch.tensor([max(0, min(pair)) for pair in zip(max_tokens, room, strict=True)], device=context.device)
        depth_limit = int(limits.max())
        if depth_limit == 0:
            return Draft.empty(context.batch_size, context.device)
        logits = self._read(context)
        alive, drawn, drawn_from = limits > 0, torch.empty_like(limits)[:, None][:, :0], []
        lengths = torch.zeros_like(limits)
        for depth in range(1, depth_limit + 1):
            probs = self._distribution(context, logits, drawn)
            tokens = sample(probs, uniforms.draw(Purpose.DRAFT, depth - 1, 1)[:, 0])
            drawn = torch.cat([drawn, torch.where(alive, tokens, PADDING)[:, None]], dim=1)
            drawn_from.append(probs)
            lengths += alive
            alive = alive & (limits > depth) & ~stop(probs, tokens, depth)
            if not alive.any():
                break
            logits = self._advance(context, tokens, depth)
        deterministic = all(sampling.greedy for sampling in context.sampling)
        return Draft(drawn, lengths.cpu(), None if deterministic else torch.stack(drawn_from, dim=1))

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Roll the draft model's cache back to what was accepted."""
        kept = [len(tokens) + n for tokens, n in zip(context.tokens, verdict.num_accepted.tolist(), strict=True)]
        cached = self._cache.lengths
        self._cache.rollback(
            context.slots, [min(cached[slot], length) for slot, length in zip(context.slots, kept, strict=True)]
        )

    def reset(self, slot: int) -> None:
        """Forget the slot."""
        self._cache.free(slot)

    @property
    def num_bytes(self) -> int:
        """The draft model's cache."""
        return self._cache.num_bytes

    def _read(self, context: DraftContext) -> Tensor:
        """Feed what the draft model has not read yet; logits after each row's last token, [B, 1, V]."""
        lengths = [len(tokens) for tokens in context.tokens]
        starts = [self._cache.lengths[slot] for slot in context.slots]
        width = max(length - start for length, start in zip(lengths, starts, strict=True))
        unread = np.zeros((context.batch_size, width), dtype=np.int64)
        for row, (tokens, start) in enumerate(zip(context.tokens, starts, strict=True)):
            unread[row, : len(tokens) - start] = tokens[start:]
        last = torch.tensor(lengths) - torch.tensor(starts) - 1
        output = self._forward(context, torch.from_numpy(unread), starts, logits_at=last[:, None])
        self._cache.rollback(context.slots, lengths)
        return output

    def _advance(self, context: DraftContext, tokens: Tensor, depth: int) -> Tensor:
        """Feed one drawn token per row. Rows that stopped are fed too, and rolled back once verified."""
        starts = [len(row) + depth - 1 for row in context.tokens]
        return self._forward(context, tokens[:, None], starts)

    def _forward(
        self, context: DraftContext, tokens: Tensor, starts: Sequence[int], logits_at: Tensor | None = None
    ) -> Tensor:
        device = self.model.device
        positions = torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])
        output = self.model.forward(
            tokens.clamp(max=self.model.vocab_size - 1).to(device),  # ids the draft model lacks it cannot read
            positions.clamp(max=self.model.max_positions - 1).to(device),  # only rows that draft nothing lie beyond
            self._cache.view(context.slots),
            logits_at=None if logits_at is None else logits_at.to(device),
        )
        return output.logits.to(context.device)

    def _distribution(self, context: DraftContext, logits: Tensor, drawn: Tensor) -> Tensor:
        """[B, V] over the target's vocabulary, as verification will see it."""
        fitted = fit_logits(logits, self._num_real_ids, self._target_vocab_size)
        depth = drawn.shape[1]
        seen = context.seen(drawn)
        if not torch.isfinite(fitted.amax(-1)).all():  # a maximum passes NaN on, and no mass at all is -inf
            raise ModelError(
                f"draft {self._draft.name} gave NaN or infinite logits for one of the requests {context.request_ids}; "
                f"try drafter.dtype=float32, or check the checkpoint"
            )
        return probabilities(fitted, context.sampling, lambda row, _: seen(row, depth))[:, 0]
