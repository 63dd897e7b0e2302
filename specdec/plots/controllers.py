"""Figures of speculation length: fixed ones as a heat map, and controllers against the best fixed one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from specdec.measurement.metrics import best_fixed, fixed_lengths, predicted_speedups, tpot_ratio
from specdec.measurement.metrics.lengths import FIXED, LENGTH
from specdec.plots.panels import name_workloads, reach
from specdec.plots.style import (
    BAND,
    ENTROPY,
    ERROR_BARS,
    GREY,
    INK,
    ArmStyle,
    arm_styles,
    caption,
    finish,
    temperature_text,
    without_plain,
)

FEWEST_LENGTHS = 4
"""Fixed lengths of one drafter that make a heat map."""
BOUNDS = {"speedup": 0.97, "tpot_ratio": 1.05}
"""What a controller without regret keeps, where plain decoding is best."""
_LABELS = {"speedup": "Speedup", "tpot_ratio": "p99 TPOT ÷ plain's"}
_MEASURED: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 1.6}
_PREDICTED: dict[str, Any] = {"marker": "*", "markersize": 8, "color": INK, "markerfacecolor": "white", "linewidth": 0}


def swept_drafters(table: pd.DataFrame) -> list[str]:
    """Drafters that ran at enough fixed lengths for a heat map."""
    lengths = fixed_lengths(table).groupby("drafter", sort=False)[LENGTH].nunique()
    return list(lengths[lengths >= FEWEST_LENGTHS].index)


def has_controllers(table: pd.DataFrame) -> bool:
    """Whether some arm changes its length as it goes."""
    return bool((table["controller"] != FIXED).any())


def gamma_figure(table: pd.DataFrame) -> Figure:
    """Speedup by workload and draft length; a row per drafter, a column per temperature."""
    drafters, temperatures = swept_drafters(table), sorted(table["temperature"].unique())
    size = (2.4 + 5.4 * len(temperatures), 1.7 + (0.6 + 0.36 * table["workload"].nunique()) * len(drafters))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(drafters), len(temperatures), squeeze=False)
    predicted = predicted_speedups(table)
    norm = TwoSlopeNorm(1.0, 0.5, max(1.5, float(np.nanmax(fixed_lengths(table)["speedup"]))))
    for row, drafter in enumerate(drafters):
        for column, temperature in enumerate(temperatures):
            ax = axes[row, column]
            chosen = table[table["temperature"] == temperature]
            speedup_by_gamma(chosen, predicted[predicted["drafter"] == drafter], ax, drafter, norm)
            ax.set_title(f"{drafter}, {temperature_text(temperature)}")
            ax.set_xlabel("draft length γ")
    handles = [
        Rectangle((0, 0), 1, 1, label="best measured", **_MEASURED),
        Line2D([], [], label="best predicted", **_PREDICTED),
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    notes = (
        "predicted: (1 + f(E−1)) ÷ (1 + f(v−1+γc)), α and f of the workload, v(γ) and c of the machine",
        "workloads by measured entropy; 0 is plain decoding",
    )
    return finish(figure, axes, "Speedup by workload and draft length", caption(table, *notes))


def speedup_by_gamma(table: pd.DataFrame, predicted: pd.DataFrame, ax: Axes, drafter: str, norm: TwoSlopeNorm) -> None:
    """One heat map: rows workloads by entropy, columns lengths with 0 first; a frame round the best measured cell, a
    star in the best predicted one. predicted: `metrics.predicted_speedups` of this drafter."""
    rows = fixed_lengths(table)
    rows = rows[rows["drafter"] == drafter].sort_values(ENTROPY, kind="stable")
    order = rows.drop_duplicates("run_id")
    cells = rows.pivot_table(index="run_id", columns=LENGTH, values="speedup").loc[order["run_id"]].astype(float)
    cells.insert(0, 0, 1.0)
    theory = predicted.pivot_table(index="run_id", columns=LENGTH, values="predicted_speedup").reindex(cells.index)
    theory.insert(0, 0, 1.0)
    lengths = list(cells.columns)
    ax.imshow(cells.to_numpy(), aspect="auto", cmap="RdYlGn", norm=norm)
    for y, run in enumerate(cells.index):
        for x, value in enumerate(cells.loc[run]):
            if not np.isnan(value):
                ink = "white" if norm(value) > 0.85 else INK
                ax.text(x, y - 0.18, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=ink)
        measured = lengths.index(cells.loc[run].idxmax())
        ax.add_patch(Rectangle((measured - 0.47, y - 0.46), 0.94, 0.92, gid="measured", zorder=3, **_MEASURED))
        ax.plot(lengths.index(theory.loc[run].idxmax()), y + 0.22, gid="predicted", **_PREDICTED)
    ax.set_xticks(range(len(lengths)), [str(int(length)) for length in lengths])
    ax.set_yticks(range(len(order)), list(order["workload"]))
    ax.grid(visible=False)


def controllers_figure(table: pd.DataFrame) -> Figure:
    """Speedup and p99 TPOT of every controller over entropy; a row per drafter, two columns per temperature."""
    ratios, best = table.assign(tpot_ratio=tpot_ratio(table)), best_fixed(table)
    arms = without_plain(ratios)
    drafters = list(arms.loc[arms["controller"] != FIXED, "drafter"].unique())
    panels = [(name, temperature) for temperature in sorted(table["temperature"].unique()) for name in BOUNDS]
    figure = Figure(figsize=(1.8 + 3.4 * len(panels), 2.0 + 2.6 * len(drafters)), layout="constrained")
    axes = figure.subplots(len(drafters), len(panels), sharex=True, squeeze=False)
    for row, drafter in enumerate(drafters):
        own = arms[arms["drafter"] == drafter]
        styles = arm_styles(ratios[(ratios["drafter"] == drafter) | ~ratios.duplicated("run_id")])
        for ax, (name, temperature) in zip(axes[row], panels, strict=True):
            rows = own[own["temperature"] == temperature]
            over_entropy(rows, name, ax, styles)
            if name == "speedup":
                reference_line(rows, best, ax)
            if row == 0:
                name_workloads(table[table["temperature"] == temperature], ax)
                ax.set_title(f"{_LABELS[name]}, {temperature_text(temperature)}", pad=58)
        axes[row, 0].set_ylabel(drafter)
        handles = [
            Line2D([], [], linestyle="none", label=style.label, **style.marker("o")) for style in styles.values()
        ]
        axes[row, -1].legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    for ax in axes[-1]:
        ax.set_xlabel("entropy of plain decoding, bits")
    notes = (
        "grey line: the best fixed length of the sweep, in hindsight",
        "dotted: 0.97× plain's throughput, 1.05× its p99 TPOT",
        ERROR_BARS,
    )
    return finish(figure, axes, "Controllers against the best fixed length and plain decoding", caption(table, *notes))


def over_entropy(rows: pd.DataFrame, name: str, ax: Axes, styles: dict[str, ArmStyle]) -> None:
    """One measure of one drafter's arms; name: `speedup` or `tpot_ratio`. Fixed lengths are small and pale."""
    ax.axhline(1.0, color=INK, linewidth=1.0, zorder=1.5)
    ax.axhline(BOUNDS[name], color=BAND["loss"], linewidth=1.0, linestyle=":", zorder=1.5)
    width = 0.012 * max(1.0, float(rows[ENTROPY].max()) if len(rows) else 1.0)
    for arm, style in styles.items():
        chosen = rows[rows["arm"] == arm]
        fixed = bool((chosen["controller"] == FIXED).all())
        x = chosen[ENTROPY].astype(float) + width * style.nudge
        marks: dict[str, Any] = {
            "linestyle": "none",
            "alpha": 0.45 if fixed else 1.0,
            "markersize": 3.5 if fixed else 5.5,
        }
        ax.plot(x, chosen[name].astype(float), **marks, **style.marker("o" if fixed else "D"))
        if name == "speedup" and not fixed:
            ax.vlines(x, chosen["speedup_low"], chosen["speedup_high"], color=style.colour, linewidth=1.0)
    reach(rows, ax)


def reference_line(rows: pd.DataFrame, best: pd.DataFrame, ax: Axes) -> None:
    """The best fixed length of each of the rows' runs; best: `metrics.best_fixed`."""
    runs = rows.drop_duplicates("run_id")[["run_id", "drafter", ENTROPY]]
    line = runs.merge(best, on=["run_id", "drafter"]).sort_values(ENTROPY)
    ax.plot(line[ENTROPY], line["speedup"].astype(float), color=GREY, linewidth=1.2, zorder=1, gid="best fixed")
