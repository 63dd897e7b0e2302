"""Do two samples of continuations come from one distribution? A permutation test, its power, and a total variation.

Over a vocabulary of tens of thousands few continuations occur twice, and a table of them would show nothing. So every
token is replaced by a *code*: itself where it is common at its position; otherwise how likely it was (a quarter of the
sample by its probability under the target) and whether it occurs in the text before, where drafters copy from. Codes
and cells are made from both samples together, which relabelling leaves as they are, so the test stays exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.testing.fit import chi_square_tail

Codes = tuple[Hashable, ...]
Pair = tuple[list[Codes], list[Codes]]
"""Continuations of one context: by plain decoding, and by the arm."""

FEWEST_POOLED = 10
"""Outcomes that occur less often in both samples together share a cell."""

PERMUTATIONS = 20_000
_AT_ONCE = 4_000
_COMMON = 4  # tokens at each position that stand for themselves


@dataclass(frozen=True)
class Continuation:
    """tokens, each with its probability under the target."""

    tokens: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True)
class TwoSample:
    """cells: of the tables, all prompts together. degrees: cells less one per prompt. p_value: by permutation."""

    statistic: float
    degrees: int
    p_value: float
    cells: int


@dataclass(frozen=True)
class Distance:
    """Total variation of two distributions that are known by samples.

    held_out, low, high: what an event chosen on one half of the samples is worth on the other half, unbiased for a
    lower limit of the total variation, with its 95 % interval. plug_in: of the two tables as they are, biased upward by
    about `noise`, which is what two samples of one distribution show.
    """

    held_out: float
    low: float
    high: float
    plug_in: float
    noise: float


def coded(context: Sequence[int], plain: Sequence[Continuation], arm: Sequence[Continuation]) -> Pair:
    """Tokens as codes, position by position; both samples of one context, all of one length."""
    both = [*plain, *arm]
    known = set(context)
    columns: list[list[Hashable]] = []
    for position in range(len(both[0].tokens)):
        tokens = [sample.tokens[position] for sample in both]
        probs = np.array([sample.probs[position] for sample in both])
        common = {token for token, _ in Counter(tokens).most_common(_COMMON)}
        quarters = np.searchsorted(np.quantile(probs, (0.25, 0.5, 0.75)), probs).tolist()
        columns.append(
            [
                token if token in common else (quarter, token in known)
                for token, quarter in zip(tokens, quarters, strict=True)
            ]
        )
    codes: list[Codes] = list(zip(*columns, strict=True))
    return codes[: len(plain)], codes[len(plain) :]


def homogeneity_test(pairs: Sequence[Pair], seed: int = 0) -> TwoSample:
    """Pearson's chi-square of homogeneity, summed over prompts, with its permutation distribution.

    Under the null hypothesis labels may be exchanged within a prompt (Pitman 1937), so that the false-alarm rate is
    exact however sparse the tables are: a table's first row given both margins is multivariate hypergeometric.
    """
    rng = np.random.default_rng(seed)
    tables = [_table(*pair) for pair in pairs]
    observed = sum(float(_chi_square(table[:1], table.sum(0))[0]) for table in tables)
    exceeded = 0
    for _ in range(PERMUTATIONS // _AT_ONCE):
        permuted = np.zeros(_AT_ONCE)
        for table in tables:
            total = table.sum(0)
            permuted += _chi_square(_relabelled(rng, total, int(table[0].sum()), _AT_ONCE), total)
        exceeded += int((permuted >= observed * (1 - 1e-9)).sum())
    cells = sum(table.shape[1] for table in tables)
    return TwoSample(observed, cells - len(tables), (1 + exceeded) / (1 + PERMUTATIONS), cells)


def smallest_detectable(num_samples: int, degrees: int, false_alarm: float, power: float = 0.9) -> float:
    """The total variation that the test would find with the given power, whatever shape the difference has.

    num_samples: in either sample. Of all differences of total variation δ over the table's cells, the one with the
    smallest noncentrality is proportional to the cells' mass, where it is 2 · num_samples · δ²; the noncentrality
    that gives the power is found by bisection (a noncentral chi-square is a Poisson mixture of central ones).
    1.0 where even the largest would be missed.
    """
    if degrees < 1:
        return 1.0
    critical = _bisect(lambda x: chi_square_tail(x, degrees) > false_alarm, degrees + 2000.0)
    noncentrality = _bisect(lambda x: _noncentral_tail(critical, degrees, x) < power, 4000.0)
    return min(1.0, math.sqrt(noncentrality / (2 * num_samples)))


def total_variation(pairs: Sequence[Pair], seed: int = 0) -> Distance:
    """Between the arm and plain decoding, averaged over prompts."""
    rng = np.random.default_rng(seed)
    shares, variances, plugged, noise = [], [], [], []
    for plain, arm in pairs:
        for first, second in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
            event = _event(plain[first], arm[first])
            ours, theirs = (np.array([tokens in event for tokens in sample[second]]) for sample in (plain, arm))
            shares.append(theirs.mean() - ours.mean())
            variances.append(theirs.var() / len(theirs) + ours.var() / len(ours))
        table = _table(plain, arm)
        total = table.sum(0)
        relabelled = _relabelled(rng, total, int(table[0].sum()), 500)
        plugged.append(float(_plug_in(table[:1], total)[0]))
        noise.append(float(_plug_in(relabelled, total).mean()))
    value, error = float(np.mean(shares)), float(np.sqrt(np.sum(variances)) / len(variances))
    low, high = max(0.0, value - 1.96 * error), min(1.0, value + 1.96 * error)
    return Distance(max(0.0, value), low, high, float(np.mean(plugged)), float(np.mean(noise)))


def _table(plain: Sequence[Codes], arm: Sequence[Codes]) -> NDArray[np.int64]:
    """Counts [2, K]: plain decoding's, the arm's. The last cell holds what is rare."""
    counts = Counter(plain), Counter(arm)
    pooled = counts[0] + counts[1]
    own = [tokens for tokens, count in pooled.most_common() if count >= FEWEST_POOLED]
    rest = sum(pooled.values()) - sum(pooled[tokens] for tokens in own)
    while own and 0 < rest < FEWEST_POOLED:
        rest += pooled[own.pop()]
    rows = [[count[tokens] for tokens in own] for count in counts]
    rare = [sum(count.values()) - sum(row) for count, row in zip(counts, rows, strict=True)]
    return np.array([[*row, *([other] if rest else [])] for row, other in zip(rows, rare, strict=True)])


def _relabelled(rng: np.random.Generator, total: NDArray[np.int64], size: int, count: int) -> NDArray[np.int64]:
    """First rows [count, K] of tables with the margins of this one."""
    rows: NDArray[np.int64] = rng.multivariate_hypergeometric(total, size, size=count, method="marginals")
    return rows


def _chi_square(first: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
    """Statistics of tables with first rows [N, K] and column totals [K]: [N]."""
    size, whole = first.sum(1, keepdims=True), total.sum()
    expected = total * size / whole
    statistics: NDArray[np.float64] = ((first - expected) ** 2 / (expected * (1 - size / whole))).sum(1)
    return statistics


def _plug_in(first: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.float64]:
    size, whole = first.sum(1, keepdims=True), total.sum()
    distances: NDArray[np.float64] = np.abs(first / size - (total - first) / (whole - size)).sum(1) / 2
    return distances


def _event(plain: Sequence[Codes], arm: Sequence[Codes]) -> set[Codes]:
    """What the arm emits more often than plain decoding."""
    ours, theirs = Counter(plain), Counter(arm)
    return {tokens for tokens, count in theirs.items() if count * len(plain) > ours[tokens] * len(arm)}


def _noncentral_tail(value: float, degrees: int, noncentrality: float) -> float:
    """Probability that a noncentral chi-square variable exceeds the value."""
    mean = noncentrality / 2
    reach = int(mean + 12 * math.sqrt(mean + 1) + 20)
    terms = torch.arange(reach, dtype=torch.float64)
    weights = torch.exp(terms * math.log(mean) - mean - torch.lgamma(terms + 1)) if mean > 0 else (terms == 0).double()
    tails = torch.special.gammaincc(degrees / 2 + terms, torch.tensor(value / 2, dtype=torch.float64))
    return float(weights @ tails)


def _bisect(below: Callable[[float], bool], high: float) -> float:
    """Where `below`, true at 0, turns false."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
