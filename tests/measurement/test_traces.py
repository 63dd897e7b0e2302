"""Traces to tables and back: nothing is lost, nulls stay null, and every contradiction is named."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import specdec
from specdec.measurement import traces
from specdec.measurement.traces import DRAFTED_KINDS, Frames, TraceError
from specdec.types import FinishReason, StepRecord, TokenKind, TokenRecord, Trace
from tests.fake_traces import fake_step, fake_token, fake_trace


@pytest.fixture
def trace():
    return fake_trace("p1", gamma=4, alpha=0.6, entropy=1.0, tokens=30, rng=np.random.default_rng(0))


@pytest.fixture
def frames(trace):
    return traces.to_frames([trace], "arm")


def edited(frames: Frames, table: str, row: int, column: str, value) -> Frames:
    changed = getattr(frames, table).copy()
    changed.at[row, column] = value
    return dataclasses.replace(frames, **{table: changed})


def test_tables_hold_every_field(trace, frames):
    assert set(frames.steps.columns) == {"arm", *(field.name for field in dataclasses.fields(StepRecord))}
    assert set(frames.tokens.columns) == {"arm", *(field.name for field in dataclasses.fields(TokenRecord))}
    assert len(frames.steps) == len(trace.steps)
    assert frames.requests.loc[0, "token_ids"].tolist() == list(trace.token_ids)
    assert set(DRAFTED_KINDS) == {TokenKind.ACCEPTED.value, TokenKind.REJECTED.value}


def test_parquet_round_trip(frames, tmp_path):
    traces.write(frames, tmp_path)
    again = traces.read(tmp_path)
    for name in traces.SCHEMAS:
        pd.testing.assert_frame_equal(getattr(frames, name), getattr(again, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.parquet", "steps.parquet", "tokens.parquet"]


def test_unobserved_is_null_and_never_zero(trace, tmp_path):
    tokens = tuple(dataclasses.replace(token, target_prob=None, model_entropy_bits=None) for token in trace.tokens)
    blind = dataclasses.replace(trace, tokens=tokens, peak_memory_bytes=None)
    frames = traces.to_frames([blind], "arm")
    assert frames.tokens["model_entropy_bits"].isna().all()
    assert frames.requests["peak_memory_bytes"].isna().all()
    traces.write(frames, tmp_path)
    assert pq.read_table(tmp_path / "tokens.parquet")["target_prob"].null_count == len(tokens)
    assert pq.read_table(tmp_path / "requests.parquet")["peak_memory_bytes"].null_count == 1


def test_null_counts_are_not_contradictions(frames):
    steps = frames.steps.assign(num_drafted=pd.NA, num_examined=pd.NA).astype(
        {"num_drafted": "Int64", "num_examined": "Int64"}
    )
    traces.check(dataclasses.replace(frames, steps=steps))
    wrong = steps.assign(num_emitted=steps["num_emitted"] + 1)  # what is known is still held to
    with pytest.raises(traces.TraceError):
        traces.check(dataclasses.replace(frames, steps=wrong))


def test_arms_without_token_rows_are_allowed(frames):
    traces.check(dataclasses.replace(frames, tokens=frames.tokens.iloc[:0]))
    with pytest.raises(traces.TraceError):  # but an arm that has some has all
        traces.check(dataclasses.replace(frames, tokens=frames.tokens.iloc[1:]))


def test_request_times(trace, frames):
    row, ends = frames.requests.iloc[0], [step.end_seconds for step in trace.steps]
    assert row["ttft_seconds"] == ends[0]
    assert row["e2e_seconds"] == row["wall_seconds"] == pytest.approx(ends[-1])


def test_a_batch_shares_its_wall_clock(trace):
    steps = tuple(dataclasses.replace(step, batch_size=4) for step in trace.steps)
    row = traces.to_frames([dataclasses.replace(trace, steps=steps)], "arm").requests.iloc[0]
    assert row["wall_seconds"] == pytest.approx(row["e2e_seconds"] / 4)


def cut_trace(examined: int) -> Trace:
    """Four drafted, two kept, then a stop."""
    cut = dataclasses.replace(fake_step("p1", 1, 4, 2, examined, 0.2, 0.1), num_emitted=2, cut=True)
    tokens = [fake_token("p1", 0, 0, 5, TokenKind.PREFILL, 1.0)]
    tokens += [fake_token("p1", 1, k, 5 + k, TokenKind.ACCEPTED, 1.0) for k in (1, 2)]
    steps = (fake_step("p1", 0, 0, 0, 0, 0.1, 0.1), cut)
    return Trace("p1", 3, (5, 6, 7), "text", FinishReason.STOP, steps, tuple(tokens))


def test_a_cut_step_has_no_rejection():
    assert traces.to_frames([cut_trace(examined=2)], "arm").steps["num_emitted"].tolist() == [1, 2]
    with pytest.raises(TraceError, match="where cut, num_examined = num_accepted"):
        traces.to_frames([cut_trace(examined=3)], "arm")


@pytest.mark.parametrize(
    ("table", "column", "value", "rule"),
    [
        ("steps", "num_emitted", 9, "num_emitted = num_accepted"),
        ("steps", "num_examined", 99, "num_drafted >= num_examined"),
        ("steps", "num_drafted", 0, "num_drafted >= num_examined"),
        ("steps", "num_examined", -1, "num_examined >= num_accepted"),
        ("steps", "draft_seconds", -0.1, "draft_seconds >= 0"),
        ("steps", "end_seconds", 0.0, "end_seconds never goes back"),
        ("steps", "batch_size", 0, "batch_size >= 1"),
        ("steps", "step", 7, "step counts 0, 1, 2"),
        ("steps", "num_emitted", None, "num_emitted is never null"),
    ],
)
def test_step_contradictions_are_named(frames, table, column, value, rule):
    with pytest.raises(TraceError, match=rf"request p1, step \d.*{rule}"):
        traces.check(edited(frames, table, 2, column, value))


def test_token_contradictions_are_named(frames):
    accepted = frames.tokens.index[frames.tokens["kind"] == "accepted"][0]
    rejected = frames.tokens.index[frames.tokens["kind"] == "rejected"][0]
    cases = [
        (edited(frames, "tokens", accepted, "kind", "bonus"), "accepted rows = num_accepted"),
        (edited(frames, "tokens", accepted, "emitted", False), "emitted rows = num_emitted"),
        (edited(frames, "tokens", rejected, "emitted", True), "rejected is not emitted"),
        (edited(frames, "tokens", rejected, "kind", "bonus"), "examined rows = num_examined"),
        (edited(frames, "tokens", accepted, "token_id", 123456), "token_ids are the emitted ids"),
        (edited(frames, "tokens", accepted, "target_prob", 1.5), "target_prob lies in"),
        (edited(frames, "tokens", accepted, "model_entropy_bits", -1.0), "model_entropy_bits >= 0"),
        (edited(frames, "tokens", accepted, "step", 999), "every token row has its step"),
    ]
    for broken, rule in cases:
        with pytest.raises(TraceError, match=rule):
            traces.check(broken)


def test_request_contradictions_are_named(trace, frames):
    with pytest.raises(TraceError, match="occurs once"):
        traces.to_frames([trace, trace], "arm")
    with pytest.raises(TraceError, match="num_tokens = length of token_ids"):
        traces.check(edited(frames, "requests", 0, "num_tokens", 3))
    with pytest.raises(TraceError, match="every step has its request"):
        traces.check(dataclasses.replace(frames, requests=frames.requests.iloc[:0], tokens=frames.tokens.iloc[:0]))
    with pytest.raises(TraceError, match="the table of steps lacks cut"):
        traces.check(dataclasses.replace(frames, steps=frames.steps.drop(columns="cut")))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with contextlib.suppress(RuntimeError), traces.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_arms_side_by_side(trace):
    both = traces.concat([traces.to_frames([trace], name) for name in ("plain", "fast")])
    traces.check(both)
    assert set(both.arm("fast").steps["arm"]) == {"fast"}
    assert len(both.steps) == 2 * len(trace.steps)


def imports(path: Path) -> set[str]:
    """Modules a file imports when it runs, so without those under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("room", ["measurement/metrics", "plots", "costmodel"])
def test_reporting_needs_no_model(room: str) -> None:
    root = Path(specdec.__file__).parent
    waiting, seen = list(root.joinpath(room).glob("*.py")), set()
    assert waiting
    while waiting:
        path = waiting.pop()
        if path.is_file() and path not in seen:
            seen.add(path)
            found = imports(path)
            assert not {each.split(".")[0] for each in found} & {"torch", "transformers"}, path
            bases = [root.joinpath(*each.split(".")[1:]) for each in found if each.startswith("specdec.")]
            waiting += [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
    assert any(path.name == "results.py" for path in seen) != (room == "costmodel"), "the walk follows imports"
