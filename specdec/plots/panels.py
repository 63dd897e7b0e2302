"""Tables → one Axes each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation, Transform

from specdec.measurement.statistics import wilson
from specdec.plots.style import BAND, ENTROPY, GREY, INK, MARKERS, PARTS, ArmStyle, plain_style, without_plain


def speedup_vs_entropy(table: pd.DataFrame, ax: Axes, styles: dict[str, ArmStyle]) -> None:
    """Points with limits, one per arm and run, and the regimes that published accounts claim."""
    _band(ax, 2.5, 3.8, "gain", "claimed at low entropy (α ≥ 85 %): 2.5–3.8×", right=True)
    _band(ax, 0.0, 1.0, "loss", "claimed at high entropy (α < 35 %): < 1×", right=False)
    ax.axhline(1.0, color=INK, linewidth=1.0, zorder=1.5)
    _scatter(table, ax, "speedup", styles)
    ax.set_ylim(0, speedup_reach(table))
    ax.set_ylabel("speedup over plain decoding, ×")


def speedup_reach(table: pd.DataFrame) -> float:
    """Top of the axis. Points set it: on a disturbed machine a bar may reach far, and would press them flat."""
    return max(4.0, 1.15 * float(np.nanmax([1.0, *without_plain(table)["speedup"]])))


def acceptance_vs_entropy(table: pd.DataFrame, ax: Axes, styles: dict[str, ArmStyle]) -> None:
    """Alpha with limits, one point per arm and run; arms whose rule has no alpha are absent."""
    _band(ax, 0.85, 1.0, "gain", "claimed for 2.5–3.8×: α ≥ 85 %", right=True)
    _band(ax, 0.0, 0.35, "loss", "claimed for < 1×: α < 35 %", right=False)
    _scatter(table, ax, "acceptance_rate", styles)
    ax.set_ylim(0, 1.02)
    ax.set_ylabel("acceptance rate α")


def repetition(table: pd.DataFrame, ax: Axes) -> None:
    """Repetition share of plain decoding at each run's entropy."""
    plain = table.drop_duplicates("run_id")
    ax.vlines(plain[ENTROPY], 0, plain["repetition_share"], color=GREY, linewidth=1.2)
    for tier, rows in plain.groupby("tier"):
        shape = MARKERS.get(str(tier), "D")
        ax.plot(rows[ENTROPY], rows["repetition_share"], shape, color=GREY, markersize=4, clip_on=False)
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.5, 1])
    ax.set_ylabel("repetition\nshare")
    ax.set_xlabel("mean model entropy of plain decoding, bits")


def acceptance_by_position(positions: pd.DataFrame, ax: Axes, styles: dict[str, ArmStyle]) -> None:
    """accepted_k ÷ reached_k per arm, runs pooled by totals, for positions reached at least 10 times."""
    counts = ["num_reached", "num_accepted", "effective_reached"]
    pooled = positions.groupby(["arm", "draft_position"])[counts].sum().reset_index()
    pooled = pooled[pooled["num_reached"] >= 10]
    for arm, style in styles.items():
        rows = pooled[pooled["arm"] == arm]
        shares = (rows["num_accepted"] / rows["num_reached"]).astype(float)
        limits = [wilson(share, size) for share, size in zip(shares, rows["effective_reached"], strict=True)]
        low, high = ([getattr(limit, side) for limit in limits] for side in ("low", "high"))
        x = rows["draft_position"].astype(float) + 0.07 * style.nudge
        ax.plot(x, shares, linestyle=style.line, linewidth=1.2, markersize=4.5, label=style.label, **style.marker("o"))
        ax.vlines(x, low, high, color=style.colour, linewidth=1.0)
    ax.set_ylim(0, 1.02)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def p99_by_workload(table: pd.DataFrame, ax: Axes, name: str, styles: dict[str, ArmStyle]) -> None:
    """p99 in milliseconds with limits; an arrow where the data set no upper one. name: `step_latency` or `tpot`."""
    workloads = list(table.sort_values(ENTROPY)["workload"].unique())
    everyone = {table["arm"].iloc[0]: plain_style(table), **styles} if len(table) else styles
    for rank, (arm, style) in enumerate(everyone.items()):
        for _, row in table[table["arm"] == arm].iterrows():
            y = workloads.index(row["workload"]) + 0.78 * ((rank + 0.5) / len(everyone) - 0.5)
            value, low, high = (row[f"{name}_p99{side}_seconds"] * 1e3 for side in ("", "_low", "_high"))
            ax.plot([max(low, 0), value if np.isinf(high) else high], [y, y], color=style.colour, linewidth=1.1)
            ax.plot(value, y, markersize=3.8, **style.marker("o"))
            if np.isinf(high):
                arrow = {"arrowstyle": "<-", "color": style.colour, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 2}
                ax.annotate("", (value, y), (20, 0), textcoords="offset points", arrowprops=arrow)
    ax.set_yticks(range(len(workloads)), workloads)
    ax.set_ylim(len(workloads) - 0.5, -0.5)
    ax.set_yticks(np.arange(len(workloads) - 1) + 0.5, minor=True)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="y", which="minor")
    ax.margins(x=0.15)
    ax.set_xlim(left=0)


