"""`Trace`s → three tables → Parquet and back, with every identity checked on the way in.

steps holds one row per step, tokens one per examined draft token or token drawn from the target, requests one per
request; each row names its arm. What a backend could not observe is null in the file (`<NA>` for counts, nan for
seconds and probabilities in memory), never zero. Nothing here imports torch: a `Trace` is only read from.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from specdec.types import Trace


def _field(name: str, kind: Any, required: bool = False) -> Any:
    return pa.field(name, kind, nullable=not required)


STEP_SCHEMA = pa.schema(
    [
        _field("arm", pa.string(), required=True),
        _field("request_id", pa.string(), required=True),
        _field("step", pa.int64(), required=True),
        *(_field(name, pa.int64()) for name in ("batch_size", "context_length")),
        *(_field(name, pa.int64()) for name in ("num_drafted", "num_examined", "num_accepted")),
        _field("num_emitted", pa.int64(), required=True),
        _field("cut", pa.bool_(), required=True),
        *(_field(f"{part}_seconds", pa.float64()) for part in ("draft", "forward", "verify", "rollback", "other")),
        _field("end_seconds", pa.float64()),
    ]
)
TOKEN_SCHEMA = pa.schema(
    [
        _field("arm", pa.string(), required=True),
        _field("request_id", pa.string(), required=True),
        _field("step", pa.int64(), required=True),
        *(_field(name, pa.int64(), required=True) for name in ("draft_position", "token_id")),
        _field("kind", pa.string(), required=True),
        _field("emitted", pa.bool_(), required=True),
        *(_field(name, pa.float64()) for name in ("target_prob", "draft_prob")),
        *(_field(name, pa.float64()) for name in ("model_entropy_bits", "sampling_entropy_bits")),
        _field("expected_acceptance", pa.float64()),
    ]
)
REQUEST_SCHEMA = pa.schema(
    [
        _field("arm", pa.string(), required=True),
        _field("request_id", pa.string(), required=True),
        _field("prompt_length", pa.int64()),
        _field("num_tokens", pa.int64(), required=True),
        _field("finish_reason", pa.string()),
        *(_field(name, pa.float64()) for name in ("ttft_seconds", "e2e_seconds", "wall_seconds")),
        _field("peak_memory_bytes", pa.int64()),
        _field("token_ids", pa.list_(pa.int64()), required=True),
        _field("text", pa.string()),
    ]
)
SCHEMAS = {"steps": STEP_SCHEMA, "tokens": TOKEN_SCHEMA, "requests": REQUEST_SCHEMA}
REQUEST = ["arm", "request_id"]
STEP = [*REQUEST, "step"]
DRAFTED_KINDS = ("accepted", "rejected")
"""Kinds of token rows that were drafted and examined, as `specdec.types.TokenKind` spells them."""


class TraceError(ValueError):
    """Recorded numbers contradict each other; the message names arm, request and step."""


@dataclass(frozen=True)
class Frames:
    """The three tables of one or more arms, columns as in `SCHEMAS`."""

    steps: pd.DataFrame
    tokens: pd.DataFrame
    requests: pd.DataFrame

    def arm(self, name: str) -> Frames:
        """The rows of one arm."""
        return Frames(*(table[table["arm"] == name] for table in (self.steps, self.tokens, self.requests)))


def to_frames(traces: Iterable[Trace], arm: str) -> Frames:
    """Tables of one arm's traces, checked: raises `TraceError` where a trace contradicts itself."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
    for trace in traces:
        rows["steps"] += [{"arm": arm, **vars(step)} for step in trace.steps]
        rows["tokens"] += [{"arm": arm, **vars(token), "kind": token.kind.value} for token in trace.tokens]
        rows["requests"].append({"arm": arm, **_request_row(trace)})
    frames = Frames(**{name: _to_pandas(pa.Table.from_pylist(rows[name], SCHEMAS[name])) for name in SCHEMAS})
    check(frames)
    return frames


