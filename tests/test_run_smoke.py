"""A run from configuration to figures, on a tiny random model: what its user would do, and what may go wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from experiments import report
from experiments.sweep import NotLosslessError, run
from specdec.errors import UsageError
from specdec.measurement import results
from specdec.measurement.lossless import Outcome
from specdec.verifiers.rejection import RejectionVerifier
from tests.commands import PROMPTS, ROOT

ARMS = "{oracle: {drafter: {_target_: specdec.drafters.oracle.OracleDrafter, acceptance_rate: 0.8}}}"
CHOICES = {"drafter": "prompt_lookup"}


class Boastful(RejectionVerifier):
    """Lossy, and says that it is not: accepts everything."""

    def verify(self, draft, target_probs, uniforms):  # type: ignore[no-untyped-def]
        verdict = super().verify(draft, target_probs, uniforms)
        kept = draft.lengths
        path = torch.arange(draft.width).expand(len(kept), -1)
        return type(verdict)(path, kept, kept, verdict.next_token)


@pytest.fixture
def settings(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    return [
        f"target.model={tiny_checkpoint('llama')}",
        "target.device=cpu",
        "workload=file",
        f"workload.name={tmp_path / 'prompts.jsonl'}",
        "workload.limit=3",
        "workload.max_new_tokens=12",
        f"results_dir={tmp_path / 'results'}",
        f"+arms={ARMS}",
        "share_device=true",
    ]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures: drawing takes seconds."""
    monkeypatch.setattr("experiments.report.figures", lambda *tables: {})


def composed(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides)


def command(*arguments: str, module: str = "experiments.sweep") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_greedy_run_ends_in_summary_and_figures(settings: list[str], tmp_path: Path) -> None:
    written = run(composed(settings), CHOICES)
    summary = report.report(tmp_path / "results" / "adhoc")
    check_summary(summary, ["plain", "prompt_lookup", "oracle"], lossless="equal")
    assert summary["num_tokens"].nunique() == 1, "lossless arms emit the same tokens"
    oracle = summary.set_index("arm").loc["oracle"]
    assert oracle["synthetic"]
    assert 0.4 < oracle["acceptance_rate"] < 1.0
    (stored,) = results.load_runs(tmp_path / "results" / "adhoc")
    assert stored.metadata.run_id == written.name
    assert not stored.metadata.skipped_arms
    figures = sorted(path.name for path in (tmp_path / "results" / "adhoc" / "figures").iterdir())
    assert {"throughput_vs_entropy.png", "throughput_vs_entropy.svg"} <= set(figures)
    assert list(pd.read_csv(tmp_path / "results" / "adhoc" / "summary.csv")["arm"]) == list(summary["arm"])


@pytest.mark.usefixtures("undrawn")
def test_a_sampled_run_skips_what_cannot_sample(settings: list[str], tmp_path: Path) -> None:
    run(composed([*settings, "sampling.temperature=1"]), CHOICES)
    check_summary(report.report(tmp_path / "results" / "adhoc"), ["plain", "prompt_lookup"], lossless="sampled")
    (stored,) = results.load_runs(tmp_path / "results" / "adhoc")
    assert list(stored.metadata.skipped_arms) == ["oracle"]


def check_summary(summary: pd.DataFrame, arms: list[str], lossless: str) -> None:
    assert list(summary["arm"]) == arms
    assert (summary["num_requests"] == 3).all()
    assert summary["lossless"].fillna("sampled").eq(lossless).all()
    assert (summary["num_tokens"] > 0).all()
    assert summary.set_index("arm").loc["plain", "speedup"] == 1.0


def test_a_finished_run_is_skipped_and_a_changed_one_is_not(settings: list[str], tmp_path: Path) -> None:
    first = run(composed(settings), CHOICES)
    stamp = (first / "metadata.json").stat().st_mtime_ns
    assert run(composed(settings), CHOICES) == first
    assert (first / "metadata.json").stat().st_mtime_ns == stamp
    assert run(composed([*settings, "controller.num_draft_tokens=2"]), CHOICES) != first
    # What leaves the result as it is leaves the run's identity as it is.
    assert run(composed([*settings, "share_device=false"]), CHOICES) == first


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_is_short_of_time_measures_fewer_prompts(settings: list[str], tmp_path: Path) -> None:
    run(composed([*settings, "workload.limit=4", "time_limit_seconds=1e-9"]), CHOICES)
    run(composed([*settings, "workload.limit=4", "time_limit_seconds=1e9"]), CHOICES)
    summary = report.report(tmp_path / "results" / "adhoc")
    assert sorted(summary["num_requests"]) == [2, 2, 2, 4, 4, 4], "all arms the same prompts, two at least"


def test_an_interrupted_run_leaves_nothing_and_runs_again(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("experiments.sweep.interleave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(composed(settings), CHOICES)
    runs = tmp_path / "results" / "adhoc" / "runs"
    assert not [path for path in runs.iterdir() if path.is_dir()]
    assert (run(composed(settings), CHOICES) / "metadata.json").is_file()


@pytest.mark.usefixtures("undrawn")
def test_a_fault_fails_loudly_and_stays_on_record(settings: list[str], tmp_path: Path) -> None:
    overrides = [*settings, f"verifier._target_={__name__}.Boastful"]
    with pytest.raises(NotLosslessError, match="arm prompt_lookup is not lossless: fault at output token"):
        run(composed(overrides), CHOICES)
    summary = report.report(tmp_path / "results" / "adhoc").set_index("arm")
    assert summary.loc["prompt_lookup", "lossless"] == Outcome.FAULT
    assert summary.loc["plain", "lossless"] == Outcome.EQUAL


@pytest.mark.usefixtures("undrawn")
def test_a_lossy_rule_is_declared(settings: list[str], tmp_path: Path) -> None:
    run(composed([*settings, "verifier=synthetic", "~arms.oracle"]), CHOICES)
    summary = report.report(tmp_path / "results" / "adhoc").set_index("arm")
    assert summary.loc["prompt_lookup", "lossless"] == Outcome.DECLARED
    assert summary.loc["prompt_lookup", "synthetic"]


def test_another_timed_run_on_the_same_cores_is_refused(settings: list[str]) -> None:
    config = composed([*settings, "share_device=false"])
    with results.timed_lock("cpu"), pytest.raises(UsageError, match="another timed run"):
        run(config, CHOICES)


@pytest.mark.slow
def test_a_multirun_reports_when_it_ends(settings: list[str], tmp_path: Path) -> None:
    done = command("-m", *settings, "sampling.temperature=0,1", "name=both")
    assert done.returncode == 0, done.stderr
    assert len(pd.read_csv(tmp_path / "results" / "both" / "summary.csv")) == 5
    assert "2/2" in done.stderr


def test_a_batch_of_requests_is_one_step(settings: list[str], tmp_path: Path) -> None:
    written = run(composed([*settings, "backend.batch_size=2"]), CHOICES)
    steps = pd.read_parquet(written / "steps.parquet")
    assert set(steps["batch_size"]) == {1, 2}


@pytest.mark.gpu
def test_the_sweep_runs_on_a_gpu(settings: list[str], tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run(composed([*settings, "target.device=cuda"]), CHOICES)
    summary = report.report(tmp_path / "results" / "adhoc")
    assert set(summary["lossless"]) <= {"equal", "tie"}
