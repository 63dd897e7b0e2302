"""No regret: never much behind plain decoding, never much behind the best fixed length; on a simulated machine."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.controllers.base import Controller, Observation
from specdec.controllers.cost_aware import CostAwareController
from specdec.controllers.fixed import FixedController
from specdec.controllers.learning import Chances, StepTimes, WorkloadPrior
from specdec.costmodel import StepCosts
from specdec.errors import UsageError
from specdec.types import StepRecord
from tests.controllers.simulation import Drafting, costs, decode

LOSING = {
    "lookup on creative text": Drafting(lambda *_: 0.05, c=0.0, offered=0.33),
    "lookup at the break-even": Drafting(lambda *_: 0.11, c=0.0, offered=0.33),
    "early exit": Drafting(lambda *_: 0.05, c=0.4),
    "early exit, sometimes right": Drafting(lambda *_: 0.25, c=0.4),
}
WINNING = {
    "lookup on repetition": Drafting(lambda *_: 0.92, c=0.0, offered=0.8),
    "a trained draft": Drafting(lambda *_: 0.7, c=0.12),
    "a trained draft on stories": Drafting(lambda *_: 0.5, c=0.12),
}


def cost_aware(drafting: Drafting, **options: object) -> CostAwareController:
    return CostAwareController(costs=costs(drafting.c), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOSING)
def test_where_plain_decoding_wins_it_costs_at_most_three_percent(name: str) -> None:
    plain = decode(FixedController(0), LOSING[name])
    always = decode(FixedController(5), LOSING[name])
    found = decode(cost_aware(LOSING[name]), LOSING[name])
    assert always.tokens_per_second < 0.98 * plain.tokens_per_second, "the harm there would be"
    assert found.tokens_per_second >= 0.97 * plain.tokens_per_second
    assert max(found.tpot) <= 1.05 * max(plain.tpot), "no request pays for the others"


@pytest.mark.parametrize("name", WINNING)
@pytest.mark.parametrize("seed", [0, 1])
def test_where_drafting_wins_it_is_close_to_the_best_fixed_length(name: str, seed: int) -> None:
    fixed = {gamma: decode(FixedController(gamma), WINNING[name], seed=seed) for gamma in (0, 1, 2, 3, 4, 6, 8, 12, 16)}
    best = max(outcome.tokens_per_second for outcome in fixed.values())
    assert best > 1.2 * fixed[0].tokens_per_second
    assert decode(cost_aware(WINNING[name]), WINNING[name], seed=seed).tokens_per_second >= 0.98 * best


def test_it_beats_every_fixed_length_where_requests_change() -> None:
    changing = Drafting(lambda request, emitted: 0.05 if emitted < 64 else 0.85, c=0.12)
    best = max(decode(FixedController(gamma), changing).tokens_per_second for gamma in (0, 1, 2, 3, 5, 8))
    assert decode(cost_aware(changing), changing).tokens_per_second > best


def test_probing_is_bounded_and_stops_when_it_is_told_to() -> None:
    hopeless = Drafting(lambda *_: 0.0, c=0.4)
    spent = [decode(cost_aware(hopeless, probing=share), hopeless, noise=0.0) for share in (0.0, 0.005, 0.05)]
    plain = decode(FixedController(0), hopeless, noise=0.0).tokens_per_second
    losses = [1 - outcome.tokens_per_second / plain for outcome in spent]
    assert losses[0] == pytest.approx(0.0, abs=1e-3)
    assert 0 < losses[1] <= 0.005 + 1e-3
    assert losses[1] < losses[2] <= 0.05 + 1e-3
    assert set(spent[1].lengths) == {0, 1}


def test_without_measured_costs_it_finds_them_out() -> None:
    drafting = LOSING["early exit"]
    plain = decode(FixedController(0), drafting).tokens_per_second
    assert decode(CostAwareController(), drafting).tokens_per_second >= 0.97 * plain


@pytest.mark.parametrize("seed", range(5))
def test_costs_that_turn_out_wrong_are_corrected(seed: int) -> None:
    drafting = Drafting(lambda *_: 0.3, c=0.25)  # drafting loses by 4 % at best, and seems to gain 10 %
    plain = decode(FixedController(0), drafting, seed=seed).tokens_per_second
    blind = decode(CostAwareController(costs=costs(0.02)), drafting, num_requests=60, seed=seed)
    assert blind.tokens_per_second >= 0.985 * plain


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_that_is_cheaper_than_measured_is_used_as_much_as_pays(seed: int) -> None:
    drafting = WINNING["a trained draft"]
    best = max(decode(FixedController(gamma), drafting, seed=seed).tokens_per_second for gamma in (1, 2, 3, 4, 5))
    shy = decode(CostAwareController(costs=costs(0.3)), drafting, seed=seed)
    assert shy.tokens_per_second >= 0.96 * best


@pytest.mark.parametrize("seed", range(5))
def test_a_few_unlucky_trials_do_not_keep_a_request_from_the_length_that_pays(seed: int) -> None:
    shallow = Drafting(lambda *_: 0.5, c=0.115)  # two tokens gain 4 % on one, so that chance tells little of it
    fixed = {gamma: decode(FixedController(gamma), shallow, noise=0.0, seed=seed) for gamma in (1, 2, 3)}
    found = decode(cost_aware(shallow), shallow, noise=0.0, seed=seed)
    assert found.tokens_per_second >= 0.98 * max(outcome.tokens_per_second for outcome in fixed.values())


def test_a_batch_is_given_one_length_and_no_row_more_than_it_can_emit() -> None:
    controller = CostAwareController(costs=costs(0.0), max_draft_tokens=8)
    states = [controller.init() for _ in range(3)]
    decided = controller.decide(states, Observation((10, 10, 10), (100, 2, 1), 3))
    assert decided == [1, 1, 0]


def test_a_wider_batch_drafts_less_because_it_computes_more() -> None:
    steep = StepCosts((1, 2, 8, 64), (1.0, 1.0, 1.1, 4.0))
    prior = WorkloadPrior(learning_requests=0)

    def length(batch: int) -> int:
        controller = CostAwareController(costs=steep, prior=prior)
        many = Observation((10,) * batch, (100,) * batch, batch)
        return controller.decide([controller.init() for _ in range(batch)], many)[0]

    assert length(1) > length(4) > length(16)


def test_the_prior_is_shared_by_handing_it_on_and_frozen_when_asked() -> None:
    drafting = WINNING["lookup on repetition"]
    prior = WorkloadPrior()
    decode(cost_aware(drafting, prior=prior), drafting, num_requests=4)
    fresh, warm = CostAwareController(costs=costs(0.0)), cost_aware(drafting, prior=prior)
    one = Observation((10,), (100,), 1)
    assert warm.decide([warm.init()], one)[0] > fresh.decide([fresh.init()], one)[0]

    frozen = WorkloadPrior(learning_requests=1)
    decode(cost_aware(drafting, prior=frozen), drafting, num_requests=1)
    before = frozen.begin(16)
    decode(cost_aware(LOSING["early exit"], prior=frozen), LOSING["early exit"], num_requests=2)
    np.testing.assert_array_equal(frozen.begin(16), before)


def test_bind_measures_only_what_is_not_known() -> None:
    calls: list[StepCosts] = []

    def measure() -> StepCosts:
        calls.append(costs(0.4))
        return calls[-1]

    CostAwareController(costs=costs(0.1)).bind(measure)
    assert not calls
    controller: Controller = CostAwareController()
    controller.bind(measure)
    assert len(calls) == 1


def test_chances_forget_and_know_where_a_step_ended() -> None:
    chances = Chances(4)
    chances.record(num_accepted=2, num_drafted=4, limit=4, forgetting=0.5)
    np.testing.assert_array_equal(chances.trials, [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(chances.successes, [[1, 1, 0, 0], [1, 1, 1, 1]])
    chances.record(num_accepted=0, num_drafted=0, limit=2, forgetting=0.5)
    np.testing.assert_array_equal(chances.trials, [[1.5, 0.5, 0.5, 0], [1.5, 0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(chances.successes, [[0.5, 0.5, 0, 0], [0.5, 0.5, 0.5, 0.5]])
    chances.record(num_accepted=0, num_drafted=0, limit=0, forgetting=0.5)  # plain decoding says nothing new
    np.testing.assert_array_equal(chances.trials, [[0.75, 0.25, 0.25, 0], [0.75, 0.25, 0.25, 0.25]])


def test_step_times_tell_a_slow_machine_from_a_slow_length() -> None:
    times = StepTimes()
    for i in range(400):
        slow = 2.0 if i > 200 else 1.0
        times.record(0, slow)
        times.record(4, 1.2 * slow)
    factors = times.factors(8)
    assert factors[0] == 1.0, "a slow machine is as slow at every length"
    assert factors[4] == pytest.approx(1.2, rel=0.03)
    assert factors[2] == pytest.approx(factors[4] ** 0.5)
    assert factors[8] == factors[4] > factors[2] > factors[0]


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_drafting_is_weighed_against_the_rest_of_its_own_step(pace: float) -> None:
    believed, real = costs(0.3), costs(0.1)
    controller = CostAwareController(costs=believed)
    state = controller.init()
    for number in range(1, 61):
        state.allowed = 2
        seconds = [pace * part for part in (real.drafting(2), real.verifying(3))]
        step = StepRecord("r", number, 1, 40, 2, 1, 0, 1, False, *seconds, 0.0, 0.0, 0.0, 0.0)
        state = controller.update(state, step)
    assert controller.prior.times.draft_token == pytest.approx(-0.2, rel=0.1), "a slow machine is no dear draft"


def test_an_interruption_says_little_about_drafting() -> None:
    times = StepTimes()
    times.record_drafting(2, 0.2)
    known = times.draft_token
    times.record_drafting(2, 100.0)
    assert 0 < known < times.draft_token < known + 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"forgetting": 1.5},
        {"forgetting": -0.1},
        {"prior_weight": 0.0},
        {"prior_weight": float("nan")},
        {"probing": 2.0},
        {"max_draft_tokens": 0},
    ],
)
def test_bad_settings_are_refused_by_name(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        CostAwareController(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"learning_requests": -1}, {"memory": 0.5}])
def test_bad_priors_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        WorkloadPrior(**options)  # type: ignore[arg-type]
