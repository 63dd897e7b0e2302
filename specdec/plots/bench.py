"""The benchmark's summary → one figure, a panel for each thing that was measured.

Colour is the system (and its way to decode, where several share a panel), marker and line are the precision. Rows are
those of `experiments.bench`: system, arm, x, measure, value, low, high, n, dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from specdec.plots.style import GREY, INK, PARTS, finish, rc_style

Draw = Callable[[pd.DataFrame, Axes, "Look"], None]
"""(rows of one panel, axes, look)"""

Line = Literal["-", ":", "--", "-."]

_COLUMNS = 3


@dataclass(frozen=True)
class Look:
    """Colour of every (system, arm) and mark of every dtype, the same in all panels."""

    colours: Mapping[tuple[str, str], Any]
    marks: Mapping[str, tuple[str, Line]]

    @classmethod
    def of(cls, summary: pd.DataFrame) -> Look:
        """By order of appearance. The first arm of the panels with lines has its system's own colour."""
        systems = [system for system in dict.fromkeys(summary["system"]) if "÷" not in system]
        _, *others = dict.fromkeys(summary.loc[summary["measure"] == "batch_tokens_per_second", "arm"]) or [""]
        palette = itertools.cycle(sns.color_palette("colorblind"))
        hues = {(system, ""): next(palette) for system in systems}
        hues |= {(system, arm): next(palette) for arm in others for system in systems}
        marks: list[tuple[str, Line]] = [("o", "-"), ("s", ":"), ("^", "--"), ("D", "-.")]
        dtypes = dict.fromkeys(summary["dtype"])
        return cls(hues, {dtype: marks[index % len(marks)] for index, dtype in enumerate(dtypes)})

    def colour(self, system: str, arm: str = "") -> Any:
        """The arm's own colour, or its system's."""
        return self.colours.get((system, arm), self.colours[system, ""])


@dataclass(frozen=True)
class _Panel:
    """measures: those whose rows it shows; it is left out where there are none."""

    title: str
    measures: tuple[str, ...]
    draw: Draw


