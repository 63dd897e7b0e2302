"""Longer after a draft that was accepted whole, shorter after any other: transformers' schedule."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.controllers.base import Controller, Observation
from specdec.errors import UsageError
from specdec.types import StepRecord


class HeuristicController(Controller):
    """Starts at `initial` tokens; + `increase` after full acceptance, − `decrease` otherwise, never below 1.

    A step in which nothing was drafted says nothing, and changes nothing. State: the request's current length.
    """

    def __init__(self, initial: int = 5, increase: int = 2, decrease: int = 1, max_draft_tokens: int = 16) -> None:
        if not 1 <= initial <= max_draft_tokens:
            raise UsageError(f"initial={initial} is not possible; use 1 to max_draft_tokens={max_draft_tokens}")
        if increase < 0 or decrease < 0:
            raise UsageError(f"increase={increase} and decrease={decrease} must not be negative")
        self.initial = initial
        self.increase = increase
        self.decrease = decrease
        self.max_draft_tokens = max_draft_tokens

    def init(self) -> int:
        """The initial length."""
        return self.initial

    def decide(self, states: Sequence[int], observation: Observation) -> list[int]:
        """Each request's own length."""
        return list(states)

    def update(self, state: int, step: StepRecord) -> int:
        """Grow or shrink by what became of the draft."""
        if step.num_drafted == 0:
            return state
        if step.num_accepted == step.num_drafted:
            return min(state + self.increase, self.max_draft_tokens)
        return max(state - self.decrease, 1)
