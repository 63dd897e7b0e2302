"""What an adaptive controller remembers: chances by position, step times, and what a workload's requests share."""

from __future__ import annotations

import math
from bisect import bisect_left

from specdec.errors import UsageError

Rows = tuple[list[float], list[float]]
"""Accepted and drafted, by position. Plain Python: with caches cold after a forward, numpy takes three times longer."""

_FIRST_GUESS = (0.5, 1.0)  # chances that a token is accepted, and drafted at all, where nothing was ever seen
_GUESS_WEIGHT = 2.0  # trials that a guess counts for


class Chances:
    """Trials and successes by position, older ones forgotten as newer ones come: two rows of `size`.

    Row 0, accepted: a token at position k was, given that all before it were; a draft that ended sooner than it was
    allowed to fails, too. Row 1, drafted: the drafter had a token at position k, given one at k − 1.
    """

    def __init__(self, size: int) -> None:
        self.trials: Rows = ([0.0] * size, [0.0] * size)
        self.successes: Rows = ([0.0] * size, [0.0] * size)

    def grow(self, size: int) -> None:
        """Follow at least `size` positions."""
        for row in (*self.trials, *self.successes):
            row += [0.0] * (size - len(row))

    def record(self, num_accepted: int, num_drafted: int, limit: int, forgetting: float) -> None:
        """One step that was allowed `limit` tokens: successes up to a count, then a failure where there was room."""
        for trials, successes, count in zip(self.trials, self.successes, (num_accepted, num_drafted), strict=True):
            for k in range(min(count + 1, limit)):  # a tree has more nodes than its depth
                trials[k] = trials[k] * forgetting + 1
                successes[k] = successes[k] * forgetting + (k < count)

    def means(self, prior: Rows, weight: float) -> Rows:
        """Posterior means: beta-binomial, prior means counting as `weight` trials."""
        accepted, drafted = (
            [(s + weight * p) / (t + weight) for t, s, p in zip(*rows, strict=True)]
            for rows in zip(self.trials, self.successes, prior, strict=True)
        )
        return accepted, drafted


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

    def factors(self, max_length: int) -> list[float]:
        """What predictions are to be multiplied by next to plain decoding's, [max_length + 1].

        Lengths that were never tried share what their neighbours have shown.
        """
        known = sorted(self._deviations)
        return [math.exp(self._between(known, length)) for length in range(max_length + 1)]

    def _between(self, known: list[int], length: int) -> float:
        """Log factor of a length: linear between those tried and plain decoding, constant beyond the last."""
        right = bisect_left(known, length)
        if right == len(known):
            return self._deviations[known[-1]][0] if known else 0.0
        n1, y1 = known[right], self._deviations[known[right]][0]
        n0, y0 = (known[right - 1], self._deviations[known[right - 1]][0]) if right else (0, 0.0)
        return y0 + (y1 - y0) * (length - n0) / (n1 - n0)


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

    def begin(self, size: int) -> Rows:
        """One more request; mean chances of positions 1 … size, rows as in `Chances`."""
        self.num_requests += 1
        self._chances.grow(size)
        (tried, tried_drafting), (accepted, drafted) = self._chances.trials, self._chances.successes
        guess, guess_drafting = _FIRST_GUESS
        return _smoothed(tried, accepted, guess)[:size], _smoothed(tried_drafting, drafted, guess_drafting)[:size]

    def record(self, num_accepted: int, num_drafted: int, limit: int) -> None:
        """One decode step that was allowed `limit` draft tokens."""
        if not self.frozen:
            self._chances.record(num_accepted, num_drafted, limit, 1 - 1 / self.memory)


def _smoothed(trials: list[float], successes: list[float], guess: float) -> list[float]:
    """Means by position; one that was seldom reached is taken to be like the one before it."""
    means = []
    for tried, succeeded in zip(trials, successes, strict=True):
        guess = (succeeded + _GUESS_WEIGHT * guess) / (tried + _GUESS_WEIGHT)
        means.append(guess)
    return means
