"""The reduced vocabulary of a trained draft: the tokens its target says most often.

The full output projection is a fifth of a small target's weights, and most of its rows are hardly ever the answer
(FR-Spec 2502.14856, EAGLE-3 2503.01840). A token outside is never proposed, which costs acceptance, not exactness.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.errors import UsageError


class DraftVocabulary:
    """Draft id i means target id `ids[i]`: [Vd] int64, the most frequent first."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids.long()

    @classmethod
    def checked(cls, ids: Tensor, vocab_size: int, name: str) -> DraftVocabulary:
        """From a checkpoint's ids [Vd]; `UsageError` where they are not different ids of a target with `vocab_size`."""
        if ids.dim() != 1 or not len(ids) or len(set(ids.tolist())) != len(ids):
            raise UsageError(f"the draft vocabulary of {name} is not a list of different ids; train the draft again")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise UsageError(
                f"the draft vocabulary of {name} has the id {int(ids.max())} and its target only {vocab_size} ids; "
                "train the draft again"
            )
        return cls(ids)

    def __len__(self) -> int:
        """Vd."""
        return len(self.ids)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] → target ids [...] int64."""
        return self.ids[draft_ids]

    def expand(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits [..., Vd] over the target's vocabulary [..., vocab_size]: -inf for every token outside."""
        full = logits.new_full((*logits.shape[:-1], vocab_size), -math.inf)
        return full.index_copy_(-1, self.ids, logits)

    def on(self, device: torch.device) -> DraftVocabulary:
        """The same vocabulary on another device."""
        return DraftVocabulary(self.ids.to(device))
