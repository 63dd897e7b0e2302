"""Several drafts at a node, no token twice: what was tried is out of the draft's distribution, too."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.verifiers.base import SiblingDraws
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.tree_rejection import Siblings


class WithoutReplacementVerifier(WithReplacementVerifier):
    """As with replacement, but tokens tried before are struck from the draft distribution, which is normalised again.

    Lossless. Sequoia, Chen et al. 2402.12374, algorithm 2. A draft distribution that is exhausted becomes uniform over
    untried tokens, so drafters must draw from that. Drafters that report each child's distribution without its elder
    siblings and those that report the node's own are judged alike.
    """

    greedy_when_certain = True

    siblings = SiblingDraws.DISTINCT

    def drawn_from(self, siblings: Siblings, index: int, which: Tensor) -> Tensor | None:
        """See `WithReplacementVerifier.drawn_from`. Raises `UsageError` where siblings have a token in common."""
        probs = siblings.drawn_from(index, which)
        if probs is None or index == 0:
            return probs
        tried = siblings.tokens[which, :index]
        if bool((tried == siblings.tokens[which, index, None]).any()):
            raise UsageError(
                "WithoutReplacementVerifier was given one token twice at a node; draft without replacement, or verify "
                "with WithReplacementVerifier"
            )
        left = probs.scatter(1, tried, 0.0)
        total = left.sum(-1, keepdim=True)
        exhausted = (total <= 0)[:, 0]
        if exhausted.any():
            left[exhausted] = torch.ones_like(left[exhausted]).scatter_(1, tried[exhausted], 0.0)
            total = left.sum(-1, keepdim=True)
        return left.div_(total)
