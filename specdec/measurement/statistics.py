"""Order statistics, proportions and ratios, with intervals that know that steps of one request belong together.

Every interval is two-sided. `nan` means that nothing can be said, `inf` that the data set no upper limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Totals = Callable[[Floats], Floats]
"""[R, k] totals of k columns in each of R resamples → [R] values of the statistic."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence limits, in the estimate's own unit."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        """Whether the data set an upper limit."""
        return math.isfinite(self.high)


UNKNOWN = Interval(math.nan, math.nan, math.nan)


def ratio(numerator: float | None, denominator: float | None) -> float:
    """The quotient of two totals; nan where either was not observed or nothing was counted below."""
    if numerator is None or denominator is None or denominator == 0:
        return math.nan
    return numerator / denominator


def order_statistic(values: ArrayLike, level: float) -> float:
    """The quantile by nearest rank, x_(ceil(level · n)): always a value that occurred. nan without values.

    The rank is never floored: the 0.99 quantile of 1..50 is 50.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    if not len(ordered):
        return math.nan
    return float(ordered[_nearest_rank(len(ordered), level) - 1])


def quantile_interval(
    values: ArrayLike, level: float, clusters: ArrayLike | None = None, confidence: float = 0.95
) -> Interval:
    """A quantile by order statistic with a distribution-free interval from two other order statistics.

    values: [n]. clusters: [n], which request each value comes from; None when all are independent.

    For independent values the number at or below the true quantile is Binomial(n, level), so the limits are
    order statistics whose ranks the binomial gives (David & Nagaraja, Order Statistics, 7.1). The upper limit is
    inf when even the largest value is not surely above the quantile: below 368 values for p99 at 95 %.

    Steps of one request are alike (same context, same text), so n of them tell less than n. The ranks are taken at
    the effective sample size n / design effect of the share above the quantile, shrunk once more for the number of
    requests (Korn & Graubard 1998, the construction for small expected counts), and mapped back to the whole
    sample. Chosen over a bootstrap because resampled maxima never exceed the observed one: a percentile bootstrap
    of p99 covers 64 % at n = 100.
    """
    numbers = np.asarray(values, dtype=float)
    n = len(numbers)
    if n == 0:
        return UNKNOWN
    order = np.argsort(numbers, kind="stable")
    ordered, value = numbers[order], order_statistic(numbers, level)
    size = n if clusters is None else _effective_size(numbers > value, np.asarray(clusters), confidence)
    lower, upper = _binomial_ranks(size, level, confidence)
    low = float(ordered[math.floor(n * (lower - 1) / size)]) if lower else -math.inf
    high = float(ordered[math.ceil(n * upper / size) - 1]) if upper else math.inf
    return Interval(value, low, high)


def proportion_interval(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> tuple[Interval, float]:
    """Total successes ÷ total trials with Wilson limits at the effective sample size, and that size.

    successes, trials: [m] counts, one pair per request.
    """
    hits, tries = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    total = float(tries.sum())
    if total == 0:
        return UNKNOWN, 0.0
    share = float(hits.sum()) / total
    size = total / _deflation(hits, tries, confidence)
    return wilson(share, size, confidence), size


def wilson(share: float, size: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion `share` among `size` independent trials (a real number > 0)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return Interval(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def bootstrap(
    values: ArrayLike, statistic: Totals, confidence: float = 0.95, num_resamples: int = 4000, seed: int = 0
) -> Interval:
    """Percentile bootstrap over prompts of a function of totals.

    values: [n, k], one row per prompt; rows are drawn together, so columns of one prompt stay paired.
    statistic: [R, k] totals → [R]. Totals come before ratios: `lambda t: t[:, 0] / t[:, 1]`. A single prompt
    gives a value without limits (nan).
    """
    table = np.asarray(values, dtype=float)
    n = len(table)
    if n == 0:
        return UNKNOWN
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(axis=0, keepdims=True))[0])
    if n == 1 or not math.isfinite(value):
        return Interval(value, math.nan, math.nan)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=num_resamples)  # [R, n]
    tail = (1 - confidence) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = statistic(weights @ table)
    low, high = np.nanquantile(resampled, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def total_ratio(totals: Floats) -> Floats:
    """[R, 2] → [R]: first total ÷ second."""
    return totals[:, 0] / totals[:, 1]


def rate_ratio(totals: Floats) -> Floats:
    """[R, 4] → [R]: the rate of columns 0, 1 ÷ the rate of columns 2, 3, as a speedup is made."""
    return (totals[:, 0] / totals[:, 1]) / (totals[:, 2] / totals[:, 3])


def _nearest_rank(n: int, level: float) -> int:
    """ceil(level · n), from 1, without the half-ulp that makes ceil(0.07 · 100) an 8."""
    return max(1, math.ceil(round(level * n, 9)))


def _binomial_ranks(n: int, level: float, confidence: float) -> tuple[int, int]:
    """Ranks, from 1, of the lower and upper order statistic; 0 where there is none."""
    tail = (1 - confidence) / 2
    below = _binomial_cdf(n, level)  # below[k] = P(N <= k)
    lower = int(np.searchsorted(below, tail, side="right"))  # the largest rank with P(N <= rank - 1) <= tail
    upper = int(np.searchsorted(below, 1 - tail, side="left")) + 1  # the smallest with P(N >= rank) <= tail
    return lower, upper if upper <= n else 0


def _binomial_cdf(n: int, level: float) -> Floats:
    """[n + 1] values P(N <= k), N ~ Binomial(n, level)."""
    k = np.arange(1, n + 1)
    steps = np.log((n - k + 1) / k) + math.log(level) - math.log1p(-level)
    logs = np.concatenate([[0.0], np.cumsum(steps)]) + n * math.log1p(-level)
    return np.asarray(np.cumsum(np.exp(logs)), dtype=float)


def _effective_size(hits: NDArray[np.bool_], clusters: NDArray[np.generic], confidence: float) -> int:
    """How many independent values n clustered ones are worth; at least 1, at most n."""
    _, members = np.unique(clusters, return_inverse=True)
    trials = np.bincount(members).astype(float)
    above = np.bincount(members, weights=hits).astype(float)
    return max(1, math.floor(len(hits) / _deflation(above, trials, confidence)))


def _deflation(hits: Floats, trials: Floats, confidence: float) -> float:
    """Design effect of a proportion, at least 1, times Korn & Graubard's (t / z)² for few clusters.

    hits, trials: [m] per cluster. One cluster says nothing about others: it is worth one value.
    """
    clusters, total = len(trials), float(trials.sum())
    if clusters < 2:
        return total
    if trials.max() == 1:
        return 1.0
    share = float(hits.sum()) / total
    deviations = float(((hits - share * trials) ** 2).sum())
    between = clusters / (clusters - 1) * deviations / total**2
    within = share * (1 - share) / total
    effect = max(1.0, between / within) if within > 0 else 1.0
    z, t = _student_quantile(total - 1, confidence), _student_quantile(clusters - 1, confidence)
    return effect * max(1.0, t / z) ** 2


def _student_quantile(freedom: float, confidence: float) -> float:
    """Two-sided quantile of Student's t by its expansion in 1 / freedom (Abramowitz & Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
