"""From runs on disk to tables, figures and an exit status."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.report import main, remarks, report, table, tier_order
from specdec.measurement import results, traces
from specdec.measurement.metrics import POSITION_COLUMNS, SUMMARY_COLUMNS
from tests.fake_traces import PLAIN, fake_arm, fake_metadata, fake_trace

WORKLOADS = {"json": ("low", 0.5), "qa": ("mixed", 1.5), "creative": ("high", 2.5)}


def write_runs(folder, lossless="equal", **changes):
    rng = np.random.default_rng(0)
    for workload, (tier, entropy) in WORKLOADS.items():
        arms = {
            "plain": PLAIN,
            "lookup": fake_arm(lossless=lossless),
            "oracle": fake_arm(drafter="oracle", synthetic=True),
        }
        frames = traces.concat(
            traces.to_frames([fake_trace(f"p{i}", arm.num_draft_tokens, 0.6, entropy, 20, rng) for i in range(3)], name)
            for name, arm in arms.items()
        )
        metadata = fake_metadata(arms, workload=workload, tier=tier, run_id=workload, **changes)
        results.write_run(folder, metadata, frames)


def draw_nothing(patch):
    """Drawing takes seconds."""
    patch.setattr("experiments.report.figures", lambda *tables: {})


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Runs with their report, but for the figures. Do not write to it."""
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        report(folder)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    draw_nothing(monkeypatch)


@pytest.fixture
def folder(reported, tmp_path, undrawn):
    """A copy of it, where reports draw nothing."""
    return Path(shutil.copytree(reported, tmp_path / "runs"))


def test_tables_have_the_documented_columns(reported):
    for name, columns in {"summary.csv": SUMMARY_COLUMNS, "positions.csv": POSITION_COLUMNS}.items():
        assert list(pd.read_csv(reported / name).columns) == [column.name for column in columns]


@pytest.mark.slow
def test_figures_are_always_the_same(reported, tmp_path):
    once, again = (Path(shutil.copytree(reported, tmp_path / name)) for name in ("once", "again"))
    for folder in (once, again):
        assert len(report(folder, figures_only=True)) == 9
    names = ["throughput_vs_entropy", "acceptance_vs_entropy", "acceptance_by_position", "latency_p99", "step_time"]
    assert pictures(once).keys() == {f"{name}.{end}" for name in names for end in ("png", "svg")}
    assert pictures(once) == pictures(again)


def pictures(folder):
    return {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}


def test_the_same_runs_give_the_same_tables(folder):
    paths = [folder / "summary.csv", folder / "positions.csv"]
    first = [path.read_bytes() for path in paths]
    report(folder)
    assert [path.read_bytes() for path in paths] == first


def test_unbounded_is_inf_and_null_is_empty(reported):
    header, *rows = (reported / "summary.csv").read_text().splitlines()
    row = next(row for row in rows if ",plain," in row)
    cells = dict(
        zip(header.split(","), row.replace('"Imaginary CPU, 2 cores, 2 threads"', "machine").split(","), strict=True)
    )
    assert cells["step_latency_p99_high_seconds"] == "inf"
    assert cells["acceptance_rate"] == ""


def test_the_command_prints_a_table_and_succeeds(folder, capsys):
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "unbounded]" in printed
    assert "oracle (synthetic)" in printed
    assert "Temperature 0: mean measured entropy orders the tiers (low 0." in printed


@pytest.mark.usefixtures("undrawn")
def test_a_fault_fails_loudly(tmp_path, capsys):
    write_runs(tmp_path, lossless="fault")
    assert main([str(tmp_path)]) == 1
    assert "FAULT: greedy output differs from plain decoding in creative T=0 lookup" in capsys.readouterr().out


def test_nothing_to_report_is_one_sentence(tmp_path, capsys):
    for arguments in ([str(tmp_path)], [str(tmp_path), "--figures-only"]):
        assert main(arguments) == 2
        message = capsys.readouterr().err
        assert len(message.splitlines()) == 1
        assert str(tmp_path) in message


def test_a_contradictory_run_is_named(folder, capsys):
    path = folder / "runs" / "qa" / "requests.parquet"
    requests = pd.read_parquet(path)
    requests["num_tokens"] += 1
    requests.to_parquet(path, index=False)
    assert main([str(folder)]) == 2
    assert "run qa in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_table_from_before_a_column_existed_is_drawn_without_it(tmp_path):
    write_runs(tmp_path)
    report(tmp_path)
    later = [column.name for column in SUMMARY_COLUMNS if column.later]
    table = pd.read_csv(tmp_path / "summary.csv")
    table.drop(columns=later).to_csv(tmp_path / "summary.csv", index=False)
    drawn = tmp_path / "figures" / "step_time.svg"
    before = drawn.read_bytes()
    summary = report(tmp_path, figures_only=True)
    assert later
    assert summary[later].isna().all(axis=None)
    assert drawn.read_bytes() != before, "c is not shown where nobody knows it"


def test_a_foreign_table_is_refused(folder, capsys):
    (folder / "summary.csv").write_text("workload,speed\njson,1\n")
    assert main([str(folder), "--figures-only"]) == 2
    assert "docs/results.md" in capsys.readouterr().err


def tiers(**entropies):
    tier = {"a": "low", "b": "mixed", "c": "high", "d": "high"}
    rows = [
        {"run_id": name, "temperature": 0.0, "workload": name, "tier": tier[name], "model_entropy_bits": entropy}
        for name, entropy in entropies.items()
    ]
    return list(tier_order(pd.DataFrame(rows)))


def test_tier_order_is_said_plainly():
    assert tiers(a=0.5, b=1.0, c=2.0) == [
        "Temperature 0: mean measured entropy orders the tiers (low 0.50, mixed 1.00, high 2.00 bits)."
    ]
    order, strays = tiers(a=1.5, b=1.0, c=2.0)
    assert "does NOT order" in order
    assert "a (low, 1.50 bits) is above the mean of mixed" in strays
    order, strays = tiers(a=0.5, b=1.0, c=3.0, d=0.8)
    assert "orders the tiers" in order
    assert "d (high, 0.80 bits) is below the mean of mixed" in strays


def test_remarks_name_ties_failures_and_revisions(folder):
    summary = report(folder, figures_only=True)
    changed = summary.assign(
        lossless=["tie", *summary["lossless"][1:]],
        num_failures=[2, *summary["num_failures"][1:]],
        git_sha=["other", *summary["git_sha"][1:]],
    )
    said = "\n".join(remarks(changed))
    for part in ("near-tie", "Requests failed", "several revisions of the code: 0123456789, other", "no upper limit"):
        assert part in said
    assert "FAULT" not in said


def test_the_table_shows_missing_values_as_dashes(folder):
    lines = table(report(folder, figures_only=True)).splitlines()
    assert len(lines) == 10
    plain = next(line for line in lines if " plain " in line)
    assert " -  " in plain
    assert "nan" not in "\n".join(lines)


@pytest.mark.usefixtures("undrawn")
def test_failures_and_skipped_arms_survive(tmp_path):
    write_runs(tmp_path, failures={"lookup": {"p7": "out of memory"}}, skipped_arms={"draft": "no draft model"})
    summary = report(tmp_path)
    assert summary.loc[summary["arm"] == "lookup", "num_failures"].tolist() == [1, 1, 1]
    stored = json.loads((tmp_path / "runs" / "json" / "metadata.json").read_text())
    assert stored["skipped_arms"] == {"draft": "no draft model"}
    assert dataclasses.asdict(results.load_runs(tmp_path)[0].metadata)["experiment"] == "demo"
    assert math.isnan(summary["acceptance_rate"][0])
