"""What every speculation-length policy is: explicit state per request, no hidden memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.costmodel import StepCosts
from specdec.errors import UsageError
from specdec.types import StepRecord


@dataclass(frozen=True)
class Observation:
    """What a controller may look at before a step. All lists have length B.

    lengths: tokens so far, prompt included. remaining: tokens each request may still emit.
    """

    lengths: tuple[int, ...]
    remaining: tuple[int, ...]
    batch_size: int


class Controller(ABC):
    """Decides how many tokens to draft. `request_local` False declares load or time awareness.

    A state is one request's own object: `decide` and `stop` may note in it what they chose, for `update` to learn from.
    """

    request_local: bool = True
    max_draft_tokens: int  # no decision exceeds it; the engine sizes its cache by it

    def bind(self, measure: Callable[[], StepCosts]) -> None:
        """Called once, before any request, by the backend that owns the engine.

        measure: what steps of this target and drafter cost here, timed in a few seconds; only a controller that weighs
        time calls it. Without it such a controller starts from a guess.
        """

    def init(self) -> Any:
        """A new request's state. What is shared across requests is an explicit object in the constructor."""
        return None

    @abstractmethod
    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        """Tokens to draft for each of B requests; 0 is plain decoding. The engine may lower them, never raise."""

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Called after each drawn token; True withholds only the tokens *after* it (non-anticipation).

        draft_probs: [B, V], what token `tokens` [B] at `depth` (1 for the first) was drawn from; at temperature 0 the
        draft model's softmax at temperature 1. Returns [B] bool, where `tokens` are: to read them would be to wait for
        the device at every token. A controller that does not override this is never asked, and drafts cost less.
        """
        return torch.zeros(len(states), dtype=torch.bool, device=tokens.device)

    def update(self, state: Any, step: StepRecord) -> Any:
        """The state after one finished step of the request."""
        return state


def refuse_lengths(max_draft_tokens: int) -> None:
    """Raise `UsageError` where a controller that drafts is given no token to draft."""
    if max_draft_tokens < 1:
        raise UsageError(f"max_draft_tokens={max_draft_tokens} is not possible; it must be at least 1")
