"""Order statistics and intervals: known values, coverage by simulation, and naive intervals that must fail it."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.measurement.statistics import (
    bootstrap,
    order_statistic,
    proportion_interval,
    quantile_interval,
    rate_ratio,
    ratio,
    total_ratio,
    wilson,
)


def test_p99_is_never_floored():
    assert order_statistic(range(1, 51), 0.99) == 50
    assert order_statistic(range(1, 101), 0.99) == 99
    assert order_statistic(range(1, 102), 0.99) == 100
    assert order_statistic([3.0, 1.0, 2.0], 0.5) == 2.0
    assert math.isnan(order_statistic([], 0.99))


@pytest.mark.parametrize("n", [100, 1000])
def test_nearest_rank_survives_binary_fractions(n):
    values = np.arange(1, n + 1)
    for percent in range(1, 100):
        assert order_statistic(values, percent / 100) == percent * n // 100


def test_upper_limit_of_p99_needs_368_values():
    assert not quantile_interval(range(367), 0.99).bounded
    assert quantile_interval(range(368), 0.99).high == 367


def test_median_limits_are_the_textbook_ranks():
    # n = 10: ranks 2 and 9 give 1 - 2 * (1 + 10) / 1024 = 97.9 %; 3 and 8 only 89.1 %.
    interval = quantile_interval(range(1, 11), 0.5)
    assert (interval.low, interval.value, interval.high) == (2, 5, 9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_limits_bracket_an_observed_value(values, level):
    interval = quantile_interval(values, level, clusters=[i // 3 for i in range(len(values))])
    assert interval.low <= interval.value <= interval.high
    assert interval.value in values


def clustered(rng, requests=32, steps=40, share=0.3):
    """Standard normal values of which `share` of the variance belongs to the request."""
    clusters = np.repeat(np.arange(requests), steps)
    between = rng.normal(size=requests)[clusters] * math.sqrt(share)
    return between + rng.normal(size=requests * steps) * math.sqrt(1 - share), clusters


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_clustered_interval_covers_and_the_naive_one_does_not(level):
    rng, truth = np.random.default_rng(1), NormalDist().inv_cdf(level)
    covered = np.zeros(2)
    for _ in range(300):
        values, clusters = clustered(rng)
        for index, intervals in enumerate(
            (quantile_interval(values, level, clusters), quantile_interval(values, level))
        ):
            covered[index] += intervals.low <= truth <= intervals.high
    aware, naive = covered / 300
    # 95 % nominal: fewer than 270 of 300 has probability below 0.001.
    assert aware >= 0.90
    assert naive < 0.90


def test_one_request_says_nothing_about_others():
    assert not quantile_interval(range(1000), 0.99, clusters=np.zeros(1000)).bounded
    assert quantile_interval(range(1000), 0.99, clusters=np.arange(1000)).bounded


def test_wilson_known_value():
    interval = wilson(0.5, 100)
    assert (interval.low, interval.high) == (pytest.approx(0.40383, abs=1e-5), pytest.approx(0.59617, abs=1e-5))


def test_proportion_of_clusters_is_wider_than_of_independent_trials():
    rng = np.random.default_rng(0)
    trials = np.full(40, 25)
    together, size = proportion_interval(rng.binomial(25, rng.choice([0.3, 0.9], 40)), trials)
    assert size < 200
    assert together.high - together.low > 2 * (wilson(0.6, 1000).high - wilson(0.6, 1000).low)
    interval, _ = proportion_interval([25] * 40, trials)
    assert interval.value == interval.high == 1
    assert 0.9 < interval.low < 1
    assert proportion_interval([0], [0])[1] == 0


def test_totals_come_before_ratios():
    # The mean of per-prompt ratios would be (10 + 1) / 2 = 5.5.
    assert bootstrap([[10, 1], [10, 10]], total_ratio).value == pytest.approx(20 / 11)


def test_pairing_cancels_what_prompts_share():
    rng = np.random.default_rng(0)
    tokens, seconds = rng.integers(20, 200, 40), rng.lognormal(0, 1, 40)
    paired = np.column_stack([tokens, seconds / 2, tokens, seconds])
    interval = bootstrap(paired, rate_ratio)
    assert (interval.low, interval.value, interval.high) == pytest.approx((2, 2, 2))
    apart = np.column_stack([tokens, seconds / 2, tokens[::-1], seconds[::-1]])
    unpaired = bootstrap(apart, rate_ratio)
    assert unpaired.high - unpaired.low > 0.5


def test_bootstrap_covers_a_mean():
    rng, covered = np.random.default_rng(2), 0
    for seed in range(200):
        values = np.column_stack([rng.exponential(size=40), np.ones(40)])
        interval = bootstrap(values, total_ratio, num_resamples=400, seed=seed)
        covered += interval.low <= 1 <= interval.high
    assert 0.85 <= covered / 200 <= 0.99


def test_bootstrap_is_seeded_and_silent_where_it_knows_nothing():
    values = np.random.default_rng(0).random((30, 2))
    assert bootstrap(values, total_ratio, seed=1) == bootstrap(values, total_ratio, seed=1)
    assert bootstrap(values, total_ratio, seed=1) != bootstrap(values, total_ratio, seed=2)
    alone = bootstrap([[4, 2]], total_ratio)
    assert alone.value == 2
    assert math.isnan(alone.low)
    assert math.isnan(bootstrap([[0, 0], [0, 0]], total_ratio).value)
    assert math.isnan(bootstrap(np.empty((0, 2)), total_ratio).value)


def test_ratio_of_nothing_is_null():
    assert math.isnan(ratio(1, 0))
    assert math.isnan(ratio(None, 3))
    assert ratio(0, 3) == 0