def concat(parts: Iterable[Frames]) -> Frames:
    """The tables of several arms, one below the other."""
    listed = list(parts)
    tables = {name: [getattr(part, name) for part in listed] for name in SCHEMAS}
    return Frames(**{name: pd.concat(tables[name], ignore_index=True) for name in SCHEMAS})


def write(frames: Frames, folder: Path) -> None:
    """Write steps.parquet, tokens.parquet and requests.parquet, each whole or not at all."""
    for name, schema in SCHEMAS.items():
        table = pa.Table.from_pandas(getattr(frames, name), schema=schema, preserve_index=False)
        with replacing(folder / f"{name}.parquet") as path:
            pq.write_table(table, path)


def read(folder: Path) -> Frames:
    """Read what `write` wrote. Raises `TraceError` where the numbers contradict each other."""
    tables = {name: pq.read_table(folder / f"{name}.parquet", schema=SCHEMAS[name]) for name in SCHEMAS}
    frames = Frames(**{name: _to_pandas(table) for name, table in tables.items()})
    check(frames)
    return frames


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check(frames: Frames) -> None:
    """Hold every identity between the tables. Raises `TraceError` naming arm, request and step.

    emitted = accepted + 1 − cut holds in every step, so block efficiency is 1 + (Σ accepted − Σ cut) ÷ steps, and with
    accepted token rows equal to accepted counts the joint acceptance of the positions adds up to the same.
    """
    _check_required(frames)
    _require(frames.requests, ~frames.requests.duplicated(REQUEST), "request_id occurs once in an arm")
    _check_steps(frames.steps)
    _check_tokens(frames.tokens)
    _check_tokens_against_steps(frames)
    _check_requests(frames)


def _request_row(trace: Trace) -> dict[str, Any]:
    ends = [step.end_seconds for step in trace.steps]
    gaps = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    first = next((step.end_seconds for step in trace.steps if step.num_emitted), None)
    return {
        "request_id": trace.request_id,
        "prompt_length": trace.prompt_length,
        "num_tokens": len(trace.token_ids),
        "finish_reason": trace.finish_reason.value,
        "ttft_seconds": first,
        "e2e_seconds": ends[-1] if ends else None,
        # Rows of one batch share its wall-clock, so that their sum is the time that passed.
        "wall_seconds": sum(gap / step.batch_size for gap, step in zip(gaps, trace.steps, strict=True)) or None,
        "peak_memory_bytes": trace.peak_memory_bytes,
        "token_ids": list(trace.token_ids),
        "text": trace.text,
    }


def _to_pandas(table: Any) -> pd.DataFrame:
    kinds = {pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=kinds.get)
    return frame


def _require(rows: pd.DataFrame, holds: pd.Series, rule: str) -> None:
    """Raise for the first row where the rule is known not to hold; what is null is not known."""
    broken = rows[~holds.fillna(True).astype(bool)]
    if broken.empty:
        return
    row = broken.iloc[0]
    place = ", ".join(f"{name.removesuffix('_id')} {row[name]}" for name in STEP if name in row)
    shown = {name: row[name] for name in rows.columns if name in rule}
    values = ", ".join(f"{name}={value}" for name, value in shown.items())
    raise TraceError(f"{place}: {rule} does not hold ({values})")


def _check_required(frames: Frames) -> None:
    for name, schema in SCHEMAS.items():
        table: pd.DataFrame = getattr(frames, name)
        missing = [field.name for field in schema if field.name not in table.columns]
        if missing:
            raise TraceError(f"the table of {name} lacks {', '.join(missing)}")
        for field in schema:
            if not field.nullable:
                _require(table, table[field.name].notna(), f"{field.name} is never null")


