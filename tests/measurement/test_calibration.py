"""Step costs of a tiny target, measured through the engine; their cache; and how a controller comes by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.backends.native import NativeBackend
from specdec.controllers.cost_aware import CostAwareController
from specdec.controllers.fixed import FixedController
from specdec.costmodel import GUESS
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.measurement import calibration
from specdec.measurement.calibration import VERIFIED_LENGTHS, RandomDrafter, step_costs
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel
from specdec.verifiers.base import Verifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.synthetic import SyntheticVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.fakes import HiddenDrafter, TreeDrafter, make_request


def engine(target: LoadedModel, drafter: Drafter, verifier: Verifier | None = None) -> Engine:
    return Engine(target.model, drafter, verifier or RejectionVerifier(), FixedController(3))


def test_costs_are_what_forwards_take_for_every_length_the_window_has_room_for(
    target: LoadedModel, other: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that stands still but while a model computes: 10 ms a forward of the target, 1 ms of the draft."""
    clock = [0.0]

    def taking(model: LanguageModel, seconds: float) -> None:
        forward = model.forward

        def timed(*given: Any, **named: Any) -> Any:
            clock[0] += seconds
            return forward(*given, **named)

        monkeypatch.setattr(model, "forward", timed)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    taking(target.model, 0.010)
    taking(other.model, 0.001)
    costs = step_costs(engine(target, DraftModelDrafter(other)), 1.0, tmp_path)
    window = target.model.max_positions
    assert costs.num_tokens == tuple(n + 1 for n in sorted(VERIFIED_LENGTHS) if n <= window // 4)
    assert costs.step_seconds == pytest.approx([0.010] * len(costs.num_tokens))
    assert costs.draft_each_seconds == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (PromptLookupDrafter(), RejectionVerifier()),
        (OracleDrafter(1.0), RejectionVerifier()),
        (HiddenDrafter(), RejectionVerifier()),
        (TreeDrafter(0.5), GreedyTreeVerifier()),
        (PromptLookupDrafter(), SyntheticVerifier(1.0)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_whatever_can_be_decoded_with_can_be_measured(
    target: LoadedModel, tmp_path: Path, drafter: Drafter, verifier: Verifier
) -> None:
    costs = step_costs(engine(target, drafter, verifier), 0.1, tmp_path)
    assert costs.seconds(8) > 0


def test_the_targets_part_is_kept_and_a_damaged_file_is_measured_again(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = engine(target, PromptLookupDrafter())
    first = step_costs(measured, 0.1, tmp_path)
    (kept,) = (tmp_path / "step_costs").iterdir()
    again = step_costs(measured, 0.1, tmp_path)
    assert (again.num_tokens, again.step_seconds) == (first.num_tokens, first.step_seconds)

    kept.write_text(kept.read_text()[:20])
    step_costs(measured, 0.1, tmp_path)
    assert kept.read_text().endswith("}\n")

    monkeypatch.setattr(calibration.torch, "get_num_threads", lambda: 7)
    step_costs(measured, 0.1, tmp_path)
    assert len(list((tmp_path / "step_costs").iterdir())) == 2, "another machine"


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "step_costs").write_text("a file where a folder should be")
    assert step_costs(engine(target, PromptLookupDrafter()), 0.1, tmp_path).step_seconds


def test_measuring_leaves_the_engine_as_it_was(target: LoadedModel, tmp_path: Path) -> None:
    drafter = DraftModelDrafter(target)
    measured, request = engine(target, drafter), make_request("a", 30, max_new_tokens=40)
    before = measured.generate([request])[0].token_ids
    step_costs(measured, 0.1, tmp_path)
    assert measured.generate([request])[0].token_ids == before


def test_a_backend_hands_costs_to_the_controller_that_asks(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("specdec.backends.native.step_costs", lambda engine: asked.append(engine) or GUESS)
    NativeBackend(target, PromptLookupDrafter(), RejectionVerifier(), FixedController(3))
    assert not asked
    backend = NativeBackend(target, PromptLookupDrafter(), RejectionVerifier(), CostAwareController())
    assert asked == [backend.engine]


def test_a_random_drafter_drafts_as_many_as_it_may(target: LoadedModel) -> None:
    traces = engine(target, RandomDrafter()).generate([make_request("a", max_new_tokens=20)])
    assert {step.num_drafted for step in traces[0].steps[1:-3]} == {3}
