"""Heuristic, confidence, AdaEDL and survival: when they go on and when they stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.controllers.base import Controller, Observation
from specdec.controllers.confidence import ConfidenceController
from specdec.controllers.entropy import AdaEDLController, AdaEDLState
from specdec.controllers.heuristic import HeuristicController
from specdec.controllers.survival import SurvivalController, SurvivalModel, fit_survival
from specdec.errors import UsageError
from specdec.types import StepRecord

ONE = Observation((10,), (100,), 1)


def step(drafted: int, accepted: int, number: int = 1) -> StepRecord:
    counts = (drafted, min(accepted + 1, drafted), accepted, accepted + 1, False)
    return StepRecord("r", number, 1, 10, *counts, 0.0, 0.02, 0.0, 0.0, 0.0, 1.0)


def stops(controller: Controller, *token_probs: float) -> list[bool]:
    """Whether each row is stopped after a token of that probability, over three tokens."""
    probs = torch.tensor([[p, (1 - p) / 2, (1 - p) / 2] for p in token_probs])
    states = [controller.init() for _ in token_probs]
    answer: list[bool] = controller.stop(states, probs, torch.zeros(len(token_probs), dtype=torch.long), 1).tolist()
    return answer


def test_the_heuristic_grows_by_two_and_shrinks_by_one() -> None:
    controller = HeuristicController(initial=5, max_draft_tokens=8)
    state, lengths = controller.init(), []
    for record in [step(5, 5), step(7, 7), step(8, 8), step(8, 7), step(7, 0), step(0, 0), *[step(6, 0)] * 9]:
        state = controller.update(state, record)
        lengths += controller.decide([state], ONE)
    assert lengths == [7, 8, 8, 7, 6, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1]


def test_confidence_stops_after_an_unlikely_token_row_by_row() -> None:
    controller = ConfidenceController(threshold=0.4, max_draft_tokens=7)
    assert controller.decide([None, None], Observation((1, 1), (9, 9), 2)) == [7, 7]
    assert stops(controller, 0.39, 0.41, 0.4) == [True, False, False]


def test_adaedl_stops_by_entropy_not_by_the_token() -> None:
    controller = AdaEDLController(threshold=0.4)
    flat, sharp = 1 / 3, 0.98
    assert 1 - math.sqrt(0.2 * math.log(3)) == pytest.approx(0.531, abs=1e-3)
    assert stops(controller, flat, sharp) == [False, False]
    assert stops(AdaEDLController(threshold=0.54), flat, sharp) == [True, False]
    assert stops(AdaEDLController(threshold=0.52), flat, sharp) == [False, False]
    assert stops(AdaEDLController(threshold=0.4, entropy_scale=0.4), flat, sharp) == [True, False]


def test_adaedl_moves_its_threshold_against_the_running_acceptance() -> None:
    controller = AdaEDLController(threshold=0.4, target_acceptance=0.5, step_size=0.1)
    rising = falling = controller.init()
    for _ in range(3):
        rising, falling = controller.update(rising, step(4, 0)), controller.update(falling, step(4, 4))
    assert rising.threshold > 0.42
    assert falling.threshold < 0.38
    first = controller.update(AdaEDLState(0.4, 0.5), step(4, 0))
    assert first == AdaEDLState(pytest.approx(0.9 * 0.4 + 0.1 * 0.5), 0.25)
    assert controller.update(rising, step(0, 0)) == rising


def test_survival_stops_when_the_product_has_fallen() -> None:
    controller = SurvivalController(threshold=0.7)  # unfitted: a token's chance is its draft probability
    states = [controller.init(), controller.init()]
    token = torch.zeros(2, dtype=torch.long)
    probs = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    for _ in range(2):  # a new draft begins anew
        controller.decide(states, Observation((1, 1), (9, 9), 2))
        answers = [controller.stop(states, probs, token, depth).tolist() for depth in (1, 2, 3)]
        assert answers == [[False, False], [False, False], [True, False]]  # .6, .36, .216 against .3


def test_the_fit_finds_the_coefficients_that_made_the_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    probs, positions = rng.uniform(0.05, 0.95, 20_000), rng.integers(1, 6, 20_000)
    logits = -0.5 + 0.8 * np.log(probs / (1 - probs)) - 0.3 * (positions - 1)
    accepted = rng.random(20_000) < 1 / (1 + np.exp(-logits))
    model = fit_survival(probs, positions, accepted)
    assert (model.bias, model.confidence, model.depth) == pytest.approx((-0.5, 0.8, -0.3), abs=0.06)
    chances = model.acceptance(torch.tensor([0.5, 0.9]), depth=2)
    assert chances.tolist() == pytest.approx([0.31, 0.72], abs=0.03)

    model.save(tmp_path / "fit.json")
    assert SurvivalController(tmp_path / "fit.json").model == model


def test_a_fit_that_separates_stays_finite() -> None:
    model = fit_survival([0.1, 0.2, 0.8, 0.9], [1, 1, 1, 1], [0, 0, 1, 1])
    assert all(map(math.isfinite, (model.bias, model.confidence, model.depth)))
    assert model.confidence > 1


@pytest.mark.parametrize(
    "data",
    [([], [], []), ([0.2, 0.4], [1, 1], [1, 1]), ([1.0, 1.0], [1, 2], [0, 1])],
    ids=["nothing", "one outcome", "greedy"],
)
def test_data_that_teaches_nothing_is_refused(data: tuple[list[float], list[int], list[int]]) -> None:
    with pytest.raises(UsageError, match="teach nothing"):
        fit_survival(*data)


@pytest.mark.parametrize(
    "text", [None, "no json", "[]", '{"bias": 1}', '{"bias": NaN, "confidence": 1, "depth": 0, "num_tokens": 3}']
)
def test_a_file_without_coefficients_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "fit.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"fit\.json holds"):
        SurvivalController(path)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ConfidenceController, {"threshold": 1.5}),
        (ConfidenceController, {"threshold": float("nan")}),
        (ConfidenceController, {"max_draft_tokens": 0}),
        (AdaEDLController, {"threshold": -0.1}),
        (AdaEDLController, {"target_acceptance": 2.0}),
        (AdaEDLController, {"step_size": -1.0}),
        (AdaEDLController, {"acceptance_memory": 1.1}),
        (AdaEDLController, {"entropy_scale": 0.0}),
        (AdaEDLController, {"max_draft_tokens": -3}),
        (SurvivalController, {"threshold": 7.0}),
        (SurvivalController, {"max_draft_tokens": 0}),
        (HeuristicController, {"initial": 0}),
        (HeuristicController, {"initial": 20}),
        (HeuristicController, {"decrease": -1}),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(make: Any, options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        make(**options)


def test_an_unfitted_model_believes_the_draft() -> None:
    assert SurvivalModel().acceptance(torch.tensor([0.3]), depth=5).item() == pytest.approx(0.3)
