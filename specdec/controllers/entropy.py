"""AdaEDL: stop drafting when the draft's entropy says that acceptance has become unlikely (2410.18351)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.controllers.base import Controller, Observation, refuse_lengths
from specdec.errors import UsageError
from specdec.sampling.distributions import entropy_bits
from specdec.types import StepRecord


@dataclass(frozen=True)
class AdaEDLState:
    """One request's stopping threshold λ and its running acceptance."""

    threshold: float
    acceptance: float


class AdaEDLController(Controller):
    """Stops after a token drawn from Q where 1 − √(entropy_scale · H(Q)) < λ, a lower bound on its acceptance.

    H is in nats (for bits, entropy_scale is to be multiplied by ln 2). λ starts at `threshold` and follows the
    running acceptance: up by `step_size` where that is below `target_acceptance`, down where it is above, smoothed
    by `threshold_memory`; the acceptance by `acceptance_memory` (the schedule is that of adaptive draft exiting,
    Zhang et al. 2309.08168). Deterministic drafters are only limited to `max_draft_tokens`.
    """

    def __init__(
        self,
        threshold: float = 0.4,
        entropy_scale: float = 0.2,
        target_acceptance: float = 0.9,
        step_size: float = 0.01,
        acceptance_memory: float = 0.5,
        threshold_memory: float = 0.9,
        max_draft_tokens: int = 16,
    ) -> None:
        shares = {
            "threshold": threshold,
            "target_acceptance": target_acceptance,
            "step_size": step_size,
            "acceptance_memory": acceptance_memory,
            "threshold_memory": threshold_memory,
        }
        for name, value in shares.items():
            if not 0 <= value <= 1:
                raise UsageError(f"{name}={value} is not possible; use a value in [0, 1]")
        if not (math.isfinite(entropy_scale) and entropy_scale > 0):
            raise UsageError(f"entropy_scale={entropy_scale} is not possible; it must be above 0 (0.2 in the paper)")
        refuse_lengths(max_draft_tokens)
        self.threshold = threshold
        self.entropy_scale = entropy_scale
        self.target_acceptance = target_acceptance
        self.step_size = step_size
        self.acceptance_memory = acceptance_memory
        self.threshold_memory = threshold_memory
        self.max_draft_tokens = max_draft_tokens

    def init(self) -> AdaEDLState:
        """The initial threshold, at an acceptance that is on target."""
        return AdaEDLState(self.threshold, self.target_acceptance)

    def decide(self, states: Sequence[AdaEDLState], observation: Observation) -> list[int]:
        """As many as the bound allows."""
        return [self.max_draft_tokens] * len(states)

    def stop(self, states: Sequence[AdaEDLState], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Where the bound on acceptance is below each request's own threshold."""
        nats = entropy_bits(draft_probs) * math.log(2)
        thresholds = torch.tensor([state.threshold for state in states], device=nats.device)
        return 1 - (self.entropy_scale * nats).sqrt() < thresholds

    def update(self, state: AdaEDLState, step: StepRecord) -> AdaEDLState:
        """Raise the threshold where too little was accepted, lower it where too much."""
        if step.num_drafted == 0:
            return state
        kept, new = self.acceptance_memory, step.num_accepted / step.num_drafted
        acceptance = kept * state.acceptance + (1 - kept) * new
        direction = 1 if acceptance < self.target_acceptance else -1
        moved = min(max(state.threshold + direction * self.step_size, 0.0), 1.0)
        threshold = self.threshold_memory * state.threshold + (1 - self.threshold_memory) * moved
        return AdaEDLState(threshold, acceptance)
