"""Chains from an EAGLE-style head, which goes on from the target's own features (EAGLE 2401.15077, 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.chains import Chains
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading.draft_checkpoint import DraftCheckpoint
from specdec.models.native.eagle import EagleHead
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.vocab import ReducedIds
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Verdict


class EagleDrafter(Drafter):
    """A trained head on the target's features of one verification pass; no second forward of the target.

    Between two calls the head's cache holds pairs of true features alone: entry t is (features of token t, token
    t + 1). Features that came since wait in `_unread`; what the head makes of its own streams is rolled back at once.
    """

    def __init__(self, checkpoint: str, *, check_revision: bool = True) -> None:
        """checkpoint: a shipped draft's name, or a folder. check_revision: refuse a target of other weights."""
        self._checkpoint = DraftCheckpoint.find(checkpoint, "eagle")
        self._check_revision = check_revision
        self.hidden_layers = self._checkpoint.hidden_layers

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Refuse another target than the head was trained for; share its embedding and head."""
        checkpoint = self._checkpoint
        checkpoint.refuse_other_target(target, self._check_revision)
        self._head = EagleHead.from_state_dict(
            checkpoint.config, checkpoint.weights(), target.tables(), target.device, target.dtype
        )
        self._token_map = ReducedIds(self._head.vocabulary, target.vocab_size)
        if self._head.num_features != len(self.hidden_layers):
            raise UsageError(
                f"the draft {checkpoint.name} has weights for {self._head.num_features} layers of its target and names "
                f"{len(self.hidden_layers)} in hidden_layers; train it again"
            )

    @property
    def head(self) -> EagleHead:
        """The trained network."""
        return self._head

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Allocate the head's own cache."""
        self._cache = self._head.new_cache(num_slots, capacity)
        self._unread: dict[int, Tensor] = {}  # slot → fused features [n, d] of the last n pairs

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """Run the head over the prompts' features, all but the last pair, which `propose` goes on from."""
        for slot, features in zip(context.slots, hidden or (), strict=True):
            self._cache.free(slot)
            self._unread[slot] = self._head.fuse(features)
        counts = [len(self._unread[slot]) - 1 for slot in context.slots]
        if any(counts):
            self._read(context, counts)

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Chains, greedy or drawn under each request's sampling options; shorter ones near the head's own window."""
        lengths = self._limits(context, max_tokens)
        if not any(lengths):
            return Draft.empty(context.batch_size, context.device)
        stream = self._read(context, [len(self._unread[slot]) for slot in context.slots])  # [B, 1, d]
        starts = [self._cache.lengths[slot] for slot in context.slots]
        positions = torch.tensor(starts, device=context.device)[:, None]
        view = self._cache.view(context.slots)

        def advance(tokens: Tensor) -> Tensor:
            nonlocal stream, positions
            stream = self._head.forward(tokens[:, None], stream, positions, view)
            positions = positions + 1
            return self._head.logits(stream[:, 0])

        chains = Chains(self._checkpoint.name, self._token_map, context, stop, uniforms)
        draft = chains.draw(self._head.logits(stream[:, 0]), lengths, advance)
        self._cache.rollback(context.slots, starts)
        return draft

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Keep the features of the root and of the accepted path, in a tree as in a chain."""
        assert hidden is not None, "the engine gives the features of hidden_layers"
        counts = [count + 1 for count in verdict.num_accepted.tolist()]
        path = F.pad(verdict.path[:, : max(counts) - 1] + 1, (1, 0)).to(hidden.device)  # [B, D + 1], 0 the root
        rows = torch.arange(len(counts), device=hidden.device)[:, None]
        fused = self._head.fuse(hidden[rows, path])  # [B, D + 1, d]
        for row, (slot, count) in enumerate(zip(context.slots, counts, strict=True)):
            self._unread[slot] = torch.cat((self._unread[slot], fused[row, :count]))

    def reset(self, slot: int) -> None:
        """Forget the slot."""
        self._cache.free(slot)
        self._unread.pop(slot, None)

    @property
    def num_bytes(self) -> int:
        """The head's cache, and its weights with its copy of the target's head rows."""
        return self._cache.num_bytes + self._head.num_bytes

    def _limits(self, context: DraftContext, max_tokens: Sequence[int]) -> list[int]:
        window = self._head.config.max_positions
        return [max(0, min(n, window - len(row))) for n, row in zip(max_tokens, context.tokens, strict=True)]

    def _read(self, context: DraftContext, counts: Sequence[int]) -> Tensor:
        """Feed each row its first counts[b] unread pairs, not all 0; the stream after the last of each, [B, 1, d]."""
        slots, width = context.slots, max(counts)
        unread = [self._unread[slot] for slot in slots]
        starts = [self._cache.lengths[slot] for slot in slots]
        tokens = np.zeros((len(slots), width), dtype=np.int64)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens[row, :count] = context.tokens[row][start + 1 : start + 1 + count]
        pairs = [features[:count] for features, count in zip(unread, counts, strict=True)]
        features = pairs[0][None] if len(pairs) == 1 else pad_sequence(pairs, batch_first=True)
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        stream = self._head.forward(
            torch.from_numpy(tokens).to(context.device), features, positions.to(context.device), self._cache.view(slots)
        )
        self._cache.rollback(slots, [start + count for start, count in zip(starts, counts, strict=True)])
        for slot, features, count in zip(slots, unread, counts, strict=True):
            self._unread[slot] = features[count:]
        last = torch.tensor(counts, device=context.device).sub(1).clamp(min=0)[:, None, None]
        return stream.gather(1, last.expand(-1, 1, stream.shape[2]))
