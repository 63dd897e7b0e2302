"""Drafting with a language model of any kind: its cache, its window, and the ids it reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.cache.base import Cache
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.chains import Chains
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.vocab import TokenMap
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Verdict


class AutoregressiveDrafter(Drafter):
    """Chains from `model`, which `bind` has set, together with what its ids mean in the target's. name: for messages.

    Its cache holds a prefix of each request's text, counted in tokens as the draft model reads them. Whatever lies
    beyond is fed before drafting; that also covers the last draft token of a fully accepted step, which the draft model
    has drawn but never read.
    """

    name: str
    model: LanguageModel
    _token_map: TokenMap
    _cache: Cache

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Allocate the draft model's own cache. Raises `UsageError` where it can't roll back, or not hold so many."""
        if self.model.max_batch is not None and num_slots > self.model.max_batch:
            raise UsageError(
                f"draft {self.name} takes at most {self.model.max_batch} sequences at once, not {num_slots}"
            )
        self._cache = self.model.new_cache(num_slots, capacity)
        if not self._cache.can_rollback:
            raise UsageError(
                f"draft {self.name} cannot roll back rejected tokens ({', '.join(self._cache.unable) or 'its cache'}); "
                f"choose a draft with attention in every layer"
            )

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """Forget the slots' earlier requests and read the prompts; the first emitted token is left to `propose`."""
        for slot in context.slots:
            self._cache.free(slot)
        prompts = [self._token_map.read(tokens[:-1]) for tokens in context.tokens]
        if max(len(prompt) for prompt in prompts) <= self.model.max_positions:
            self._read(context, prompts, num_more=0)

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Chains drawn from the draft model under each request's sampling options.

        Near the end of the draft model's own window drafts get shorter, then empty: plain decoding goes on.
        """
        texts = [self._token_map.read(tokens) for tokens in context.tokens]
        room = [self.model.max_positions - len(text) for text in texts]
        lengths = [max(0, min(pair)) for pair in zip(max_tokens, room, strict=True)]
        if not any(lengths):
            return Draft.empty(context.batch_size, context.device)

        def advance(tokens: Tensor) -> Tensor:
            return self._forward(context, self._token_map.read_drawn(tokens)[:, None])[:, 0]

        logits = self._read(context, texts, num_more=max(lengths))
        return Chains(self.name, self._token_map, context, stop, uniforms).draw(logits, lengths, advance)

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Roll the draft model's cache back to what was accepted of its own draft."""
        cached, kept = self._cache.lengths, []
        own = torch.minimum(verdict.num_accepted, draft.lengths)  # in a cascade another's draft may be verified
        for slot, tokens, accepted in zip(context.slots, context.tokens, own.tolist(), strict=True):
            kept.append(min(cached[slot], len(self._token_map.read(tokens)) + accepted))
        self._cache.rollback(context.slots, kept)

    def reset(self, slot: int) -> None:
        """Forget the slot."""
        self._cache.free(slot)

    @property
    def num_bytes(self) -> int:
        """The draft model's cache."""
        return self._cache.num_bytes

    def _read(self, context: DraftContext, texts: Sequence[np.ndarray], num_more: int) -> Tensor:
        """Feed what the draft model has not read yet; logits after each row's last token, [B, W].

        texts: what it is to have read. num_more: tokens that will be fed afterwards.
        """
        lengths = [len(text) for text in texts]
        starts = self._starts(context, lengths, num_more)
        last = torch.tensor(lengths) - torch.tensor(starts) - 1
        unread = np.zeros((len(texts), int(last.max()) + 1), dtype=np.int64)
        for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
            unread[row, : len(text) - start] = text[start:]
        logits = self._forward(context, torch.from_numpy(unread), logits_at=last[:, None])
        self._cache.rollback(context.slots, lengths)
        return logits[:, 0]

    def _starts(self, context: DraftContext, lengths: Sequence[int], num_more: int) -> list[int]:
        """How much of each row is cached. Where translated texts outgrow the cache, a larger one is filled afresh."""
        starts = [self._cache.lengths[slot] for slot in context.slots]
        longest_unread = max(length - start for length, start in zip(lengths, starts, strict=True))
        needed = max(max(starts) + longest_unread, max(lengths) + num_more)
        if needed <= self._cache.capacity:
            return starts
        self._cache = self.model.new_cache(self._cache.num_slots, 2 * needed)
        return [0] * len(starts)

    def _forward(self, context: DraftContext, tokens: Tensor, logits_at: Tensor | None = None) -> Tensor:
        """Feed [B, S] in the draft's ids. Rows that stopped are fed too, and rolled back once verified."""
        device, view = self.model.device, self._cache.view(context.slots)
        positions = torch.tensor(view.starts)[:, None] + torch.arange(tokens.shape[1])
        output = self.model.forward(
            tokens.clamp(max=self.model.vocab_size - 1).to(device),  # ids the draft model lacks it cannot read
            positions.clamp(max=self.model.max_positions - 1).to(device),  # only rows that draft nothing lie beyond
            view,
            logits_at=None if logits_at is None else logits_at.to(device),
        )
        return output.logits.to(context.device)
