"""Draft as many tokens as pay: the most expected tokens per predicted second, and none where plain decoding wins.

SmartSpec (2406.14066) maximises goodput with a fitted model of step time and a running acceptance rate, and vLLM's
adaptive verification follows it; here survival is learned per position and per request, what a drafter leaves
unanswered is learned too, and what exploring costs is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.controllers.base import Controller, Observation, refuse_lengths
from specdec.controllers.learning import Chances, Rows, WorkloadPrior
from specdec.costmodel import GUESS, StepCosts
from specdec.errors import UsageError
from specdec.types import StepRecord

_PLAIN_STEP_CHARGE = 0.3


@dataclass
class CostAwareState:
    """One request: its own counts, the chances it began with, its last allowance, and seconds it may explore for."""

    chances: Chances
    prior: Rows
    allowed: int = 0
    credit_seconds: float = 0.0


class CostAwareController(Controller):
    """Maximises (Σ expected emitted tokens) ÷ (expected step seconds) over lengths 0 … `max_draft_tokens`.

    One length for the whole batch: a forward is as wide as its longest row, so that a row gains nothing by asking for
    less. forgetting: what one step leaves of the weight of all earlier trials. prior_weight: trials that the workload's
    prior counts for in each request: with few, a handful of trials decides, and seldom for the best length. probing:
    share of decoding time that may be spent on steps that are expected to lose, to notice when a request becomes
    predictable, or drafting expensive. prior: what requests share; None: an own one. costs: where they are known;
    None: measured (`bind`), else guessed. Both are corrected by what steps take.
    """

    request_local = False

    def __init__(
        self,
        max_draft_tokens: int = 16,
        forgetting: float = 0.95,
        prior_weight: float = 10.0,
        probing: float = 0.005,
        prior: WorkloadPrior | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        if not 0 <= forgetting <= 1:
            raise UsageError(f"forgetting={forgetting} is not possible; use a value in [0, 1]")
        if not prior_weight > 0:
            raise UsageError(f"prior_weight={prior_weight} is not possible; it must be above 0")
        if not 0 <= probing <= 1:
            raise UsageError(f"probing={probing} is not possible; use a share of time in [0, 1], such as 0.005")
        refuse_lengths(max_draft_tokens)
        self.max_draft_tokens = max_draft_tokens
        self.forgetting = forgetting
        self.prior_weight = prior_weight
        self.probing = probing
        self.prior = WorkloadPrior() if prior is None else prior
        self._known = costs
        self._costs = GUESS if costs is None else costs
        self._tables: dict[int, list[float]] = {}

    def bind(self, measure: Callable[[], StepCosts]) -> None:
        """Measure step costs, unless they were given."""
        if self._known is None:
            self._costs = measure()
            self._tables.clear()

    def init(self) -> Any:
        """Nothing of its own yet."""
        return CostAwareState(Chances(self.max_draft_tokens), self.prior.begin(self.max_draft_tokens))

    def decide(self, states: Sequence[CostAwareState], observation: Observation) -> list[int]:
        """The length of the best rate for all, as far as each request may still emit tokens."""
        rooms = [max(left - 1, 0) for left in observation.remaining]
        length = self._explored(states, *self._outlook(states, rooms))
        allowed = [min(room, length) for room in rooms]
        for state, limit in zip(states, allowed, strict=True):
            state.allowed = limit
        return allowed

    def update(self, state: CostAwareState, step: StepRecord) -> CostAwareState:
        """Learn from one decode step: chances for the request and its workload, step time for the machine."""
        if step.step == 0:
            return state
        state.chances.record(step.num_accepted, step.num_drafted, state.allowed, self.forgetting)
        self.prior.record(step.num_accepted, step.num_drafted, state.allowed)
        if step.batch_size == 1 and step.num_drafted <= state.allowed:  # a row knows no batch's width, no tree's depth
            self._learn_times(step)
        return state

    def _learn_times(self, step: StepRecord) -> None:
        """Drafting is compared with the rest of the same step, the rest with other steps."""
        length, times, table = step.num_drafted, self.prior.times, self._table(1)
        ratio = max((step.seconds - step.draft_seconds) / table[length], 1e-9)
        if length > 0:
            drafting = step.draft_seconds / times.pace(length, ratio)
            times.record_drafting(length, (drafting - self._costs.drafting(length)) / table[0])
        times.record(length, ratio)

    def _outlook(self, states: Sequence[CostAwareState], rooms: Sequence[int]) -> tuple[list[float], list[float]]:
        """Expected tokens of the batch and seconds of the step, by length allowed: 0 to the most there is room for."""
        most = min(max(rooms), self.max_draft_tokens)
        factors = self.prior.times.factors(most)
        drafting = self._drafting(most)
        verifying = zip(self._table(len(states)), factors, strict=False)
        times = [seconds * factor + draft for (seconds, factor), draft in zip(verifying, drafting, strict=False)]
        emitted, seconds = [float(len(states))], [times[0]]
        alive, offered = [1.0] * len(states), [1.0] * len(states)
        means = [state.chances.means(state.prior, self.prior_weight) for state in states]
        for k in range(most):
            for row, (accepted, drafted) in enumerate(means):
                alive[row] *= accepted[k] if k < rooms[row] else 0.0
                offered[row] *= drafted[k] if k < rooms[row] else 0.0
            wider = 1 - math.prod(1 - chance for chance in offered)  # chance that some row has a draft that long
            asked = self._costs.draft_fixed_seconds * (1 - wider) if k == 0 else 0.0  # and it has nothing to say
            emitted.append(emitted[-1] + sum(alive))
            seconds.append(seconds[-1] + asked + wider * (times[k + 1] - times[k]))
        return emitted, seconds

    def _explored(self, states: Sequence[CostAwareState], emitted: list[float], seconds: list[float]) -> int:
        """The best length, or where enough time has been saved up for what that is expected to lose, the other kind.

        One draft token where plain decoding is best, to see whether it still is; none where drafting is, for without
        a plain step now and then a slow machine and an expensive draft look the same. That teaches nothing else, so it
        is charged for a part of its duration even where it loses less.
        """
        best = max(range(len(emitted)), key=lambda length: emitted[length] / seconds[length])
        other = int(best == 0)
        if other == len(emitted):  # no room to draft
            return best
        loss = seconds[other] - seconds[best] * emitted[other] / emitted[best]
        if other == 0:
            loss = max(loss, _PLAIN_STEP_CHARGE * seconds[0])
        explores = sum(state.credit_seconds for state in states) >= len(states) * loss
        for state in states:
            state.credit_seconds += self.probing * seconds[0] - (loss if explores else 0.0)
        return other if explores else best

    def _drafting(self, most: int) -> list[float]:
        """Predicted seconds of drafting 0 … `most` tokens, corrected."""
        token = self.prior.times.draft_token * self._table(1)[0]
        return [max(self._costs.drafting(length) + length * token, 0.0) for length in range(most + 1)]

    def _table(self, batch_size: int) -> list[float]:
        """Predicted seconds by draft length without drafting, [max_draft_tokens + 1], before corrections."""
        if batch_size not in self._tables:
            lengths = range(self.max_draft_tokens + 1)
            self._tables[batch_size] = [self._costs.verifying(batch_size * (n + 1)) for n in lengths]
        return self._tables[batch_size]
