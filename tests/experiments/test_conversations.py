"""A run over conversations: every turn a request, every arm its own answers."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments.report import report
from experiments.sweep import NotLosslessError, run
from specdec.measurement import results
from tests import test_run_smoke
from tests.test_run_smoke import CHOICES, composed, settings

__all__ = ["settings"]  # a fixture


@pytest.fixture
def talks(settings: list[str], tmp_path: Path) -> list[str]:
    """Two turns; three, the last of which does not fit the tiny model's window; one."""
    turns = [["Hi", "Go"], ["Ho", "on", "x" * 128], ["Hum"]]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    dataset = [f"+workload.path={path}", "workload.name=talk", "+workload.columns.text=turns", "+workload.turns=all"]
    return [*settings, "workload=local", *(item.replace("+", "") for item in dataset), "workload.max_new_tokens=8"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_run_over_conversations(talks: list[str], tmp_path: Path, temperature: int) -> None:
    written = run(composed([*talks, f"sampling.temperature={temperature}"]), CHOICES)
    requests = pd.read_parquet(written / "requests.parquet")
    for _, rows in requests.groupby("arm"):
        assert list(rows["request_id"]) == ["talk-1/1", "talk-1/2", "talk-2/1", "talk-2/2", "talk-3"]
        lengths = rows.set_index("request_id")["prompt_length"]
        assert lengths["talk-1/2"] > lengths["talk-1/1"]
    summary = report(tmp_path / "results" / "adhoc")
    assert (summary["num_requests"] == 5).all()
    assert (summary["num_failures"] == 1).all()
    assert summary["lossless"].fillna("sampled").eq("sampled" if temperature else "equal").all()
    (found,) = results.load_runs(tmp_path / "results" / "adhoc")
    assert {tuple(failed) for failed in found.metadata.failures.values()} == {("talk-2/3",)}


def test_turns_after_another_answer_are_not_compared(talks: list[str], tmp_path: Path) -> None:
    overrides = [*talks, f"verifier._target_={test_run_smoke.__name__}.Boastful"]
    with pytest.raises(NotLosslessError, match=r"fault at output token \d+ of request 'talk-1/1'"):
        run(composed(overrides), CHOICES)
    summary = report(tmp_path / "results" / "adhoc").set_index("arm")
    assert summary.loc["prompt_lookup", "lossless"] == "fault"