def bench_figure(summary: pd.DataFrame) -> Figure:
    """Every panel the summary has rows for."""
    panels = [panel for panel in _panels() if summary["measure"].isin(panel.measures).any()]
    look = Look.of(summary)
    with mpl.rc_context(rc_style()):
        height = max(1, -(-len(panels) // _COLUMNS))
        figure = Figure(figsize=(13.5, 1.3 + 3.1 * height), layout="constrained")
        axes = np.ravel(figure.subplots(height, _COLUMNS, squeeze=False))
        for ax, panel in zip(axes, panels, strict=False):
            rows = summary[summary["measure"].isin(panel.measures)]
            panel.draw(rows, ax, look)
            ax.set_title(f"{panel.title}, {_count(rows)}", fontsize=9)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        _legend(figure, look)
        return finish(figure, axes[: len(panels)], "Native engine and transformers", _caption(summary))


def _panels() -> list[_Panel]:
    tokens, context, batch = "tokens in the forward", "tokens of context", "sequences in the batch"
    over_context = partial(_lines, x_label=context, logarithmic=True)
    return [
        _Panel("Whole requests", ("tokens_per_second",), partial(_dots, label="tokens per second")),
        _Panel("Where a step's time goes", tuple(f"{part}_share" for part in PARTS), _shares),
        _Panel("Forward by tokens", ("forward_seconds",), partial(_lines, label="ms", scale=1e3, x_label=tokens)),
        _Panel(
            "Forward after a long context",
            ("long_forward_seconds",),
            partial(_lines, label="ms", scale=1e3, x_label=tokens),
        ),
        _Panel("Decode step", ("step_seconds",), partial(over_context, label="ms", scale=1e3)),
        _Panel(
            "Decode step over reading its bytes",
            ("step_over_reading",),
            partial(_lines, label="ratio", x_label=context, doubling=True),
        ),
        _Panel("Verify step", ("verify_step_seconds",), partial(over_context, label="ms", scale=1e3)),
        _Panel("Prefill", ("prefill_seconds",), partial(over_context, label="s")),
        _Panel(
            "Batches",
            ("batch_tokens_per_second",),
            partial(_lines, label="tokens per second", x_label=batch, logarithmic=True, keyed=True),
        ),
        _Panel("Cost of drafting", ("cost_ratio",), partial(_dots, label="c: a draft step ÷ a target step")),
        _Panel("Verification rules", ("rule_seconds",), partial(_dots, label="ms", scale=1e3, logarithmic=True)),
    ]


def _dots(
    rows: pd.DataFrame, ax: Axes, look: Look, *, label: str, scale: float = 1.0, logarithmic: bool = False
) -> None:
    """One line per arm, a point with limits per system and dtype."""
    arms = list(dict.fromkeys(rows["arm"]))
    groups = list(rows.groupby(["system", "dtype"], sort=False))
    for rank, ((system, dtype), points) in enumerate(groups):
        places = np.array([arms.index(arm) for arm in points["arm"]]) + 0.6 * ((rank + 0.5) / len(groups) - 0.5)
        colour, (marker, line) = look.colour(str(system)), look.marks[str(dtype)]
        low, value, high = (scale * points[name].to_numpy(dtype=float) for name in ("low", "value", "high"))
        ax.hlines(places, low, high, color=colour, linewidth=1.1, linestyles=line)
        ax.plot(value, places, linestyle="none", marker=marker, color=colour, markersize=4.5)
    ax.set_yticks(range(len(arms)), arms, fontsize=7.5)
    ax.set_ylim(len(arms) - 0.5, -0.5)
    if logarithmic:
        ax.set_xscale("log")
        _label_log(ax.xaxis)
    else:
        ax.set_xlim(left=0)
    ax.set_xlabel(label)


def _lines(
    rows: pd.DataFrame,
    ax: Axes,
    look: Look,
    *,
    label: str,
    x_label: str,
    scale: float = 1.0,
    logarithmic: bool = False,
    doubling: bool = False,
    keyed: bool = False,
) -> None:
    """A line with limits per system, arm and dtype. doubling: x alone is logarithmic. keyed: its arms are named."""
    for (system, arm, dtype), points in rows.groupby(["system", "arm", "dtype"], sort=False):
        colour, (marker, line) = look.colour(str(system), str(arm)), look.marks[str(dtype)]
        x = points["x"].to_numpy(dtype=float)
        low, value, high = (scale * points[name].to_numpy(dtype=float) for name in ("low", "value", "high"))
        ax.plot(x, value, linestyle=line, marker=marker, color=colour, linewidth=1.2, markersize=4)
        ax.vlines(x, low, high, color=colour, linewidth=1.1)
    if logarithmic or doubling:
        ax.set_xscale("log", base=2)
        places = sorted(rows["x"].unique())
        ax.set_xticks(places, [f"{x / 1024:.0f}k" if x >= 1000 else f"{x:g}" for x in places])
    if logarithmic:
        ax.set_yscale("log")
        _label_log(ax.yaxis)
    else:
        ax.set_ylim(bottom=0)
    if keyed:
        _name_arms(rows, ax, look)
    ax.set_xlabel(x_label)
    ax.set_ylabel(label)


def _label_log(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 times powers of ten, and nowhere else."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _name_arms(rows: pd.DataFrame, ax: Axes, look: Look) -> None:
    names = rows[["system", "arm"]].drop_duplicates().itertuples(index=False)
    handles = [Line2D([], [], color=look.colour(system, arm), label=f"{system} {arm}") for system, arm in names]
    ax.legend(handles=handles, frameon=False, fontsize=7.5)


def _shares(rows: pd.DataFrame, ax: Axes, look: Look) -> None:
    """Stacked shares of step time, a bar per arm and dtype."""
    table = rows.pivot_table(index=["arm", "dtype"], columns="measure", values="value", sort=False)
    colours = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True))
    left = np.zeros(len(table))
    for part in PARTS:
        width = table[f"{part}_share"].to_numpy(dtype=float)
        ax.barh(range(len(table)), width, left=left, height=0.66, color=colours[part], label=part, linewidth=0)
        left = left + width
    forward = rows[rows["measure"] == "forward_share"].set_index(["arm", "dtype"]).loc[table.index]
    ax.hlines(range(len(table)), forward["low"], forward["high"], color=INK, linewidth=1.2)
    ax.set_yticks(range(len(table)), [f"{arm}, {dtype}" for arm, dtype in table.index], fontsize=7.5)
    ax.set_ylim(len(table) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    ax.grid(visible=False, axis="y")
    ax.legend(frameon=False, fontsize=7.5, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.4, -0.08),
              columnspacing=0.8, handlelength=1.0)  # fmt: skip


def _legend(figure: Figure, look: Look) -> None:
    """Systems by colour, dtypes by mark."""
    handles = [
        Line2D([], [], color=colour, linewidth=3, label=system)
        for (system, arm), colour in look.colours.items()
        if not arm
    ]
    handles += [
        Line2D([], [], color=GREY, marker=marker, linestyle=line, label=dtype)
        for dtype, (marker, line) in look.marks.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)


def _count(rows: pd.DataFrame) -> str:
    low, high = int(rows["n"].min()), int(rows["n"].max())
    return f"n = {low}" if low == high else f"n = {low} to {high}"


def _caption(summary: pd.DataFrame) -> str:
    def every(name: str, values: Sequence[Any] | None = None) -> str:
        return ", ".join(dict.fromkeys(map(str, summary[name] if values is None else values)))

    facts = [
        f"target {every('model')}",
        f"draft model: {every('draft')}",
        every("hardware"),
        every("date", [str(date)[:10] for date in summary["date"]]),
        "git\N{NO-BREAK SPACE}" + every("git_sha"),
    ]
    notes = (
        "bars: 95 % limits over prompts for whole requests and the forward's share, quartiles over rounds elsewhere",
        "n: prompts or rounds; every round measures everything once, in rotating order",
    )
    return "  ·  ".join(facts) + "\n" + "  ·  ".join(notes)
