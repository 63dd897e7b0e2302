"""Several drafts at a node, picked and not drawn: the draft model's most likely tokens."""

from __future__ import annotations

from torch import Tensor

from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.tree_rejection import Siblings


class TopKVerifier(WithReplacementVerifier):
    """Accept a child with the target's own probability of it; otherwise that token is out, and the next child's turn.

    Lossless whatever the drafts are and however they came about, hence also the rule for drafts with unreliable
    probabilities, which it does not look at. EAGLE, Li et al. 2401.15077, section 3.3, and 2406.16858.
    """

    greedy_when_certain = True

    def drawn_from(self, siblings: Siblings, index: int | Tensor, which: Tensor) -> Tensor | None:
        """See `WithReplacementVerifier.drawn_from`."""
        return None
