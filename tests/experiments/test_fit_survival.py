"""Coefficients from recorded runs: which tokens count, what is written, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from experiments.fit_survival import examined_tokens, main
from specdec.controllers.survival import SurvivalModel
from specdec.measurement import results, traces
from specdec.measurement.results import load_runs
from specdec.types import TokenKind, Trace
from tests.fake_traces import PLAIN, fake_arm, fake_metadata, fake_trace


def with_probabilities(trace: Trace, rng: np.random.Generator) -> Trace:
    """Draft probabilities that tell accepted tokens from rejected ones, mostly."""
    tokens = []
    for token in trace.tokens:
        if token.kind is TokenKind.ACCEPTED:
            token = dataclasses.replace(token, draft_prob=float(rng.uniform(0.3, 1.0)))
        if token.kind is TokenKind.REJECTED:
            token = dataclasses.replace(token, draft_prob=float(rng.uniform(0.0, 0.7)))
        tokens.append(token)
    return dataclasses.replace(trace, tokens=tuple(tokens))


def certain(trace: Trace) -> Trace:
    """As a lookup drafter leaves it, and any drafter at temperature 0."""
    tokens = [
        token if token.draft_prob is None else dataclasses.replace(token, draft_prob=1.0) for token in trace.tokens
    ]
    return dataclasses.replace(trace, tokens=tuple(tokens))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arms = {"plain": PLAIN, "lookup": fake_arm(), "draft": fake_arm(drafter="draft_model")}
    made = {
        name: [fake_trace(f"p{i}", arm.num_draft_tokens or 0, 0.6, 1.0, 60, rng) for i in range(4)]
        for name, arm in arms.items()
    }
    made["lookup"] = [certain(trace) for trace in made["lookup"]]
    made["draft"] = [with_probabilities(trace, rng) for trace in made["draft"]]
    frames = traces.concat(traces.to_frames(found, name) for name, found in made.items())
    results.write_run(tmp_path, fake_metadata(arms), frames)
    return tmp_path


def test_only_arms_with_probabilities_count(folder: Path) -> None:
    tokens = examined_tokens(load_runs(folder))
    assert len(tokens) == len(examined_tokens(load_runs(folder), ["draft"])) > 50
    assert tokens["draft_prob"].max() < 1
    assert len(examined_tokens(load_runs(folder), ["draft", "lookup"])) > len(tokens)


def test_the_command_writes_what_the_controller_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    model = SurvivalModel.load(folder / "survival.json")
    assert model.confidence > 0.5
    assert model.num_tokens > 50
    assert f"controller.coefficients={folder / 'survival.json'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "lookup"], "teach nothing"),
        (["--arm", "nobody"], "name other arms"),
        (["--output", "no/such/folder/fit.json"], "can't be written"),
    ],
)
def test_what_teaches_nothing_is_said(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err