def step_time(table: pd.DataFrame, ax: Axes) -> None:
    """Stacked shares of step time per arm, runs pooled by seconds, mean step in milliseconds, and drafting cost c."""
    colours = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True))
    seconds = table[[f"{part}_share" for part in PARTS]].mul(table["decode_seconds"], axis=0)
    totals = seconds.assign(arm=table["arm"], all=table["decode_seconds"], steps=table["num_steps"])
    pooled = totals.groupby("arm", sort=False).sum()
    left = np.zeros(len(pooled))
    for part in PARTS:
        width = (pooled[f"{part}_share"] / pooled["all"]).to_numpy(dtype=float)
        ax.barh(range(len(pooled)), width, left=left, height=0.66, color=colours[part], label=part, linewidth=0)
        left = left + width
    spread = table.groupby("arm", sort=False)["forward_share"].agg(["min", "max"])
    ax.hlines(range(len(pooled)), spread["min"], spread["max"], color=INK, linewidth=1.2)
    cost = table.groupby("arm", sort=False)["drafting_cost"].median()
    milliseconds = (pooled["all"] / pooled["steps"].astype(float)) * 1e3
    for place, (step, c) in enumerate(zip(milliseconds, cost[pooled.index], strict=True)):
        said = f"{step:.1f} ms" if np.isnan(c) else f"{step:.1f} ms, c = {c:.3f}"
        ax.text(1.02, place, said, va="center", fontsize=8, color=GREY)
    synthetic = table.drop_duplicates("arm").set_index("arm")["synthetic"]
    ax.set_yticks(range(len(pooled)), [arm + (" (synthetic)" if synthetic[arm] else "") for arm in pooled.index])
    ax.set_ylim(len(pooled) - 0.5, -0.5)
    ax.set_xlim(0, 1.4)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "50 %", "", "100 %"])
    ax.grid(visible=False, axis="y")


def spread(positions: list[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """The nearest places at least `gap` apart, in the given order of a sorted list, within [low, high] if they fit."""
    placed: list[float] = []
    for position in positions:
        placed.append(max(position, placed[-1] + gap) if placed else max(position, low))
    limit = high
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    return placed


def reach(table: pd.DataFrame, ax: Axes) -> None:
    """Let the x-axis reach every entropy of the table and what it reaches already."""
    ax.set_xlim(0, max(float(np.nanmax([1.0, *table[ENTROPY]])) * 1.08, ax.get_xlim()[1]))


def _scatter(table: pd.DataFrame, ax: Axes, column: str, styles: dict[str, ArmStyle]) -> None:
    for arm, style in styles.items():
        transform = _nudged(ax, 2.4 * style.nudge)
        for tier, rows in table[table["arm"] == arm].groupby("tier"):
            shape = MARKERS.get(str(tier), "D")
            low, high = rows[f"{column}_low"], rows[f"{column}_high"]
            ax.vlines(rows[ENTROPY], low, high, style.colour, style.line, linewidth=1.1, transform=transform, zorder=2)
            marks: dict[str, Any] = {"linestyle": "none", "markersize": 5.5, "transform": transform, "zorder": 3}
            ax.plot(rows[ENTROPY], rows[column], **marks, **style.marker(shape))
    reach(table, ax)
    name_workloads(table, ax)


def name_workloads(table: pd.DataFrame, ax: Axes) -> None:
    """Workload names above the axes, pushed apart, each tied to its entropy by a leader and a faint line."""
    runs = table.drop_duplicates("run_id").dropna(subset=[ENTROPY]).sort_values(ENTROPY)
    right = ax.get_xlim()[1]
    places = spread([entropy / right for entropy in runs[ENTROPY]], gap=0.042)
    for place, entropy, workload in zip(places, runs[ENTROPY], runs["workload"], strict=True):
        ax.axvline(entropy, color="#dddddd", linewidth=0.6, zorder=0.5)
        leader = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate(
            workload, (entropy / right, 1.0), (place, 1.035), xycoords="axes fraction", rotation=60, fontsize=7.5,
            ha="left", va="bottom", rotation_mode="anchor", color=GREY, arrowprops={**leader, "relpos": (0, 0)},
        )  # fmt: skip


def _nudged(ax: Axes, points: float) -> Transform:
    """Data coordinates moved sideways by a few points, so that arms sharing an x stay apart."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return ax.transData + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)


def _band(ax: Axes, low: float, high: float, kind: str, text: str, right: bool) -> None:
    ax.axhspan(low, high, color=BAND[kind], alpha=0.09, linewidth=0, zorder=0)
    x, side = (0.985, "right") if right else (0.015, "left")
    y, edge = (high, "top") if right else (low, "bottom")
    ax.text(
        x, y, text, ha=side, va=edge, transform=ax.get_yaxis_transform(), fontsize=7.5, style="italic",
        color=BAND[kind], zorder=1.9, path_effects=[Stroke(linewidth=2, foreground="white"), Normal()],
    )  # fmt: skip
