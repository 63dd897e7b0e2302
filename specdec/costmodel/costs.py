"""What a decode step costs on one machine, as measured, and what follows from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from specdec.errors import UsageError


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a decode step, drafting apart from all the rest.

    num_tokens: tokens the target read in one forward, ascending from 1 (the root alone: plain decoding).
    step_seconds: forward, verification, roll back and records of such a step. draft_fixed_seconds: what asking the
    drafter costs at all; draft_each_seconds: and per token it drafts.
    """

    num_tokens: tuple[int, ...]
    step_seconds: tuple[float, ...]
    draft_fixed_seconds: float = 0.0
    draft_each_seconds: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.num_tokens, self.num_tokens[1:], strict=False))
        if len(self.num_tokens) < 2 or self.num_tokens[0] != 1 or not ascending:
            raise UsageError(f"num_tokens={self.num_tokens} must ascend from 1, with at least two entries")
        if len(self.step_seconds) != len(self.num_tokens) or min(self.step_seconds) <= 0:
            raise UsageError(f"step_seconds={self.step_seconds} must be positive, one per entry of {self.num_tokens}")
        if min(self.draft_fixed_seconds, self.draft_each_seconds) < 0:
            raise UsageError("draft costs must not be negative")

    def seconds(self, gamma: int, draft_steps: int | None = None, batch_size: int = 1) -> float:
        """A step that verifies gamma draft tokens per row, made in draft_steps steps of the drafter (None: gamma)."""
        steps = gamma if draft_steps is None else draft_steps
        return self.verifying(batch_size * (gamma + 1)) + self.drafting(steps)

    def drafting(self, steps: int) -> float:
        """What a draft made in so many steps of the drafter costs, asking included; nothing where it is not asked."""
        return self.draft_fixed_seconds + steps * self.draft_each_seconds if steps else 0.0

    def verifying(self, num_tokens: int) -> float:
        """A step without its draft, by tokens in the forward: linear between the measured, and beyond them."""
        right = next((i for i, n in enumerate(self.num_tokens) if n >= num_tokens), len(self.num_tokens) - 1)
        right = max(right, 1)
        (n0, n1), (t0, t1) = self.num_tokens[right - 1 : right + 1], self.step_seconds[right - 1 : right + 1]
        slope = (t1 - t0) / (n1 - n0)
        return t1 + (max(slope, 0.0) if num_tokens > n1 else slope) * (num_tokens - n1)

    @property
    def c(self) -> float:
        """One draft token ÷ one plain step, what asking costs at all included."""
        return (self.draft_fixed_seconds + self.draft_each_seconds) / self.step_seconds[0]

    def v(self, gamma: int) -> float:
        """Verifying gamma tokens ÷ one plain step."""
        return self.verifying(gamma + 1) / self.step_seconds[0]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StepCosts:
        """The inverse of `to_json`; raises `ValueError`, `KeyError` or `TypeError` where the text is none."""
        fields = json.loads(text)
        return cls(
            tuple(fields["num_tokens"]),
            tuple(fields["step_seconds"]),
            fields["draft_fixed_seconds"],
            fields["draft_each_seconds"],
        )


GUESS = StepCosts((1, 2, 9, 17), (1.0, 1.05, 1.2, 1.5), draft_each_seconds=0.1)
"""In plain steps, where nobody has measured: a memory-bound target, and a drafter of a tenth of its size."""
