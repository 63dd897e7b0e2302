"""Bandits over speculation lengths, plain decoding among them: tokens per second, learned by trying.

Compare BanditSpec (2505.15141), whose arms are configurations and whose reward is accepted length; here the reward is
what a step is for, emitted tokens per second, in units of plain decoding's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.controllers.base import Controller, Observation
from specdec.errors import UsageError
from specdec.types import StepRecord

DEFAULT_LENGTHS = (0, 1, 2, 3, 5, 8, 12)


class ArmStatistics:
    """What trying each length has brought so far. Hand one object to every controller that shall share it.

    A request is too short to learn alone, so this lives as long as its workload: it is learned from step by step, for
    `learning_requests` requests (None: always), and then stays as it is. `discount` is what one step leaves of the
    weight of all earlier ones: 0.998 remembers about 500 steps.
    """

    def __init__(self, discount: float = 0.998, learning_requests: int | None = None) -> None:
        if not 0 < discount <= 1:
            raise UsageError(f"discount={discount} is not possible; use a value in (0, 1]")
        if learning_requests is not None and learning_requests < 0:
            raise UsageError(f"learning_requests={learning_requests} is negative; use null to learn always")
        self.discount = discount
        self.learning_requests = learning_requests
        self.num_requests = 0
        self._totals: dict[int, list[float]] = {}  # length → [weight, tokens, seconds, Σ (tokens ÷ seconds)²]

    @property
    def frozen(self) -> bool:
        """Whether it has stopped learning."""
        return self.learning_requests is not None and self.num_requests > self.learning_requests

    def record(self, length: int, step: StepRecord) -> None:
        """One step of a request that drafted up to `length` tokens."""
        if self.frozen:
            return
        for totals in self._totals.values():
            totals[:] = [self.discount * value for value in totals]
        own = self._totals.setdefault(length, [0.0] * 4)
        seconds = max(step.seconds, 1e-9)
        found = (1.0, step.num_emitted, seconds, (step.num_emitted / seconds) ** 2)
        own[:] = [value + new for value, new in zip(own, found, strict=True)]

    def weight(self, length: int) -> float:
        """Discounted number of tries."""
        return self._totals.get(length, [0.0])[0]

    def rate(self, length: int) -> float:
        """Tokens per second: totals first, then the ratio, as in any renewal process. Needs a try."""
        _, tokens, seconds, _ = self._totals[length]
        return tokens / seconds

    def spread(self, length: int) -> float:
        """Standard deviation of one step's tokens per second about `rate`."""
        weight, _, _, squares = self._totals[length]
        return math.sqrt(max(squares / weight - self.rate(length) ** 2, 0.0))


@dataclass
class _Pulled:
    """The length a request was last allowed."""

    length: int = 0


class BanditController(Controller):
    """Chooses one of `lengths` for the whole batch before every step. `index` is what makes a bandit of it."""

    request_local = False

    def __init__(self, lengths: Sequence[int], statistics: ArmStatistics | None) -> None:
        if not lengths or min(lengths) < 0 or len(set(lengths)) != len(lengths):
            raise UsageError(f"lengths={list(lengths)} is not possible; name different numbers of tokens, 0 or more")
        if max(lengths) < 1:
            raise UsageError("lengths=[0] never drafts; use the fixed controller with num_draft_tokens=0")
        self.lengths = tuple(sorted(lengths))
        self.max_draft_tokens = self.lengths[-1]
        self.statistics = ArmStatistics() if statistics is None else statistics

    @abstractmethod
    def index(self, length: int) -> float:
        """What the bandit promises itself of a length that has been tried; the greatest is chosen."""

    def init(self) -> Any:
        """Nothing pulled; one more request that statistics may learn from."""
        self.statistics.num_requests += 1
        return _Pulled()

    def decide(self, states: Sequence[_Pulled], observation: Observation) -> list[int]:
        """The first length that was never tried, else the one of the greatest index."""
        untried = [length for length in self.lengths if self.statistics.weight(length) == 0]
        chosen = untried[0] if untried and not self.statistics.frozen else self._best(untried)
        for state in states:
            state.length = chosen
        return [chosen] * len(states)

    def update(self, state: _Pulled, step: StepRecord) -> _Pulled:
        """Credit the length that the step was allowed."""
        if step.step > 0:
            self.statistics.record(state.length, step)
        return state

    def _best(self, untried: Sequence[int]) -> int:
        tried = [length for length in self.lengths if length not in untried]
        return max(tried, key=self.index, default=self.lengths[0])

    def _unit(self) -> float:
        """Tokens per second of the shortest length tried: plain decoding, where that is among them."""
        return self.statistics.rate(next(length for length in self.lengths if self.statistics.weight(length) > 0))


class UCBController(BanditController):
    """Upper confidence bound: rate + exploration · spread · √(2 ln t ÷ n), over discounted tries (Garivier 0805.3415).

    exploration: 1 is the usual bound; smaller trusts earlier.
    """

    def __init__(
        self,
        lengths: Sequence[int] = DEFAULT_LENGTHS,
        exploration: float = 0.5,
        statistics: ArmStatistics | None = None,
    ) -> None:
        if not exploration >= 0:
            raise UsageError(f"exploration={exploration} is not possible; it must be at least 0")
        super().__init__(lengths, statistics)
        self.exploration = exploration

    def index(self, length: int) -> float:
        """The upper limit of the length's rate, in plain decoding's."""
        statistics, unit = self.statistics, self._unit()
        tries = sum(map(statistics.weight, self.lengths))
        spread = max(statistics.spread(length) / unit, 0.1)
        bonus = spread * math.sqrt(2 * math.log(max(tries, 1.0)) / statistics.weight(length))
        return statistics.rate(length) / unit + self.exploration * bonus


class ThompsonController(BanditController):
    """Thompson sampling: a draw from each length's normal posterior of its rate; the greatest draw is chosen.

    seed: of the draws, which are the bandit's own and never touch a request's uniforms.
    """

    def __init__(
        self, lengths: Sequence[int] = DEFAULT_LENGTHS, seed: int = 0, statistics: ArmStatistics | None = None
    ) -> None:
        super().__init__(lengths, statistics)
        self._draws = np.random.default_rng(seed)

    def index(self, length: int) -> float:
        """One draw of the length's rate, in plain decoding's."""
        statistics, unit = self.statistics, self._unit()
        spread = max(statistics.spread(length) / unit, 0.1)
        draw = float(self._draws.standard_normal())
        return statistics.rate(length) / unit + draw * spread / math.sqrt(max(statistics.weight(length), 1e-9))
