"""Whole requests: tokens per second of every way to decode on both sides, whether tokens agree, where time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from experiments.bench.plan import Plan
from experiments.bench.rounds import rotated, rounds
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS, PLAIN, THEIRS, Decoded, native_decoders, transformers_decoders
from experiments.bench.tables import QUARTILES, Row, groups, of_totals, row
from specdec.measurement.statistics import Interval, rate_ratio, total_ratio
from specdec.types import Trace

PARTS = ("forward", "draft", "verify", "rollback", "other")
_WARM_UP_TOKENS = 8


def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Every decoder on every request, one request a round. Columns: see `_record`."""
    requests = subject.requests(plan.max_new_tokens)[: plan.generation.rounds]
    decoders = {
        (system, arm): decoder
        for system, found in ((OURS, native_decoders(subject)), (THEIRS, transformers_decoders(subject)))
        for arm, decoder in found.items()
    }
    for decode in decoders.values():
        decode([replace(requests[0], max_new_tokens=min(_WARM_UP_TOKENS, plan.max_new_tokens))])
    records = []
    for number in rounds(replace(plan.generation, rounds=len(requests)), f"{subject.dtype} generation"):
        request = requests[number]
        for system, arm in rotated(list(decoders), number):
            records.append(_record(system, arm, request.id, decoders[system, arm]([request])))
    return pd.DataFrame(records)


def _record(system: str, arm: str, request_id: str, decoded: Decoded) -> Row:
    return {
        "system": system,
        "arm": arm,
        "request_id": request_id,
        "num_tokens": decoded.num_tokens,
        "seconds": decoded.seconds,
        "token_ids": " ".join(map(str, decoded.token_ids[0])),
        **step_seconds(decoded.traces),
    }


def step_seconds(traces: Sequence[Trace]) -> dict[str, float]:
    """Seconds of all decode steps, by what they were spent on; the prefill is no decode step."""
    steps = [step for trace in traces for step in trace.steps if step.step > 0]
    return {f"{part}_seconds": sum(getattr(step, f"{part}_seconds") for step in steps) for part in PARTS if steps}


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Tokens per second, ratios between sides and to plain decoding, agreement, shares of step time."""
    tables = {key: rows.set_index("request_id") for key, rows in groups(raw, "system", "arm")}
    plain_ids = tables[OURS, PLAIN]["token_ids"]
    rates, agreement, shares = [], [], []
    for (system, arm), table in tables.items():
        columns = [table["num_tokens"], table["seconds"]]
        rates.append(of_totals("tokens_per_second", columns, total_ratio, system=system, arm=arm))
        same = float((table["token_ids"] == plain_ids).mean())
        agreement.append(row("same_tokens_share", _exactly(same), QUARTILES, len(table), system=system, arm=arm))
        if system == OURS:
            shares += _shares(table, arm)
    return [*rates, *_speedups(tables), *agreement, *shares]


def _speedups(tables: dict[tuple[str, str], pd.DataFrame]) -> list[Row]:
    """Each arm on this engine against the same in transformers, and against plain decoding on its own side."""
    arms = list(dict.fromkeys(arm for _, arm in tables))
    pairs = [(f"{OURS} ÷ {THEIRS}", arm, (OURS, arm), (THEIRS, arm)) for arm in arms]
    pairs += [(system, f"{arm} ÷ {PLAIN}", (system, arm), (system, PLAIN)) for system, arm in tables if arm != PLAIN]
    rows = []
    for system, name, fast, slow in pairs:
        columns = [tables[side][column] for side in (fast, slow) for column in ("num_tokens", "seconds")]
        rows.append(of_totals("speedup", columns, rate_ratio, system=system, arm=name))
    return rows


def _shares(table: pd.DataFrame, arm: str) -> list[Row]:
    parts = {part: table[f"{part}_seconds"] for part in PARTS}
    whole = sum(parts.values())
    rows = [of_totals("outside_share", [whole - parts["forward"], whole], total_ratio, system=OURS, arm=arm)]
    for part, seconds in parts.items():
        rows.append(of_totals(f"{part}_share", [seconds, whole], total_ratio, system=OURS, arm=arm))
    return rows


def _exactly(value: float) -> Interval:
    return Interval(value, value, value)