def _check_steps(steps: pd.DataFrame) -> None:
    emitted, accepted, examined = steps["num_emitted"], steps["num_accepted"], steps["num_examined"]
    cut = steps["cut"].astype(bool)
    _require(steps, emitted == accepted + 1 - cut, "num_emitted = num_accepted + 1 - cut")
    _require(steps, ~cut | (examined == accepted), "where cut, num_examined = num_accepted")
    _require(steps, examined >= accepted, "num_examined >= num_accepted")
    _require(steps, steps["num_drafted"] >= examined, "num_drafted >= num_examined")
    _require(steps, steps["batch_size"] >= 1, "batch_size >= 1")
    for name in ("num_emitted", "num_accepted"):
        _require(steps, steps[name] >= 0, f"{name} >= 0")
    for name in (column for column in STEP_SCHEMA.names if column.endswith("_seconds")):
        _require(steps, (steps[name] >= 0) | steps[name].isna(), f"{name} >= 0")
    grouped = steps.groupby(REQUEST, sort=False)
    _require(steps, steps["step"] == grouped.cumcount(), "step counts 0, 1, 2, ... without gap or repetition")
    elapsed = grouped["end_seconds"].diff()
    _require(steps, (elapsed >= 0) | elapsed.isna(), "end_seconds never goes back")


def _check_tokens(tokens: pd.DataFrame) -> None:
    for name in ("target_prob", "draft_prob", "expected_acceptance"):
        _require(tokens, tokens[name].between(0, 1 + 1e-4) | tokens[name].isna(), f"{name} lies in [0, 1]")
    for name in ("model_entropy_bits", "sampling_entropy_bits"):
        _require(tokens, (tokens[name] >= -1e-4) | tokens[name].isna(), f"{name} >= 0")
    _require(tokens, ~((tokens["kind"] == "rejected") & tokens["emitted"]), "a token of kind rejected is not emitted")
    _require(tokens, tokens["draft_position"] >= 0, "draft_position >= 0")


def _check_tokens_against_steps(frames: Frames) -> None:
    """Token rows add up to their step's counts, in arms that recorded tokens at all."""
    tokens = frames.tokens
    steps = frames.steps[frames.steps["arm"].isin(tokens["arm"].unique())]
    counted = pd.DataFrame(
        {
            "emitted rows": tokens["emitted"].astype(int),
            "accepted rows": (tokens["kind"] == "accepted").astype(int),
            "examined rows": tokens["kind"].isin(DRAFTED_KINDS).astype(int),
        }
    )
    sums = pd.concat([tokens[STEP], counted], axis=1).groupby(STEP, sort=False).sum().reset_index()
    joined = steps.merge(sums, on=STEP, how="outer", indicator="found")
    _require(joined, joined["found"] != "right_only", "every token row has its step")
    joined = joined.fillna(dict.fromkeys(counted.columns, 0))
    for rule in ("emitted", "accepted", "examined"):
        _require(joined, joined[f"{rule} rows"] == joined[f"num_{rule}"], f"{rule} rows = num_{rule}")


def _check_requests(frames: Frames) -> None:
    requests = frames.requests
    lengths = requests["token_ids"].map(len)
    _require(requests, lengths == requests["num_tokens"], "num_tokens = length of token_ids")
    emitted = frames.steps.groupby(REQUEST, sort=False)["num_emitted"].sum().rename("emitted in steps").reset_index()
    joined = requests.merge(emitted, on=REQUEST, how="outer", indicator="found")
    _require(joined, joined["found"] != "right_only", "every step has its request_id among the requests")
    _require(joined, joined["num_tokens"] == joined["emitted in steps"], "num_tokens = emitted in steps")
    rows = frames.tokens[frames.tokens["emitted"]].sort_values([*STEP, "draft_position"], kind="stable")
    ids = rows.groupby(REQUEST, sort=False)["token_id"].agg(list).rename("emitted ids").reset_index()
    joined = requests.merge(ids, on=REQUEST)
    same = [list(a) == list(b) for a, b in zip(joined["token_ids"], joined["emitted ids"], strict=True)]
    _require(joined, pd.Series(same, index=joined.index, dtype=bool), "token_ids are the emitted ids in order")
