"""Every number of the theory, from the papers or by direct enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.costmodel import (
    attention_score_bytes,
    decode_intensity,
    draft_acceptance_rate,
    expected_tokens,
    kv_cache_bytes,
    optimal_gamma,
    ridge_point,
    speedup,
)
from specdec.errors import UsageError


@pytest.mark.parametrize(("alpha", "gamma", "expected"), [(0.6, 2, 1.96), (0.8, 5, 3.6893), (0.9, 10, 6.8619)])
def test_expected_tokens(alpha, gamma, expected):
    assert expected_tokens(alpha, gamma) == pytest.approx(expected, abs=5e-5)
    assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_expected_tokens_at_the_ends():
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.0, 7) == 1
    with pytest.raises(UsageError, match=r"alpha=1\.5"):
        expected_tokens(1.5, 3)
    with pytest.raises(UsageError, match="gamma=-1"):
        expected_tokens(0.5, -1)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "gain"), [(0.8, 0.05, 8, 3.0921), (0.8, 0.3, 3, 1.5537), (0.5, 0.1, 2, 1.4583)]
)
def test_optimal_gamma(alpha, c, gamma, gain):
    assert optimal_gamma(alpha, c) == gamma
    assert speedup(alpha, gamma, c) == pytest.approx(gain, abs=5e-5)


@pytest.mark.parametrize(("alpha", "c"), [(0.2, 0.2), (0.2, 0.5), (0.0, 0.1)])
def test_nothing_to_gain_means_no_drafting(alpha, c):
    assert optimal_gamma(alpha, c) == 0


@pytest.mark.parametrize(("alpha", "c"), [(0.21, 0.2), (0.9, 0.89)])
def test_gain_exists_iff_alpha_exceeds_c(alpha, c):
    assert optimal_gamma(alpha, c) > 0


def test_dearer_verification_costs():
    assert speedup(0.8, 5, 0.05, v=2.0) == pytest.approx(expected_tokens(0.8, 5) / 2.25)


def test_accepted_over_drafted_is_below_alpha():
    assert draft_acceptance_rate(0.8, 5) == pytest.approx(0.5379, abs=5e-5)
    accepted = (np.random.default_rng(0).random((100_000, 5)) < 0.8).cumprod(axis=1)
    assert accepted.mean() == pytest.approx(0.5379, abs=0.005)


def test_memory_wall():
    assert ridge_point(1979e12, 3.35e12) == pytest.approx(590.7, abs=0.05)
    assert decode_intensity(8e9, 2) == pytest.approx(1.0)
    assert decode_intensity(8e9, 2, batch=32, kv_bytes=34_359_738_368) == pytest.approx(
        2 * 8 * 32 / (16 + 34.359738368)
    )
    assert kv_cache_bytes(32, 8, 128, 2, 1, 8192) == 1_073_741_824
    assert kv_cache_bytes(32, 8, 128, 2, 32, 8192) == 34_359_738_368
    assert attention_score_bytes(4, 32, 32768, 2) == 274_877_906_944
