"""What every verification rule is: a pure function from a draft and probabilities to a verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from specdec.types import Draft, Verdict
from specdec.uniforms import Uniforms


class Verifier(ABC):
    """A rule. No model, no tokenizer, no cache, no mutation of its arguments.

    lossless: emitted tokens follow the target's distribution exactly.
    greedy_only: the rule is only right at temperature 0 (one-hot target distributions).
    accepts_trees: drafts with `parents` may be given.
    synthetic: acceptance is set, not earned; named so wherever it appears.
    """

    lossless: bool = True
    greedy_only: bool = False
    accepts_trees: bool = False
    synthetic: bool = False

    @abstractmethod
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Decide how much of the draft stays.

        target_probs: [B, K + 1, V]; index 0 is the distribution after the last emitted token (the root),
        index i + 1 the one after draft node i. Entries beyond a row's own length are ignored.
        """
