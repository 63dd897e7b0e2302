"""What an adaptive controller remembers: chances by position, step times, and what a workload's requests share."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from specdec.errors import UsageError

Floats = npt.NDArray[np.float64]

_FIRST_GUESS = (0.5, 1.0)  # chances that a token is accepted, and drafted at all, where nothing was ever seen
_GUESS_WEIGHT = 2.0  # trials that a guess counts for


class Chances:
    """Trials and successes by position, older ones forgotten as newer ones come: [2, size].

    Row 0, accepted: a token at position k was, given that all before it were; a draft that ended sooner than it was
    allowed to fails, too. Row 1, drafted: the drafter had a token at position k, given one at k − 1.
    """

    def __init__(self, size: int) -> None:
        self.trials: Floats = np.zeros((2, size))
        self.successes: Floats = np.zeros((2, size))

    def record(self, num_accepted: int, num_drafted: int, limit: int, forgetting: float) -> None:
        """One step that was allowed `limit` tokens: successes up to a count, then a failure where there was room."""
        for row, count in enumerate((num_accepted, num_drafted)):
            reached = min(count, limit)  # a tree has more nodes than its depth
            trials, successes = self.trials[row, : min(reached + 1, limit)], self.successes[row]
            trials *= forgetting
            trials += 1
            successes[: len(trials)] *= forgetting
            successes[:reached] += 1

    def means(self, prior: Floats, weight: float) -> Floats:
        """Posterior means, [2, size]: beta-binomial, prior means counting as `weight` trials."""
        estimates: Floats = (self.successes + weight * prior) / (self.trials + weight)
        return estimates


class StepTimes:
    """How far step times are from what was predicted: a factor per draft length, relative to plain decoding's.

    Steps of the same length in a row tell how fast the machine is now; only a change of length tells about lengths,
    so that a slow minute is not blamed on one. Single steps are clipped at about ± 30 %: interruptions say nothing.
    """

    def __init__(self) -> None:
        self._level = math.nan
        self._last = 0
        self._deviations: dict[int, tuple[float, int]] = {}  # length → (log factor, changes seen)

    def record(self, length: int, ratio: float) -> None:
        """ratio: measured ÷ predicted seconds of a step that drafted `length` tokens."""
        found = math.log(max(ratio, 1e-9)) - self._deviations.get(length, (0.0, 0))[0]
        if math.isnan(self._level):
            self._level = found
        surprise = min(max(found - self._level, -0.3), 0.3)
        self._level += 0.1 * surprise
        if length != self._last:
            self._blame(length, surprise)
            self._blame(self._last, -surprise)
        self._last = length

    def _blame(self, length: int, surprise: float) -> None:
        if length > 0:
            deviation, seen = self._deviations.get(length, (0.0, 0))
            self._deviations[length] = (deviation + surprise / min(seen + 8, 100), seen + 1)

    def factors(self, max_length: int) -> Floats:
        """What predictions are to be multiplied by, [max_length + 1], the general speed included.

        Lengths that were never tried share what their neighbours have shown.
        """
        known = sorted(self._deviations)
        deviations = [0.0, *(self._deviations[length][0] for length in known)]
        logs: Floats = np.interp(np.arange(max_length + 1), [0, *known], deviations) + np.nan_to_num(self._level)
        return np.exp(logs)


class WorkloadPrior:
    """What requests of one workload have in common. Hand one object to every controller that shall share it.

    A request begins with the means it finds here, and every step is recorded here: for the first `learning_requests`
    requests (None: for all), after which the prior stays as it is, for measurements that must not depend on their
    order. Step times are the machine's and go on being followed. `memory`: trials remembered at each position.
    """

    def __init__(self, learning_requests: int | None = None, memory: float = 500.0) -> None:
        if learning_requests is not None and learning_requests < 0:
            raise UsageError(f"learning_requests={learning_requests} is negative; use null to learn always")
        if not memory >= 1:
            raise UsageError(f"memory={memory} is not possible; it must be at least 1 trial")
        self.learning_requests = learning_requests
        self.memory = memory
        self.num_requests = 0
        self.times = StepTimes()
        self._chances = Chances(0)

    @property
    def frozen(self) -> bool:
        """Whether it has stopped learning."""
        return self.learning_requests is not None and self.num_requests > self.learning_requests

    def begin(self, size: int) -> Floats:
        """One more request; mean chances of positions 1 … size, [2, size], rows as in `Chances`."""
        self.num_requests += 1
        known = self._chances.trials.shape[1]
        if known < size:
            grown = Chances(size)
            grown.trials[:, :known], grown.successes[:, :known] = self._chances.trials, self._chances.successes
            self._chances = grown
        return self._means()[:, :size]

    def record(self, num_accepted: int, num_drafted: int, limit: int) -> None:
        """One decode step that was allowed `limit` draft tokens."""
        if not self.frozen:
            self._chances.record(num_accepted, num_drafted, limit, 1 - 1 / self.memory)

    def _means(self) -> Floats:
        """A position that was seldom reached is taken to be like the one before it."""
        guess, columns = np.array(_FIRST_GUESS), []
        for trials, successes in zip(self._chances.trials.T, self._chances.successes.T, strict=True):
            guess = (successes + _GUESS_WEIGHT * guess) / (trials + _GUESS_WEIGHT)
            columns.append(guess)
        return np.stack(columns, axis=1)
