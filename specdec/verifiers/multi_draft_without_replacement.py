"""Several drafts at a node, no token twice: what was tried is out of the draft's distribution, too."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.types import DeferredError, refuse
from specdec.verifiers.base import SiblingDraws
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.tree_rejection import Siblings

_TWICE = UsageError(
    "WithoutReplacementVerifier was given one token twice at a node; draft without replacement, or verify with "
    "WithReplacementVerifier"
)


class WithoutReplacementVerifier(WithReplacementVerifier):
    """As with replacement, but tokens tried before are struck from the draft distribution, which is normalised again.

    Lossless. Sequoia, Chen et al. 2402.12374, algorithm 2. A draft distribution that is exhausted becomes uniform over
    untried tokens, so drafters must draw from that. Drafters that report each child's distribution without its elder
    siblings and those that report the node's own are judged alike.
    """

    greedy_when_certain = True

    siblings = SiblingDraws.DISTINCT

    def drawn_from(self, siblings: Siblings, index: int | Tensor, which: Tensor) -> Tensor | None:
        """See `WithReplacementVerifier.drawn_from`."""
        probs = siblings.drawn_from(index, which)
        if probs is None:
            return None
        tokens, elder = siblings.tokens[which].clamp(min=0), _elder(siblings)[which]
        tried = torch.zeros_like(probs).scatter_add_(1, tokens, elder.to(probs)) > 0  # [R, V]
        left = probs.masked_fill(tried, 0.0)
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, (~tried).to(probs) / (~tried).sum(-1, keepdim=True))

    def misfits(self, siblings: Siblings) -> tuple[DeferredError, ...]:
        """See `WithReplacementVerifier.misfits`: siblings with a token in common."""
        if siblings.draft.probs is None:
            return ()
        return refuse((siblings.tokens == siblings.token) & _elder(siblings), _TWICE)


def _elder(siblings: Siblings) -> Tensor:
    """Who was tried before the one whose turn it is: [R, C] bool."""
    return torch.arange(siblings.tokens.shape[1], device=siblings.index.device) < siblings.index[:, None]
