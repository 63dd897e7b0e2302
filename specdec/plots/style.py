"""How every figure looks: arms, tiers, captions, legends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

TIERS = ("low", "mixed", "high")
MARKERS = {"low": "o", "mixed": "s", "high": "^"}
PARTS = ("forward", "draft", "verify", "rollback", "other")
ENTROPY = "plain_entropy_bits"
INK, GREY, BAND = "#222222", "#777777", {"gain": "#2a9d5c", "loss": "#c8553d"}
ERROR_BARS = "bars: 95 % limits, bootstrap over prompts"
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9, "legend.fontsize": 8,
    "axes.edgecolor": "#bbbbbb", "grid.color": "#e8e8e8", "axes.titlelocation": "left", "svg.fonttype": "path",
}  # fmt: skip


@dataclass(frozen=True)
class ArmStyle:
    """How one arm is drawn wherever it appears. `rank` of `count` nudges it sideways off the others."""

    label: str
    colour: Any
    synthetic: bool
    rank: int
    count: int

    @property
    def nudge(self) -> float:
        """Its place among the arms, centred on 0."""
        return self.rank - (self.count - 1) / 2

    @property
    def line(self) -> Literal["solid", "dashed"]:
        """Its line style."""
        return "dashed" if self.synthetic else "solid"

    def marker(self, shape: str) -> dict[str, Any]:
        """Keywords for a marker of this arm."""
        face = "white" if self.synthetic else self.colour
        return {"marker": shape, "color": self.colour, "markerfacecolor": face, "markeredgecolor": self.colour}


def palette(count: int) -> list[Any]:
    """That many colours, all different: seaborn's ten for the colour-blind, then the same ones darker and darker."""
    base = sns.color_palette("colorblind")
    shades = -(-count // len(base))
    return [tuple(channel * (1 - shade / shades) for channel in colour) for shade in range(shades) for colour in base][
        :count
    ]


def arm_styles(summary: pd.DataFrame) -> dict[str, ArmStyle]:
    """Arm → style, in order of appearance; plain arms are left out."""
    arms = without_plain(summary).drop_duplicates("arm")
    colours = palette(len(arms))
    return {
        row["arm"]: ArmStyle(
            row["arm"] + (" (synthetic)" if row["synthetic"] else ""), colours[rank], row["synthetic"], rank, len(arms)
        )
        for rank, (_, row) in enumerate(arms.iterrows())
    }


def with_plain_entropy(summary: pd.DataFrame) -> pd.DataFrame:
    """Adds what a run's x-coordinate is: the mean model entropy of its plain arm, the run's first row."""
    return summary.assign(**{ENTROPY: summary.groupby("run_id")["model_entropy_bits"].transform("first")})


def without_plain(table: pd.DataFrame) -> pd.DataFrame:
    """Without the first row of each run."""
    return table[table.duplicated("run_id")]


def plain_style(table: pd.DataFrame) -> ArmStyle:
    """The plain arm, in ink, where it is drawn at all."""
    return ArmStyle(str(table["arm"].iloc[0]), INK, synthetic=False, rank=0, count=1)


def tiers_of(table: pd.DataFrame) -> list[str]:
    """Tiers that occur, from low to high, others last."""
    present = list(dict.fromkeys(table["tier"]))
    return [tier for tier in TIERS if tier in present] + [tier for tier in present if tier not in TIERS]


def temperature_text(temperature: float) -> str:
    """The words "temperature 0 (greedy)"."""
    return f"temperature {temperature:g}" + (" (greedy)" if temperature == 0 else "")


def caption(summary: pd.DataFrame, *notes: str) -> str:
    """What a figure must carry: model, precision, machine, number of requests, date and revision."""
    requests = summary["num_requests"]
    count = f"{requests.min()}" if requests.min() == requests.max() else f"{requests.min()} to {requests.max()}"
    days = sorted({str(date)[:10] for date in summary["date"]})
    facts = [
        ", ".join((summary["model"] + " " + summary["dtype"]).unique()),
        ", ".join(summary["hardware"].unique()),
        f"n = {count} requests per arm and workload",
        " to ".join(dict.fromkeys([days[0], days[-1]])),
        "git\N{NO-BREAK SPACE}" + ", ".join(summary["git_sha"].unique()),
    ]
    return "  ·  ".join(facts) + "\n" + "  ·  ".join(notes)


def add_legend(
    figure: Figure, table: pd.DataFrame, plain: bool = False, tiers: bool = True, extra: Sequence[Line2D] = ()
) -> None:
    """Arms, and what the markers mean, outside the data."""
    styles = list(arm_styles(table).values())
    handles = [Line2D([], [], linestyle="none", label="arm")]
    for style in [plain_style(table), *styles] if plain else styles:
        handles.append(Line2D([], [], linestyle=style.line, label=style.label, **style.marker("o")))
    if tiers:
        handles += [Line2D([], [], linestyle="none", label=""), Line2D([], [], linestyle="none", label="tier")]
        marks = {tier: MARKERS.get(tier, "D") for tier in tiers_of(table)}
        handles += [Line2D([], [], color=GREY, linestyle="none", marker=m, label=tier) for tier, m in marks.items()]
    figure.legend(handles=[*handles, *extra], loc="outside right upper", frameon=False)


def finish(figure: Figure, axes: Any, title: str, text: str) -> Figure:
    """Title above, caption wrapped below, no frame."""
    for ax in np.ravel(axes):
        sns.despine(ax=ax)
        ax.set_axisbelow(True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold", color=INK)
    columns = int(17 * figure.get_figwidth())  # characters that fit at this size
    text = "\n".join(line for part in text.splitlines() for line in textwrap.wrap(part, columns))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=GREY)
    return figure


def rc_style() -> Any:
    """matplotlib settings of every figure."""
    return {**sns.axes_style("whitegrid"), **STYLE}
