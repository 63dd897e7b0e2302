"""The same number of draft tokens at every step; none at all is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.controllers.base import Controller, Observation
from specdec.errors import UsageError


class FixedController(Controller):
    """Always asks for `num_draft_tokens` (gamma). 0 is plain decoding, the baseline arm."""

    def __init__(self, num_draft_tokens: int) -> None:
        if num_draft_tokens < 0:
            raise UsageError(f"num_draft_tokens={num_draft_tokens} is negative; use 0 for plain decoding")
        self.max_draft_tokens = num_draft_tokens

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        """The same for every request."""
        return [self.max_draft_tokens] * len(states)
