"""Several drafts at a node, drawn independently: each is tried in turn against what its predecessors left over."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.verifiers.tree_rejection import Choice, Siblings, TreeRejectionVerifier


class WithReplacementVerifier(TreeRejectionVerifier):
    """Accept a child with probability min(1, target / draft); otherwise the target becomes the residual, and so on.

    Lossless. SpecInfer, Miao et al. 2305.09781, algorithm 2. A draft distribution is taken as it is reported, so
    children that were drawn otherwise are judged rightly too, as long as each reports what it was drawn from once its
    elder siblings were known.
    """

    greedy_when_certain = True

    def choose(self, siblings: Siblings) -> Choice:
        """See `TreeRejectionVerifier.choose`."""
        owed, mass = siblings.target.clone(), torch.ones_like(siblings.target[:, 0])
        child = torch.full_like(siblings.rows, -1)
        for index, tokens in enumerate(siblings.tokens.unbind(1)):
            which = ((child < 0) & (tokens >= 0)).nonzero()[:, 0]
            if len(which) == 0:
                break
            draft_probs = self.drawn_from(siblings, index, which)
            drafted = tokens[which, None]
            target_prob = owed[which].gather(1, drafted)[:, 0]
            draft_prob = 1.0 if draft_probs is None else draft_probs.gather(1, drafted)[:, 0]
            stays = siblings.coins[which, index] * draft_prob * mass[which] < target_prob
            child[which[stays]] = index
            rest = which[~stays]
            owed[rest], mass[rest] = _residual(
                owed[rest], mass[rest], drafted[~stays], None if draft_probs is None else draft_probs[~stays]
            )
        return Choice(child, owed)

    def drawn_from(self, siblings: Siblings, index: int, which: Tensor) -> Tensor | None:
        """Distribution of one child given its elder siblings, [len(which), V]; None: one-hot."""
        return siblings.drawn_from(index, which)


def _residual(owed: Tensor, mass: Tensor, drafted: Tensor, draft_probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """max(owed - mass · draft, 0) and its sum; where rounding leaves nothing, what was owed before."""
    share = torch.zeros_like(owed).scatter_(1, drafted, 1.0) if draft_probs is None else draft_probs
    left = (owed - share * mass[:, None]).clamp_(min=0)
    total = left.sum(-1)
    empty = total <= 0
    left[empty], total[empty] = owed[empty], mass[empty]
    return left, total
