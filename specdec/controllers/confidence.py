"""Stop drafting when the draft model is no longer sure of what it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec.controllers.base import Controller, Observation, refuse_lengths
from specdec.errors import UsageError


class ConfidenceController(Controller):
    """Stops after a token whose own draft probability is below `threshold` (transformers' assisted generation: 0.4).

    That token is still verified: dropping it after seeing it would change the output's distribution. Deterministic
    drafters have no probabilities; with them this is a fixed length of `max_draft_tokens`.
    """

    def __init__(self, threshold: float = 0.4, max_draft_tokens: int = 16) -> None:
        if not 0 <= threshold <= 1:
            raise UsageError(f"threshold={threshold} is not a probability; use a value in [0, 1]")
        refuse_lengths(max_draft_tokens)
        self.threshold = threshold
        self.max_draft_tokens = max_draft_tokens

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        """As many as the draft model stays sure of."""
        return [self.max_draft_tokens] * len(states)

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Where the token just drawn was unlikely."""
        return draft_probs.gather(-1, tokens[:, None])[:, 0] < self.threshold
