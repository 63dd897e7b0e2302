"""Columns of the tables an experiment commits; one list, from which docs/results.md is tested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

DTYPES = {"text": "string", "integer": "Int64", "number": "float64", "boolean": "boolean"}
"""Kind of a column → pandas dtype that can hold a null (nan in numbers)."""


@dataclass(frozen=True)
class Column:
    """A column's name, kind (a key of `DTYPES`) and meaning. An empty cell is a value nobody observed.

    later: not in the first tables that were committed, where it is empty.
    """

    name: str
    kind: str
    meaning: str
    later: bool = False


def _text(name: str, meaning: str) -> Column:
    return Column(name, "text", meaning)


def _count(name: str, meaning: str) -> Column:
    return Column(name, "integer", meaning)


def _number(name: str, meaning: str) -> Column:
    return Column(name, "number", meaning)


def _limits(name: str) -> tuple[Column, Column]:
    return _number(f"{name}_low", f"lower 95 % limit of `{name}`"), _number(
        f"{name}_high", f"upper 95 % limit of `{name}`"
    )


def _quantiles(name: str, meaning: str) -> tuple[Column, ...]:
    """p50, p90 and p99 of something measured in seconds, the last with its limits."""
    p99 = f"{name}_p99_seconds"
    return (
        _number(f"{name}_p50_seconds", f"median {meaning}"),
        _number(f"{name}_p90_seconds", "90th percentile of it"),
        _number(p99, "99th percentile of it, by order statistic"),
        _number(f"{name}_p99_low_seconds", f"lower 95 % limit of `{p99}`"),
        _number(f"{name}_p99_high_seconds", f"upper 95 % limit of `{p99}`; `inf`: too few samples to set one"),
    )


SUMMARY_COLUMNS: tuple[Column, ...] = (
    _text("workload", "what was asked"),
    _text("tier", "intended entropy tier of the workload (a label; the measured entropy is `model_entropy_bits`)"),
    _number("temperature", "sampling temperature; 0 is greedy"),
    _text("arm", "name of the decoding setup; the first arm of a run decodes plainly"),
    _text("drafter", "what proposes tokens"),
    _text("verifier", "the acceptance rule"),
    _text("controller", "the speculation-length policy"),
    _count("num_draft_tokens", "tokens the policy may propose in one step; 0 decodes plainly"),
    _text("model", "the target"),
    _text("dtype", "its precision"),
    Column("synthetic", "boolean", "acceptance is set rather than earned (oracle drafter, synthetic verifier)"),
    _count("num_requests", "requests decoded"),
    _count("num_failures", "requests that failed; they are in no other number"),
    _count("num_tokens", "tokens emitted, the one the prefill yields included"),
    _count("num_steps", "decode steps; the prefill is not one"),
    _count("num_drafted", "tokens proposed"),
    _count("num_examined", "tokens proposed and reached by the verifier"),
    _count("num_accepted", "tokens proposed and kept"),
    _count("num_rejections", "examined tokens that were not kept; a step cut by a stop has none"),
    _number("model_entropy_bits", "mean H of the target at temperature 1, untruncated, over emitted tokens"),
    _number("sampling_entropy_bits", "mean H of the distribution sampled from, over emitted tokens"),
    _number(
        "repetition_share",
        "share of emitted tokens that complete a 4-gram the same output already holds (seq-rep-4 of Welleck et al. "
        "2019, per token): near 1 is a loop, whose low entropy is not predictability",
    ),
    _number("acceptance_rate", "alpha: `num_accepted` ÷ `num_examined`, the censored maximum-likelihood estimate"),
    *_limits("acceptance_rate"),
    _number("draft_acceptance_rate", "`num_accepted` ÷ `num_drafted`, as servers report it; lower by construction"),
    _number("expected_acceptance", "mean Σ min(target, draft probability) over examined tokens (Leviathan's β)"),
    _number("block_efficiency", "τ: tokens emitted in decode steps ÷ `num_steps`"),
    *_limits("block_efficiency"),
    _number("tokens_per_second", "`num_tokens` ÷ wall-clock from submission to end, shared within a batch"),
    *_limits("tokens_per_second"),
    _number("speedup", "`tokens_per_second` ÷ that of the run's plain arm, over the prompts both finished"),
    *_limits("speedup"),
    _number("ttft_p50_seconds", "median time to the first token"),
    *_quantiles("tpot", "time per output token after the first, per request"),
    *_quantiles("itl", "gap between chunks as a client sees them"),
    *_quantiles("step_latency", "duration of a decode step"),
    _number("decode_seconds", "wall-clock of all decode steps, shared within a batch; what the shares are of"),
    _number("draft_share", "share of it spent on getting drafts: asking and drafting"),
    Column("num_drafting_steps", "integer", "decode steps that proposed at least one token", later=True),
    Column(
        "asking_seconds",
        "number",
        "what `draft_share` is made of: seconds of asking controller and drafter in steps that proposed nothing",
        later=True,
    ),
    Column("drafting_seconds", "number", "and the same in steps that proposed something", later=True),
    Column(
        "drafting_cost",
        "number",
        "c: seconds of drafting per token proposed, in steps that proposed any ÷ seconds of a plain decode step; a "
        "tree's nodes count as tokens",
        later=True,
    ),
    _number("forward_share", "share of it in the target's forward"),
    _number("verify_share", "share of it deciding what to keep"),
    _number("rollback_share", "share of it rolling caches back"),
    _number("other_share", "the rest"),
    _count("peak_memory_bytes", "largest memory held by any request's decoding"),
    _text("lossless", "greedy tokens against plain: `equal`, `tie`, `fault`; `declared` lossy; empty: sampled"),
    _text("hardware", "the machine"),
    _text("date", "UTC"),
    _text("git_sha", "revision of the code, `-dirty` where it had changes"),
    _text("run_id", "the run's folder under `runs/`"),
)
POSITION_COLUMNS: tuple[Column, ...] = (
    *(column for column in SUMMARY_COLUMNS if column.name in ("workload", "tier", "temperature", "arm", "synthetic")),
    _count("draft_position", "position in the draft, from 1; the depth in a tree"),
    _count("num_reached", "steps whose verifier examined a token there"),
    _count("num_accepted", "steps that kept one"),
    _number("acceptance", "`num_accepted` ÷ `num_reached`"),
    *_limits("acceptance"),
    _number("effective_reached", "independent trials that `num_reached` clustered ones are worth"),
    _text("run_id", "the run's folder under `runs/`"),
)


def conform(frame: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """The declared columns, in order, with their dtypes; raises `KeyError` where one of the first is missing."""
    absent = [column.name for column in columns if column.later and column.name not in frame]
    frame = frame.assign(**dict.fromkeys(absent, np.nan))
    return frame[[column.name for column in columns]].astype({column.name: DTYPES[column.kind] for column in columns})


def markdown_table(columns: Sequence[Column]) -> str:
    """The columns as docs/results.md shows them."""
    lines = ["| column | kind | meaning |", "|---|---|---|"]
    lines += [f"| `{column.name}` | {column.kind} | {column.meaning} |" for column in columns]
    return "\n".join(lines) + "\n"
