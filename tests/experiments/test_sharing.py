"""What runs of one sweep share, and what they don't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import sweep
from experiments.sharing import Shared
from specdec.costmodel import GUESS
from specdec.measurement import interleaving
from tests.test_run_smoke import CHOICES, composed, settings

__all__ = ["settings"]  # a fixture

DRAFT_MODEL = ["drafter=draft_model", "~arms.oracle"]


@pytest.fixture
def draft(tiny_checkpoint: Callable[..., Path]) -> list[str]:
    return [*DRAFT_MODEL, f"drafter.model={tiny_checkpoint('llama', seed=1)}"]


def counted(monkeypatch: pytest.MonkeyPatch, place: str, answer: Callable[..., Any]) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def noted(*given: Any) -> Any:
        calls.append(given)
        return answer(*given)

    monkeypatch.setattr(place, noted)
    return calls


def test_a_draft_is_loaded_once(settings: list[str], draft: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.models.loading.model import find

    shared = Shared()
    sweep.load_target(composed(settings))
    loaded = counted(monkeypatch, "specdec.models.loading.model.find", find)
    for temperature in (0, 1):
        sweep.run(composed([*settings, *draft, f"sampling.temperature={temperature}"]), CHOICES, shared)
    assert len(loaded) == 1
    sweep.run(composed([*settings, "~arms.oracle", "workload.limit=2"]), CHOICES, shared)
    assert not shared.drafts, "a run that needs no draft keeps none"


def test_costs_are_measured_once_per_setup(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shared, aware = Shared(), [*settings, "~arms.oracle", "controller=cost_aware"]
    measured = counted(monkeypatch, "experiments.sharing.step_costs", lambda engine: GUESS)
    for changed in (["workload.limit=2"], ["workload.limit=3"], ["drafter.max_ngram=2"]):
        sweep.run(composed([*aware, *changed]), CHOICES, shared)
    assert len(measured) == 2, "once, and once more for another drafter"


def test_an_arm_is_warmed_up_once_per_setup_and_sampling(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    warmed = counted(monkeypatch, "specdec.measurement.interleaving._warm_up", interleaving._warm_up)
    for changed in (["sampling.temperature=0"], ["sampling.temperature=1"], ["workload.limit=2"]):
        sweep.run(composed([*settings, *changed]), CHOICES, shared)
    sweep.run(composed([*settings, "controller.num_draft_tokens=2", "~arms.oracle"]), CHOICES, shared)
    assert [given[-1] for given in warmed] == [set(), set(), {"plain", "prompt_lookup", "oracle"}, {"plain"}]


def test_a_run_finds_the_same_whatever_ran_before(settings: list[str], draft: list[str], tmp_path: Path) -> None:
    shared, asked = Shared(), [*settings, *draft, "controller=heuristic"]
    sweep.run(composed([*asked, "sampling.temperature=1"]), CHOICES, shared)
    after = sweep.run(composed([*asked, f"results_dir={tmp_path / 'after'}"]), CHOICES, shared)
    alone = sweep.run(composed([*asked, f"results_dir={tmp_path / 'alone'}"]), CHOICES, Shared())
    columns = ["arm", "request_id", "step", "num_drafted", "num_accepted", "num_emitted"]
    found, expected = (pd.read_parquet(run / "steps.parquet")[columns] for run in (after, alone))
    pd.testing.assert_frame_equal(found, expected)
