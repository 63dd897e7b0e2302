"""Rows of the summary: one measured value each, with its spread; and the summary as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from specdec.measurement.statistics import Floats, Interval, bootstrap

Row = dict[str, Any]
"""measure, value, low, high, limits, n; system, arm and x where they apply."""

QUARTILES, PROMPTS = "quartiles", "95 % over prompts"


def row(measure: str, found: Interval, limits: str, n: int, *, system: str = "", arm: str = "", x: int = 0) -> Row:
    """One line of summary.csv. x: tokens of a forward, context length or batch size, by the part."""
    return {
        "system": system,
        "arm": arm,
        "x": x,
        "measure": measure,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "limits": limits,
        "n": n,
    }


def groups(raw: pd.DataFrame, *columns: str) -> list[tuple[Any, pd.DataFrame]]:
    """Rows by the values of some columns, a tuple of them each, in order of appearance."""
    return list(raw.groupby(list(columns), sort=False))


def spread(measure: str, values: ArrayLike, *, system: str = "", arm: str = "", x: int = 0) -> Row:
    """Median and quartiles of what was measured in each round."""
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[~np.isnan(numbers)]
    low, middle, high = np.quantile(numbers, [0.25, 0.5, 0.75]) if len(numbers) else [math.nan] * 3
    found = Interval(float(middle), float(low), float(high))
    return row(measure, found, QUARTILES, len(numbers), system=system, arm=arm, x=x)


def of_totals(
    measure: str,
    columns: Sequence[ArrayLike],
    statistic: Callable[[Floats], Floats],
    *,
    system: str = "",
    arm: str = "",
    x: int = 0,
) -> Row:
    """A ratio of totals with limits for other prompts of the kind. columns: [n] values each, one per prompt."""
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    return row(measure, bootstrap(table, statistic), PROMPTS, len(table), system=system, arm=arm, x=x)


class _Shown(NamedTuple):
    """How a measure is written. x: what the x of its rows counts."""

    label: str
    scale: float
    pattern: str
    x: str = ""


_MEASURES: Mapping[str, _Shown] = {
    "tokens_per_second": _Shown("tokens/s", 1, "{:.1f}"),
    "speedup": _Shown("tokens/s, ratio", 1, "{:.2f}×"),
    "same_tokens_share": _Shown("requests with specdec's plain tokens", 100, "{:.0f} %"),
    "outside_share": _Shown("step time outside the target's forward", 100, "{:.1f} %"),
    "forward_seconds": _Shown("forward, ms", 1e3, "{:.1f}", "tokens"),
    "relative_cost": _Shown("forward, ratio to 1 token", 1, "{:.2f}×", "tokens"),
    "dtype_cost": _Shown("forward of 1 token, ratio to float32's", 1, "{:.2f}×"),
    "long_forward_seconds": _Shown("forward after a long context, ms", 1e3, "{:.1f}", "tokens"),
    "long_relative_cost": _Shown("forward after a long context, ratio to 1 token", 1, "{:.2f}×", "tokens"),
    "prefill_seconds": _Shown("prefill, s", 1, "{:.2f}", "context"),
    "prefill_ratio": _Shown("prefill seconds, ratio", 1, "{:.2f}×", "context"),
    "step_seconds": _Shown("decode step, ms", 1e3, "{:.1f}", "context"),
    "step_over_reading": _Shown("decode step ÷ reading its weights and cache", 1, "{:.2f}×", "context"),
    "verify_step_seconds": _Shown("verify step, ms", 1e3, "{:.1f}", "context"),
    "batch_tokens_per_second": _Shown("tokens/s after the first", 1, "{:.1f}", "batch"),
    "batch_speedup": _Shown("tokens/s after the first, ratio to batch 1", 1, "{:.2f}×", "batch"),
    "draft_seconds": _Shown("draft step, ms a token", 1e3, "{:.2f}"),
    "cost_ratio": _Shown("c: draft step ÷ target step", 1, "{:.3f}"),
    "bookkeeping_share": _Shown("drafting outside the draft's network, of step time", 100, "{:.1f} %"),
    "rule_seconds": _Shown("verification rule, ms", 1e3, "{:.3f}"),
    "peak_memory_ratio": _Shown("peak memory ÷ (weights + cache + logits)", 1, "{:.2f}"),
}
"""Measures in the order in which they are shown; others (shares of step time) are for the figure."""


def markdown(summary: pd.DataFrame) -> str:
    """One table per measure, a column per dtype: value [low, high]."""
    blocks = []
    for measure, shown in _MEASURES.items():
        rows = summary[summary["measure"] == measure]
        if len(rows):
            blocks.append(_block(rows, shown))
    return "\n\n".join([*blocks, _footnote(summary)]) + "\n"


def _block(rows: pd.DataFrame, shown: _Shown) -> str:
    cells: dict[str, dict[str, str]] = {}
    for found in rows.to_dict("records"):
        entry = {str(name): cell for name, cell in found.items()}
        what = ", ".join(str(part) for part in (entry["system"], entry["arm"]) if part)
        place = f"{shown.x} {entry['x']}" if shown.x else ""
        name = ", ".join(part for part in (what, place) if part) or shown.label
        cells.setdefault(name, {})[entry["dtype"]] = _cell(entry, shown)
    dtypes = list(dict.fromkeys(rows["dtype"]))
    lines = [[shown.label, *dtypes], ["---"] * (1 + len(dtypes))]
    lines += [[name, *(values.get(dtype, "") for dtype in dtypes)] for name, values in cells.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(entry: Mapping[str, Any], shown: _Shown) -> str:
    value, low, high = (shown.pattern.format(shown.scale * entry[name]) for name in ("value", "low", "high"))
    return value if math.isnan(entry["low"]) or entry["low"] == entry["high"] else f"{value} [{low}, {high}]"


def _footnote(summary: pd.DataFrame) -> str:
    facts = [", ".join(map(str, summary[name].unique())) for name in ("model", "draft", "hardware", "git_sha")]
    model, draft, hardware, revision = facts
    return (
        f"{model}; draft model: {draft}; {hardware}; git {revision}. Brackets: 95 % limits over prompts for ratios of "
        "totals (tokens/s, their ratios, shares), quartiles over rounds otherwise; n of each in summary.csv."
    )
