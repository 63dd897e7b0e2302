"""Step costs: what lies between and beyond the measured widths, and what a cost model may not be."""

from __future__ import annotations

import pytest

from specdec.costmodel import GUESS, StepCosts, speedup
from specdec.errors import UsageError

COSTS = StepCosts((1, 2, 5), (0.010, 0.012, 0.015), draft_fixed_seconds=0.001, draft_each_seconds=0.002)


def test_between_and_beyond_what_was_measured_it_is_linear() -> None:
    assert [COSTS.verifying(n) for n in (1, 2, 3, 5, 8)] == pytest.approx([0.010, 0.012, 0.013, 0.015, 0.018])
    falling = StepCosts((1, 2, 5), (0.010, 0.012, 0.011))
    assert falling.verifying(9) == pytest.approx(0.011), "more tokens never take less time than was seen"


def test_a_step_is_drafting_and_verifying_and_a_batch_is_wider() -> None:
    assert COSTS.seconds(0) == pytest.approx(0.010)
    assert COSTS.seconds(1) == pytest.approx(0.012 + 0.003)
    assert COSTS.seconds(4, draft_steps=1) == pytest.approx(0.015 + 0.003)
    assert COSTS.seconds(1, batch_size=4) == pytest.approx(0.018 + 0.003)


def test_c_and_v_are_in_plain_steps_and_fit_the_theory() -> None:
    assert (COSTS.c, COSTS.v(0), COSTS.v(4)) == pytest.approx((0.3, 1.0, 1.5))
    free = StepCosts((1, 9), (0.01, 0.01), draft_each_seconds=0.0005)
    assert speedup(0.8, 8, free.c, free.v(8)) == pytest.approx(3.0921, abs=1e-4)


def test_json_round_trip() -> None:
    assert StepCosts.from_json(COSTS.to_json()) == COSTS
    for text in ("", "[]", "{}", "null"):
        with pytest.raises((ValueError, KeyError, TypeError)):
            StepCosts.from_json(text)


def test_the_guess_is_a_memory_bound_target() -> None:
    assert GUESS.v(0) == 1
    assert 1 < GUESS.v(4) < GUESS.v(8) < 1.3


@pytest.mark.parametrize(
    ("tokens", "seconds", "drafting"),
    [
        ((1,), (0.1,), 0.0),
        ((2, 3), (0.1, 0.1), 0.0),
        ((1, 3, 2), (0.1, 0.1, 0.1), 0.0),
        ((1, 2), (0.1,), 0.0),
        ((1, 2), (0.1, 0.0), 0.0),
        ((1, 2), (0.1, 0.1), -1.0),
    ],
)
def test_what_cannot_be_a_cost_model_is_refused(
    tokens: tuple[int, ...], seconds: tuple[float, ...], drafting: float
) -> None:
    with pytest.raises(UsageError):
        StepCosts(tokens, seconds, drafting)
