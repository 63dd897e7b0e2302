"""What figures show and say: read off the artists, without looking at pixels."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from specdec import plots
from specdec.measurement.metrics import POSITION_COLUMNS, SUMMARY_COLUMNS, conform
from specdec.plots.panels import spread
from specdec.plots.style import palette

ARMS = {"plain": (0, False), "lookup": (8, False), "oracle": (8, True)}
RUNS = [("json", "low", 0.5), ("repeat", "low", 0.4), ("qa", "mixed", 1.5), ("creative", "high", 2.5)]


def summary_row(run: int, arm: str, temperature: float = 0.0) -> dict[str, object]:
    workload, tier, entropy = RUNS[run]
    gamma, synthetic = ARMS[arm]
    row: dict[str, object] = {column.name: 0.1 if column.kind == "number" else 1 for column in SUMMARY_COLUMNS}
    speedup = 1.0 if gamma == 0 else 3.0 - entropy
    return {
        **row,
        **{column.name: "x" for column in SUMMARY_COLUMNS if column.kind == "text"},
        **{"workload": workload, "tier": tier, "temperature": temperature, "arm": arm, "synthetic": synthetic},
        **{
            "num_draft_tokens": gamma,
            "controller": "fixed",
            "model_entropy_bits": entropy + 0.01 * gamma,
            "num_requests": 32,
        },
        **{"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1},
        **{"acceptance_rate": math.nan if gamma == 0 else 0.7, "repetition_share": 0.2 * run},
        **{"step_latency_p99_seconds": 0.05, "step_latency_p99_low_seconds": 0.04},
        **{"step_latency_p99_high_seconds": math.inf if arm == "oracle" else 0.06, "forward_share": 0.6},
        **{"model": "Imaginary-1B", "dtype": "float32", "hardware": "Imaginary CPU", "git_sha": "abc1234"},
        **{
            "date": "2030-01-02T00:00:00+00:00",
            "run_id": f"run{run}-{temperature:g}",
            "tpot_p99_high_seconds": math.inf,
        },
    }


@pytest.fixture(scope="module")
def summary() -> pd.DataFrame:
    rows = [summary_row(run, arm, t) for t in (0.0, 1.0) for run in range(len(RUNS)) for arm in ARMS]
    return plots.with_plain_entropy(conform(pd.DataFrame(rows), SUMMARY_COLUMNS))


@pytest.fixture(scope="module")
def positions() -> pd.DataFrame:
    rows = [
        {
            "workload": workload, "tier": tier, "temperature": t, "arm": arm, "synthetic": synthetic,
            "draft_position": k, "num_reached": 100 // k**3, "num_accepted": 50 // k**3, "acceptance": 0.5,
            "acceptance_low": 0.4, "acceptance_high": 0.6, "effective_reached": 60.0, "run_id": "r",
        }
        for t in (0.0, 1.0) for workload, tier, _ in RUNS
        for arm, (gamma, synthetic) in ARMS.items() for k in range(1, gamma + 1)
    ]  # fmt: skip
    return conform(pd.DataFrame(rows), POSITION_COLUMNS)


@pytest.fixture(scope="module")
def drawn(summary: pd.DataFrame, positions: pd.DataFrame) -> dict[str, Figure]:
    """Every figure, drawn: extents are known only then, and drawing takes seconds."""
    figures = plots.figures(summary, positions)
    for figure in figures.values():
        FigureCanvasAgg(figure).draw()
    return figures


def axes():
    return Figure().subplots()


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_every_figure_draws_and_says_what_it_is(drawn):
    assert set(drawn) == {
        "throughput_vs_entropy", "acceptance_vs_entropy", "acceptance_by_position", "latency_p99", "step_time",
    }  # fmt: skip
    for figure in drawn.values():
        said = " ".join(words(figure).replace("\N{NO-BREAK SPACE}", " ").split())
        for fact in (
            "Imaginary-1B float32",
            "Imaginary CPU",
            "n = 32",
            "2030-01-02",
            "git abc1234",
            "oracle (synthetic)",
        ):
            assert fact in said
    assert "claimed at low entropy (α ≥ 85 %): 2.5–3.8×" in words(drawn["throughput_vs_entropy"])
    assert "claimed at high entropy (α < 35 %): < 1×" in words(drawn["throughput_vs_entropy"])
    assert "no upper limit" in words(drawn["latency_p99"])


def test_no_text_is_cut_off_or_overlaps_a_legend(drawn):
    for figure in drawn.values():
        frame, legend = figure.bbox, figure.legends[0].get_window_extent()
        for text in (figure._suptitle, figure._supxlabel):
            assert text is not None
            extent = text.get_window_extent()
            assert frame.x0 <= extent.x0
            assert extent.x1 <= frame.x1
        for ax in figure.axes:
            assert not ax.get_window_extent().overlaps(legend)


def test_x_is_the_plain_arms_entropy(summary):
    ax = axes()
    plots.speedup_vs_entropy(summary[summary["temperature"] == 0], ax, plots.arm_styles(summary))
    marked = [line for line in ax.lines if line.get_marker() in ("o", "s", "^")]
    points = {(x, round(y, 6)) for line in marked for x, y in zip(*line.get_data(), strict=True)}
    assert points == {(entropy, 3.0 - entropy) for _, _, entropy in RUNS}


def test_synthetic_arms_are_hollow_and_named(summary):
    styles = plots.arm_styles(summary)
    assert list(styles) == ["lookup", "oracle"]
    assert styles["oracle"].label == "oracle (synthetic)"
    assert styles["oracle"].marker("o")["markerfacecolor"] == "white"
    assert styles["oracle"].line == "dashed"
    assert styles["lookup"].marker("o")["markerfacecolor"] == styles["lookup"].colour


@pytest.mark.parametrize("count", [0, 1, 10, 11, 33])
def test_no_two_arms_share_a_colour(count):
    assert len(set(palette(count))) == count


def test_repetition_is_drawn_at_the_same_entropy(summary):
    ax = axes()
    plots.repetition(summary[summary["temperature"] == 0], ax)
    shown = {round(x, 6): round(y, 6) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)}
    assert shown == {0.5: 0.0, 0.4: 0.2, 1.5: 0.4, 2.5: 0.6}


def test_unbounded_limits_are_arrows_and_never_numbers(summary):
    ax = axes()
    plots.p99_by_workload(summary[summary["temperature"] == 0], ax, "step_latency", plots.arm_styles(summary))
    arrows = [child for child in ax.get_children() if isinstance(child, Annotation)]
    assert len(arrows) == len(RUNS)
    ends = [max(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2]
    assert np.isfinite(ends).all()
    assert sorted(set(np.round(ends, 6))) == [50.0, 60.0]


def test_positions_pool_totals_and_leave_out_the_rare(positions, summary):
    ax = axes()
    plots.acceptance_by_position(positions[positions["tier"] == "low"], ax, plots.arm_styles(summary))
    line = next(line for line in ax.lines if line.get_label() == "lookup")
    assert np.round(line.get_xdata()).tolist() == [1, 2, 3]  # reached 200·2, 24·2, 6·2, then 2
    assert line.get_ydata().tolist() == pytest.approx([0.5, 0.5, 1 / 3])


def test_step_time_pools_seconds(summary):
    ax = axes()
    rows = summary.assign(decode_seconds=[9.0 if workload == "json" else 1.0 for workload in summary["workload"]])
    rows["forward_share"] = [0.9 if workload == "json" else 0.1 for workload in rows["workload"]]
    plots.step_time(rows[rows["workload"].isin(["json", "qa"])], ax)
    forward = ax.containers[0][0]
    assert forward.get_width() == pytest.approx((0.9 * 9 + 0.1) / 10)


def test_a_run_without_entropy_or_limits_still_draws(summary, positions, drawn):
    blind = summary.assign(model_entropy_bits=math.nan, speedup_low=math.nan, speedup_high=math.nan)
    figures = plots.figures(blind, positions.iloc[:0])
    for figure in figures.values():
        FigureCanvasAgg(figure).draw()
    assert figures.keys() == drawn.keys()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_spread_keeps_order_and_distance(values):
    placed = spread(sorted(values), gap=0.05)
    assert all(later - earlier >= 0.05 - 1e-9 for earlier, later in pairwise(placed))
    assert max(placed) <= 1
