"""Bandits: every length is tried, the best one found, and what was learned can be shared and frozen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from specdec.controllers.bandit import ArmStatistics, BanditController, ThompsonController, UCBController
from specdec.controllers.base import Observation
from specdec.controllers.fixed import FixedController
from specdec.errors import UsageError
from specdec.types import StepRecord
from tests.controllers.simulation import Drafting, decode

BANDITS = [UCBController, ThompsonController]
WINNING = Drafting(lambda *_: 0.85, c=0.05)
LOSING = Drafting(lambda *_: 0.05, c=0.4)


@pytest.mark.parametrize("make", BANDITS)
def test_it_finds_the_best_length(make: type[BanditController]) -> None:
    fixed = {gamma: decode(FixedController(gamma), WINNING, num_requests=60) for gamma in (0, 1, 2, 3, 5, 8, 12)}
    best = max(outcome.tokens_per_second for outcome in fixed.values())
    found = decode(make(), WINNING, num_requests=60)  # type: ignore[call-arg]
    assert found.tokens_per_second > 0.85 * best
    assert Counter(found.lengths[-200:]).most_common(1)[0][0] >= 3


@pytest.mark.parametrize("make", BANDITS)
def test_where_drafting_loses_it_decodes_plainly(make: type[BanditController]) -> None:
    plain = decode(FixedController(0), LOSING)
    found = decode(make(), LOSING)  # type: ignore[call-arg]
    assert found.tokens_per_second > 0.95 * plain.tokens_per_second
    assert Counter(found.lengths)[0] > 0.9 * len(found.lengths)


@pytest.mark.parametrize("make", BANDITS)
def test_every_length_is_tried_first_and_the_whole_batch_gets_one(make: type[BanditController]) -> None:
    controller = make(lengths=[3, 0, 1])  # type: ignore[call-arg]
    assert controller.max_draft_tokens == 3
    seen = []
    for number in range(1, 4):
        states = [controller.init() for _ in range(2)]
        first, second = controller.decide(states, Observation((9, 9), (50, 50), 2))
        assert first == second
        seen.append(first)
        controller.update(states[0], record(number))
    assert seen == [0, 1, 3]


def record(number: int = 1, emitted: int = 1, seconds: float = 0.02) -> StepRecord:
    return StepRecord("r", number, 1, 10, 0, 0, 0, emitted, False, 0.0, seconds, 0.0, 0.0, 0.0, 1.0)


def test_a_rate_is_total_tokens_by_total_seconds_and_older_steps_fade() -> None:
    statistics = ArmStatistics(discount=0.5)
    statistics.record(2, record(emitted=1, seconds=0.01))
    statistics.record(2, record(emitted=5, seconds=0.03))
    assert statistics.weight(2) == 1.5
    assert statistics.rate(2) == pytest.approx((0.5 * 1 + 5) / (0.5 * 0.01 + 0.03))
    statistics.record(0, record())
    assert statistics.weight(2) == 0.75
    assert statistics.spread(0) == pytest.approx(0.0, abs=1e-6)


def test_statistics_are_shared_by_handing_them_on_and_frozen_when_asked() -> None:
    shared = ArmStatistics()
    decode(UCBController(statistics=shared), WINNING, num_requests=20)
    second = UCBController(exploration=0.0, statistics=shared)
    assert second.decide([second.init()], Observation((9,), (50,), 1))[0] >= 3

    frozen = ArmStatistics(learning_requests=1)
    controller = UCBController(statistics=frozen)
    decode(controller, WINNING, num_requests=1)
    before = [frozen.weight(length) for length in controller.lengths]
    decode(controller, LOSING, num_requests=1)
    assert [frozen.weight(length) for length in controller.lengths] == before
    nothing = UCBController(statistics=ArmStatistics(learning_requests=0))
    assert nothing.decide([nothing.init()], Observation((9,), (50,), 1)) == [0]


def test_the_prefill_is_no_trial() -> None:
    controller = UCBController()
    controller.update(controller.init(), record(number=0))
    assert controller.statistics.weight(0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, r"lengths=\[\]"),
        ({"lengths": [0, -1]}, r"lengths=\[0, -1\]"),
        ({"lengths": [1, 1]}, r"lengths=\[1, 1\]"),
        ({"lengths": [0]}, "never drafts"),
        ({"exploration": -1.0}, "exploration=-1.0"),
        ({"exploration": float("nan")}, "exploration=nan"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        UCBController(**options)


@pytest.mark.parametrize("options", [{"discount": 0.0}, {"discount": 1.5}, {"learning_requests": -1}])
def test_bad_statistics_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        ArmStatistics(**options)
