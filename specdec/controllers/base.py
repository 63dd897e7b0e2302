"""What every speculation-length policy is: explicit state per request, no hidden memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Decides how many tokens to draft. `request_local` False declares load or time awareness."""

    request_local: bool = True
    max_draft_tokens: int  # no decision exceeds it; the engine sizes its cache by it

    def init(self) -> Any:
        """A new request's state. What is shared across requests is an explicit object in the constructor."""
        return None

    @abstractmethod
    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        """Tokens to draft for each of B requests; 0 is plain decoding. The engine may lower them, never raise."""

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Called after each drawn token; True withholds only the tokens *after* it (non-anticipation).

        draft_probs: [B, V], what token `tokens` [B] at `depth` (1 for the first) was drawn from. Returns [B] bool.
        """
        return torch.zeros(len(states), dtype=torch.bool, device=tokens.device)

    def update(self, state: Any, step: StepRecord) -> Any:
        """The state after one finished step of the request."""
        return state
