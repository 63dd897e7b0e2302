"""Tables → the figures an experiment commits."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.plots.controllers import controllers_figure, gamma_figure, has_controllers, swept_drafters
from specdec.plots.panels import (
    acceptance_by_position,
    acceptance_vs_entropy,
    p99_by_workload,
    reach,
    repetition,
    speedup_reach,
    speedup_vs_entropy,
    step_time,
)
from specdec.plots.style import (
    ERROR_BARS,
    GREY,
    add_legend,
    arm_styles,
    caption,
    finish,
    rc_style,
    temperature_text,
    tiers_of,
    with_plain_entropy,
)


def figures(summary: pd.DataFrame, positions: pd.DataFrame) -> dict[str, Figure]:
    """Every figure of an experiment by name; tables as in `specdec.measurement.metrics`, rows of a run in arm order."""
    table = with_plain_entropy(summary)
    with mpl.rc_context(rc_style()):
        drawn = {
            "throughput_vs_entropy": throughput_figure(table),
            "acceptance_vs_entropy": acceptance_figure(table),
            "acceptance_by_position": positions_figure(table, positions),
            "latency_p99": latency_figure(table),
            "step_time": step_time_figure(table),
        }
        if swept_drafters(table):
            drawn["speedup_by_gamma"] = gamma_figure(table)
        if has_controllers(table):
            drawn["controllers"] = controllers_figure(table)
        return drawn


def throughput_figure(table: pd.DataFrame) -> Figure:
    """Speedup against measured entropy, the repetition share below it; one column per temperature."""
    temperatures = sorted(table["temperature"].unique())
    figure = Figure(figsize=(_width(temperatures), 6.2), layout="constrained")
    axes = figure.subplots(2, len(temperatures), sharex=True, sharey="row", squeeze=False, height_ratios=[5, 1])
    reach(table, axes[0, 0])
    for column, temperature in enumerate(temperatures):
        rows = table[table["temperature"] == temperature]
        speedup_vs_entropy(rows, axes[0, column], arm_styles(table))
        repetition(rows, axes[1, column])
        axes[0, column].set_title(temperature_text(temperature), pad=58)
    axes[0, 0].set_ylim(0, speedup_reach(table))
    add_legend(figure, table)
    title = "Speedup over plain decoding against measured entropy"
    note = "repetition: tokens completing a 4-gram already written; a loop has low entropy without being predictable"
    return finish(figure, axes, title, caption(table, ERROR_BARS, note))


def acceptance_figure(table: pd.DataFrame) -> Figure:
    """Alpha against measured entropy; one column per temperature."""
    temperatures = sorted(table["temperature"].unique())
    figure = Figure(figsize=(_width(temperatures), 5.2), layout="constrained")
    axes = figure.subplots(1, len(temperatures), sharex=True, sharey=True, squeeze=False)
    reach(table, axes[0, 0])
    for ax, temperature in zip(axes[0], temperatures, strict=True):
        acceptance_vs_entropy(table[table["temperature"] == temperature], ax, arm_styles(table))
        ax.set_title(temperature_text(temperature), pad=58)
        ax.set_xlabel("mean model entropy of plain decoding, bits")
    add_legend(figure, table)
    title = "Acceptance rate α against measured entropy"
    return finish(figure, axes, title, caption(table, "α = accepted ÷ examined", ERROR_BARS))


def positions_figure(table: pd.DataFrame, positions: pd.DataFrame) -> Figure:
    """Acceptance by draft position; a column per tier, a row per temperature."""
    tiers, temperatures = tiers_of(table), sorted(table["temperature"].unique())
    figure = Figure(figsize=(2.6 + 3.0 * len(tiers), 1.4 + 2.5 * len(temperatures)), layout="constrained")
    axes = figure.subplots(len(temperatures), len(tiers), sharex=True, sharey=True, squeeze=False)
    for row, temperature in enumerate(temperatures):
        for column, tier in enumerate(tiers):
            chosen = (positions["temperature"] == temperature) & (positions["tier"] == tier)
            acceptance_by_position(positions[chosen], axes[row, column], arm_styles(table))
            axes[row, column].set_title(f"{tier} entropy, {temperature_text(temperature)}")
    for ax in axes[-1]:
        ax.set_xlabel("position in the draft")
    for ax in axes[:, 0]:
        ax.set_ylabel("acceptance")
    add_legend(figure, table, tiers=False)
    notes = (
        "accepted ÷ reached, workloads pooled",
        "bars: 95 % limits, steps clustered by request",
        "at least 10 reached",
    )
    return finish(figure, axes, "Acceptance by position in the draft", caption(table, *notes))


def latency_figure(table: pd.DataFrame) -> Figure:
    """p99 of step latency and of TPOT by workload; a row per temperature."""
    temperatures, workloads = sorted(table["temperature"].unique()), table["workload"].nunique()
    figure = Figure(figsize=(11, 1.6 + 0.42 * workloads * len(temperatures)), layout="constrained")
    axes = figure.subplots(len(temperatures), 2, sharex="col", squeeze=False)
    for row, temperature in enumerate(temperatures):
        rows = table[table["temperature"] == temperature]
        for ax, (name, meaning) in zip(axes[row], (("step_latency", "Step latency"), ("tpot", "TPOT")), strict=True):
            p99_by_workload(rows, ax, name, arm_styles(table))
            ax.set_title(f"{meaning}, {temperature_text(temperature)}")
        axes[row, 1].tick_params(labelleft=False)
    for ax in axes[-1]:
        ax.set_xlabel("p99, milliseconds")
    extra = Line2D([], [], color=GREY, marker=r"$\rightarrow$", markersize=11, linestyle="none", label="no upper limit")
    add_legend(figure, table, plain=True, tiers=False, extra=[extra])
    note = "bars: 95 % limits by order statistic, clustered by request", "arrow: too few samples to set an upper limit"
    return finish(figure, axes, "99th percentile latency by workload", caption(table, *note))


def step_time_figure(table: pd.DataFrame) -> Figure:
    """Where a decode step's time goes; a column per tier."""
    tiers = tiers_of(table)
    height = 1.5 + 0.36 * table["arm"].nunique()
    figure = Figure(figsize=(2.8 + 3.3 * len(tiers), height), layout="constrained")
    axes = figure.subplots(1, len(tiers), sharey=True, squeeze=False)
    for ax, tier in zip(axes[0], tiers, strict=True):
        step_time(table[table["tier"] == tier], ax)
        ax.set_title(f"{tier} entropy")
        ax.set_xlabel("share of step time")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False, title="part")
    notes = "workloads and temperatures pooled", "whisker: range of the forward's share over runs", "right: mean step"
    return finish(figure, axes, "Where the time of a decode step goes", caption(table, *notes))


def _width(temperatures: Sequence[float]) -> float:
    """Inches of a figure with one column per temperature and a legend."""
    return 2.8 + max(6.4, 4.6 * len(temperatures))
