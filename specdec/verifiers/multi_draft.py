"""Several drafts at a node, drawn independently: each is tried in turn against what its predecessors left over."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.types import DeferredError
from specdec.verifiers.tree_rejection import Choice, Siblings, TreeRejectionVerifier


class WithReplacementVerifier(TreeRejectionVerifier):
    """Accept a child with probability min(1, target / draft); otherwise the target becomes the residual, and so on.

    Lossless. SpecInfer, Miao et al. 2305.09781, algorithm 2. A draft distribution is taken as it is reported, so
    children that were drawn otherwise are judged rightly too, as long as each reports what it was drawn from once its
    elder siblings were known.
    """

    greedy_when_certain = True

    def judge(self, siblings: Siblings) -> Choice:
        """See `TreeRejectionVerifier.judge`."""
        everyone = torch.arange(len(siblings.rows), device=siblings.rows.device)
        draft_probs, deferred = self.drawn_from(siblings, siblings.index, everyone), self.misfits(siblings)
        target_prob = siblings.owed.gather(1, siblings.token)[:, 0]
        draft_prob = 1.0 if draft_probs is None else draft_probs.gather(1, siblings.token)[:, 0]
        stays = siblings.coin * draft_prob * siblings.mass < target_prob
        return Choice(stays, *_residual(siblings.owed, siblings.mass, siblings.token, draft_probs), deferred)

    def drawn_from(self, siblings: Siblings, index: int | Tensor, which: Tensor) -> Tensor | None:
        """Distribution of one child given its elder siblings, [len(which), V]; None: one-hot."""
        return siblings.drawn_from(index, which)

    def misfits(self, siblings: Siblings) -> tuple[DeferredError, ...]:
        """What the rule takes for granted of its drafts and may not be so; see `refuse`."""
        return ()


def _residual(owed: Tensor, mass: Tensor, drafted: Tensor, draft_probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """max(owed - mass · draft, 0) and its sum; where rounding leaves nothing, what was owed before."""
    share = torch.zeros_like(owed).scatter_(1, drafted, 1.0) if draft_probs is None else draft_probs
    left = (owed - share * mass[:, None]).clamp_(min=0)
    total = left.sum(-1)
    some = total > 0
    return torch.where(some[:, None], left, owed), torch.where(some, total, mass)
