"""What an adaptive controller remembers: chances by position, step times, and what a workload's requests share."""

from __future__ import annotations

import math
from bisect import bisect_left

from specdec.errors import UsageError

Rows = tuple[list[float], list[float]]
"""Accepted and drafted, by position. Plain Python: with caches cold after a forward, numpy takes three times longer."""

_FIRST_GUESS = (0.5, 1.0)  # chances that a token is accepted, and drafted at all, where nothing was ever seen
_GUESS_WEIGHT = 2.0  # trials that a guess counts for
_MOST_SURPRISE = 0.3  # of a step's time: more is an interruption, and says nothing
_CALIBRATION_WEIGHT = 4.0  # drafts that the calibration's draft cost counts for
_MEMORY = 100.0  # steps that a mean of step times looks back on


class Chances:
    """Trials and successes by position, forgotten as steps pass: two rows of `size`.

    What is known of a position that is not tried any more fades too, so that a few unlucky trials do not keep a request
    from that length for good: its estimate returns to the prior, and the length is tried again.

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
            reached = min(count + 1, limit)  # a tree has more nodes than its depth
            for k in range(len(trials)):
                trials[k] = trials[k] * forgetting + (k < reached)
                successes[k] = successes[k] * forgetting + (k < min(count, reached))

    def means(self, prior: Rows, weight: float) -> Rows:
        """Posterior means: beta-binomial, prior means counting as `weight` trials."""
        accepted, drafted = (
            [(s + weight * p) / (t + weight) for t, s, p in zip(*rows, strict=True)]
            for rows in zip(self.trials, self.successes, prior, strict=True)
        )
        return accepted, drafted


class StepTimes:
    """How far step times are from what was predicted, relative to plain decoding's.

    Verifying, and all else but drafting: a factor per draft length. Steps of the same length in a row tell how fast the
    machine is now; only a change of length tells about lengths, so that a slow minute is not blamed on one.
    Drafting: plain steps per draft token. Every draft tells, for the rest of the same step tells how fast the machine
    was. `draft_token`: what a draft token costs beyond what was predicted. Single steps are clipped at ± 30 %.
    """

    def __init__(self) -> None:
        self.draft_token = 0.0
        self._drafts = 0
        self._level = math.nan
        self._last = 0
        self._deviations: dict[int, tuple[float, int]] = {}  # length → (log factor, changes seen)

    def record(self, length: int, ratio: float) -> None:
        """ratio: measured ÷ predicted seconds, without drafting, of a step that drafted `length` tokens; above 0."""
        found = math.log(self.pace(length, ratio))
        if math.isnan(self._level):
            self._level = found
        surprise = _clipped(found - self._level)
        self._level += 0.1 * surprise
        if length != self._last:
            self._blame(length, surprise)
            self._blame(self._last, -surprise)
        self._last = length

    def pace(self, length: int, ratio: float) -> float:
        """How slow the machine was in such a step: its ratio, without what the length itself is known to differ by."""
        return ratio * math.exp(-self._deviations.get(length, (0.0, 0))[0])

    def record_drafting(self, length: int, excess: float) -> None:
        """excess: plain steps that drafting `length` tokens took beyond what was predicted before corrections."""
        surprise = _clipped(excess - length * self.draft_token) / length
        self.draft_token += surprise / min(self._drafts + _CALIBRATION_WEIGHT, _MEMORY)
        self._drafts += 1

    def _blame(self, length: int, surprise: float) -> None:
        if length > 0:
            deviation, seen = self._deviations.get(length, (0.0, 0))
            self._deviations[length] = (deviation + surprise / min(seen + 8, _MEMORY), seen + 1)

    def factors(self, max_length: int) -> list[float]:
        """What predictions, without drafting, are to be multiplied by next to plain decoding's, [max_length + 1].

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
        """One decode step that was allowed `limit` draft tokens; one that was allowed none leaves everything as it was.

        Where plain decoding is best, a prior that faded would make every request try drafting anew.
        """
        if limit > 0 and not self.frozen:
            self._chances.record(num_accepted, num_drafted, limit, 1 - 1 / self.memory)


def _clipped(surprise: float) -> float:
    return min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)


def _smoothed(trials: list[float], successes: list[float], guess: float) -> list[float]:
    """Means by position; one that was seldom reached is taken to be like the one before it."""
    means = []
    for tried, succeeded in zip(trials, successes, strict=True):
        guess = (succeeded + _GUESS_WEIGHT * guess) / (tried + _GUESS_WEIGHT)
        means.append(guess)
    return means
