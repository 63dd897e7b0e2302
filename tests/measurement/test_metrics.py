"""Metrics by hand on small traces, and estimators against the rates that made the traces."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specdec.costmodel import expected_tokens
from specdec.measurement import traces
from specdec.measurement.metrics import (
    POSITION_COLUMNS,
    SUMMARY_COLUMNS,
    markdown_table,
    per_position,
    repeated_tokens,
    summarise,
)
from specdec.types import FinishReason, TokenKind, Trace
from tests.fake_traces import PLAIN, fake_arm, fake_metadata, fake_step, fake_token, fake_trace

REQUIRED = {
    *("workload", "tier", "temperature", "arm", "drafter", "verifier", "controller", "num_draft_tokens", "dtype"),
    *("num_requests", "num_tokens", "model_entropy_bits", "repetition_share", "acceptance_rate"),
    *("expected_acceptance", "block_efficiency", "tokens_per_second", "speedup", "speedup_low", "speedup_high"),
    *("step_latency_p99_seconds", "tpot_p99_seconds", "lossless", "run_id", "git_sha", "synthetic"),
}


def by_hand(request_id="p1", step_seconds=0.1, batch_size=1) -> Trace:
    """Prefill; 3 drafted, 1 kept, rejected at 2; nothing drafted; 2 drafted and kept. 1 + 2 + 1 + 3 tokens."""
    counts = [(0, 0, 0), (3, 1, 2), (0, 0, 0), (2, 2, 2)]
    steps = [
        fake_step(request_id, number, drafted, accepted, examined, (number + 1) * step_seconds, step_seconds)
        for number, (drafted, accepted, examined) in enumerate(counts)
    ]
    kinds = [(0, 0, "prefill"), (1, 1, "accepted"), (1, 2, "rejected"), (1, 2, "recovered"), (2, 1, "bonus")]
    kinds += [(3, 1, "accepted"), (3, 2, "accepted"), (3, 3, "bonus")]
    tokens = [fake_token(request_id, step, position, 7, TokenKind(kind), 1.0) for step, position, kind in kinds]
    steps = [dataclasses.replace(step, batch_size=batch_size) for step in steps]
    return Trace(request_id, 5, (7,) * 7, "", FinishReason.LENGTH, tuple(steps), tuple(tokens), 100)


def plain_trace(request_id="p1", tokens=7, step_seconds=0.08) -> Trace:
    trace = fake_trace(request_id, 0, 0.0, 2.0, tokens, np.random.default_rng(0))
    steps = [
        dataclasses.replace(step, end_seconds=(step.step + 1) * step_seconds, forward_seconds=step_seconds)
        for step in trace.steps
    ]
    return dataclasses.replace(trace, steps=tuple(steps))


def summary_of(arms, metadata_arms=None, **changes) -> pd.DataFrame:
    frames = traces.concat(traces.to_frames(listed, name) for name, listed in arms.items())
    described = metadata_arms or {name: PLAIN if name == "plain" else fake_arm() for name in arms}
    table = summarise(frames.steps, frames.tokens, frames.requests, fake_metadata(described, **changes))
    return table.set_index("arm")


def test_counts_and_ratios_by_hand():
    table = summary_of({"plain": [plain_trace()], "fast": [by_hand()]})
    plain, row = table.loc["plain"], table.loc["fast"]
    counts = ["num_requests", "num_tokens", "num_steps", "num_drafted", "num_examined", "num_accepted"]
    assert row[counts].tolist() == [1, 7, 3, 5, 4, 3]
    assert row["num_rejections"] == 1
    assert row["acceptance_rate"] == 3 / 4
    assert row["draft_acceptance_rate"] == 3 / 5
    assert row["block_efficiency"] == 6 / 3  # the prefill and its token are not counted
    assert row["expected_acceptance"] == 0.5
    assert row["tokens_per_second"] == pytest.approx(7 / 0.4)
    assert row["speedup"] == pytest.approx((7 / 0.4) / (7 / 0.56))
    assert row["ttft_p50_seconds"] == pytest.approx(0.1)
    assert row["tpot_p50_seconds"] == pytest.approx(0.3 / 6)
    assert row["itl_p50_seconds"] == pytest.approx(0.1)
    assert row["step_latency_p50_seconds"] == pytest.approx(0.1)
    assert row["decode_seconds"] == pytest.approx(0.3)
    plain_step = plain["decode_seconds"] / plain["num_steps"]
    assert row["num_drafting_steps"] == 2
    assert row["asking_seconds"] == pytest.approx(0.003)
    assert row["drafting_seconds"] == pytest.approx(0.006)
    assert row["drafting_cost"] == pytest.approx(0.006 / 5 / plain_step)
    assert (plain["num_drafting_steps"], plain["drafting_seconds"]) == (0, 0)
    assert math.isnan(plain["drafting_cost"])
    shares = row[[f"{part}_share" for part in ("draft", "forward", "verify", "rollback", "other")]]
    assert shares.tolist() == pytest.approx([0.03, 0.9, 0.06, 0.0, 0.01])
    assert row["peak_memory_bytes"] == 100
    assert row["model_entropy_bits"] == 1.0
    assert row["sampling_entropy_bits"] == 0.5
    assert row["repetition_share"] == 3 / 7
    assert row["step_latency_p99_high_seconds"] == math.inf
    assert math.isnan(row["speedup_low"])  # one prompt


def test_what_asking_costs_is_not_charged_to_the_few_tokens_of_a_controller_that_stays_plain():
    drafting, asking = by_hand("p1"), fake_trace("p2", 0, 0.0, 2.0, 400, np.random.default_rng(0))
    both, alone = (summary_of({"plain": [plain_trace()], "shy": found}) for found in ([drafting, asking], [drafting]))
    for name in ("num_drafting_steps", "drafting_seconds", "drafting_cost"):
        assert both.loc["shy", name] == pytest.approx(alone.loc["shy", name])
    row = both.loc["shy"]
    assert row["asking_seconds"] > 50 * row["drafting_seconds"]
    assert row["asking_seconds"] + row["drafting_seconds"] == pytest.approx(row["draft_share"] * row["decode_seconds"])


def test_rows_of_a_batch_share_what_asking_and_drafting_took():
    batch = [by_hand("p1", batch_size=2), by_hand("p2", batch_size=2)]
    shared = summary_of({"plain": [plain_trace()], "fast": batch}).loc["fast"]
    alone = summary_of({"plain": [plain_trace()], "fast": [by_hand()]}).loc["fast"]
    for name in ("asking_seconds", "drafting_seconds", "drafting_cost"):
        assert shared[name] == pytest.approx(alone[name])


def test_plain_arm_has_no_acceptance_and_speedup_one():
    row = summary_of({"plain": [plain_trace(f"p{i}", 7 + i) for i in range(3)]}).loc["plain"]
    assert row["block_efficiency"] == 1
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == (1, 1, 1)
    for name in ("acceptance_rate", "draft_acceptance_rate", "expected_acceptance"):
        assert math.isnan(row[name])


def test_estimators_find_the_rates_behind_the_traces():
    rng = np.random.default_rng(0)
    listed = [fake_trace(f"p{i}", 5, 0.8, 1.0, 150, rng) for i in range(60)]
    row = summary_of({"plain": [plain_trace()], "fast": listed}).loc["fast"]
    assert row["acceptance_rate"] == pytest.approx(0.8, abs=0.015)
    assert row["draft_acceptance_rate"] == pytest.approx(0.5379, abs=0.02)
    assert row["block_efficiency"] == pytest.approx(expected_tokens(0.8, 5), rel=0.03)
    assert row["acceptance_rate_low"] < 0.8 < row["acceptance_rate_high"]
    assert row["block_efficiency"] == pytest.approx(1 + row["num_accepted"] / row["num_steps"])


def test_speedup_uses_the_prompts_both_finished():
    slow = [plain_trace("p1"), plain_trace("p2", step_seconds=8.0)]
    row = summary_of({"plain": slow, "fast": [by_hand("p1")]}).loc["fast"]
    assert row["speedup"] == pytest.approx((7 / 0.4) / (7 / 0.56))


def test_a_batch_counts_its_wall_clock_once():
    batch = [by_hand(f"p{i}", batch_size=4) for i in range(4)]
    row = summary_of({"plain": [plain_trace(f"p{i}") for i in range(4)], "fast": batch}).loc["fast"]
    assert row["tokens_per_second"] == pytest.approx(28 / 0.4)
    assert row["decode_seconds"] == pytest.approx(0.3)
    assert row["step_latency_p50_seconds"] == pytest.approx(0.1)


def test_rules_without_alpha_report_none():
    arms = {"plain": PLAIN, "block": fake_arm(verifier="block", tokenwise=False)}
    row = summary_of({"plain": [plain_trace()], "block": [by_hand()]}, arms).loc["block"]
    assert math.isnan(row["acceptance_rate"])
    assert row["expected_acceptance"] == 0.5
    assert row["block_efficiency"] == 2


def test_unobserved_counts_stay_null():
    frames = traces.concat([traces.to_frames([plain_trace()], "plain"), traces.to_frames([by_hand()], "remote")])
    remote = frames.steps["arm"] == "remote"
    steps = frames.steps.copy()
    steps.loc[remote, ["num_drafted", "num_examined"]] = pd.NA
    steps.loc[remote, ["draft_seconds"]] = math.nan
    tokens = frames.tokens[frames.tokens["arm"] == "plain"]
    arms = {"plain": PLAIN, "remote": fake_arm()}
    row = summarise(steps, tokens, frames.requests, fake_metadata(arms)).set_index("arm").loc["remote"]
    nulls = ["num_drafted", "num_examined", "num_rejections", "acceptance_rate", "draft_acceptance_rate"]
    nulls += ["model_entropy_bits", "expected_acceptance", "draft_share", "step_latency_p99_seconds"]
    assert row[nulls].isna().all()
    assert row["num_accepted"] == 3
    assert row["tokens_per_second"] == pytest.approx(7 / 0.4)


def test_cut_steps_count_no_rejection():
    trace = by_hand()
    cut = dataclasses.replace(trace.steps[3], num_emitted=2, cut=True)
    trace = dataclasses.replace(
        trace, steps=(*trace.steps[:3], cut), tokens=trace.tokens[:-1], token_ids=trace.token_ids[:-1]
    )
    row = summary_of({"plain": [plain_trace()], "fast": [trace]}).loc["fast"]
    assert row["num_rejections"] == 1
    assert row["block_efficiency"] == 5 / 3


def test_repetition():
    assert repeated_tokens([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_tokens([1, 2, 3, 4, 1, 2, 3, 4]) == 1
    assert repeated_tokens([7] * 10) == 6  # the first 4-gram is new
    assert repeated_tokens([1, 2] * 10) == 15
    assert repeated_tokens([1, 2, 3]) == repeated_tokens([]) == 0


def test_metadata_reaches_the_row():
    arms = {"plain": PLAIN, "fast": fake_arm(8, synthetic=True, lossless="declared")}
    changes = {"failures": {"fast": {"p9": "out of memory"}}, "temperature": 0.7}
    table = summary_of({"plain": [plain_trace()], "fast": [by_hand()]}, arms, **changes)
    row = table.loc["fast"]
    assert row["num_draft_tokens"] == 8
    assert row["synthetic"]
    assert row[["lossless", "num_failures", "temperature", "dtype"]].tolist() == ["declared", 1, 0.7, "float32"]
    assert table.loc["plain", "num_failures"] == 0
    assert row["hardware"] == "Imaginary CPU, 2 cores, 2 threads"


def test_an_arm_whose_every_request_failed_keeps_its_row():
    arms = {"plain": PLAIN, "broken": fake_arm()}
    failures = {"broken": {"p1": "out of memory"}}
    row = summary_of({"plain": [plain_trace()]}, arms, failures=failures).loc["broken"]
    assert row[["num_requests", "num_tokens", "num_steps", "num_failures"]].tolist() == [0, 0, 0, 1]
    measured = [
        "speedup",
        "tokens_per_second",
        "acceptance_rate",
        "block_efficiency",
        "repetition_share",
        "draft_share",
    ]
    assert (
        row[[*measured, "draft_share", "step_latency_p99_seconds", "ttft_p50_seconds", "peak_memory_bytes"]]
        .isna()
        .all()
    )


def test_without_a_plain_request_there_is_no_speedup():
    table = summary_of({"fast": [by_hand()]}, {"plain": PLAIN, "fast": fake_arm()})
    assert table.index.tolist() == ["plain", "fast"]
    assert math.isnan(table.loc["fast", "speedup"])


def test_positions_by_hand():
    frames = traces.to_frames([by_hand("p1"), by_hand("p2")], "fast")
    table = per_position(frames.tokens, fake_metadata({"fast": fake_arm()}))
    assert table["draft_position"].tolist() == [1, 2]
    assert table["num_reached"].tolist() == [4, 4]
    assert table["num_accepted"].tolist() == [4, 2]
    assert table["acceptance"].tolist() == [1.0, 0.5]
    assert (table["acceptance_low"] < table["acceptance"]).all()


def test_a_tree_counts_depths_not_nodes():
    step = fake_step("p1", 1, 3, 1, 2, 0.2, 0.1)
    tokens = [fake_token("p1", 0, 0, 1, TokenKind.PREFILL, 1.0), fake_token("p1", 1, 1, 2, TokenKind.REJECTED, 1.0)]
    tokens += [fake_token("p1", 1, 1, 3, TokenKind.ACCEPTED, 1.0), fake_token("p1", 1, 2, 4, TokenKind.BONUS, 1.0)]
    steps = (fake_step("p1", 0, 0, 0, 0, 0.1, 0.1), step)
    trace = Trace("p1", 1, (1, 3, 4), "", FinishReason.LENGTH, steps, tuple(tokens))
    table = per_position(traces.to_frames([trace], "tree").tokens, fake_metadata({"tree": fake_arm()}))
    assert table[["num_reached", "num_accepted"]].to_numpy().tolist() == [[1, 1]]


def test_schema_is_complete_and_documented():
    names = [column.name for column in SUMMARY_COLUMNS]
    assert set(names) >= REQUIRED
    assert len(names) == len(set(names))
    page = (Path(__file__).parent.parent.parent / "docs" / "results.md").read_text(encoding="utf-8")
    for marker, columns in (("summary", SUMMARY_COLUMNS), ("positions", POSITION_COLUMNS)):
        shown = page.partition(f"<!-- {marker} -->\n")[2].partition(f"<!-- /{marker} -->")[0]
        assert shown == markdown_table(columns)
