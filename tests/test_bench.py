"""The benchmark: what it computes from raw times, and that it runs on any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from experiments import bench
from specdec.types import StepRecord, Trace
from tests.test_run_smoke import _prompts


def generations(seconds: dict[str, list[float]], tokens: int = 10) -> pd.DataFrame:
    rows = [
        {"name": name, "request_id": index, "num_tokens": tokens, "seconds": second, "token_ids": "1 2"}
        for name, times in seconds.items()
        for index, second in enumerate(times)
    ]
    return pd.DataFrame(rows).assign(outside_share=None)


def test_ratios_are_of_totals() -> None:
    table = generations(
        {
            "specdec plain": [1.0, 3.0],
            "transformers plain": [4.0, 4.0],
            "specdec lookup": [0.5, 0.5],
            "transformers lookup": [1.0, 3.0],
        }
    )
    rows = {row["what"]: row for row in bench._speed_rows(table)}
    found = rows["tokens/s: specdec plain ÷ transformers plain"]
    assert found["value"] == pytest.approx(2.0)  # not the mean of 4 and 4/3
    assert found["low"] <= 2.0 <= found["high"]
    assert rows["tokens/s: specdec lookup"]["value"] == pytest.approx(20.0)


def test_outside_share_leaves_the_prefill_out() -> None:
    counts = {"num_drafted": 0, "num_examined": 0, "num_accepted": 0, "num_emitted": 1, "cut": False}

    def step(number: int, forward: float, other: float) -> StepRecord:
        return StepRecord("a", number, 1, 5, **counts, draft_seconds=0.0, forward_seconds=forward, verify_seconds=0.0,
                          rollback_seconds=0.0, other_seconds=other, end_seconds=0.0)  # fmt: skip

    trace = Trace("a", 5, (1, 2), "", None, (step(0, 1.0, 9.0), step(1, 3.0, 1.0)), ())  # type: ignore[arg-type]
    assert bench.outside_forwards(trace) == pytest.approx(0.25)


def test_it_runs_on_any_checkpoint(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model, prompts = str(tiny_checkpoint("llama")), str(_prompts(tmp_path))
    arguments = ["--quick", "--model", model, "--workload", prompts, "--dtypes", "float32", "--max-new-tokens", "8"]
    assert bench.main([*arguments, "--output", str(tmp_path / "bench"), "--share-device"]) == 0
    summary = pd.read_csv(tmp_path / "bench" / "summary.csv").set_index("what")["value"]
    assert summary["share of requests with specdec plain's tokens: transformers plain"] == 1.0
    assert summary["share of requests with specdec plain's tokens: transformers lookup"] == 1.0
    assert summary["tokens/s: specdec lookup ÷ specdec plain"] > 0
    raw = pd.read_csv(tmp_path / "bench" / "raw.csv")
    assert set(raw["kind"]) == {"generation", "forward"}
    assert (raw["seconds"] > 0).all()


def test_an_unknown_model_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(tmp_path / "nothing")
    assert bench.main(["--model", model, "--output", str(tmp_path / "bench"), "--share-device"]) == 2
    assert "error: " in capsys.readouterr().err
