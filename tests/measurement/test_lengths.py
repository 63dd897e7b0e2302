"""Draft lengths compared: the best in hindsight, what theory predicts, and the two figures drawn of it."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec import plots
from specdec.costmodel import expected_tokens
from specdec.measurement.metrics import best_fixed, fixed_lengths, predicted_speedups, tpot_ratio
from specdec.plots.controllers import controllers_figure, gamma_figure, has_controllers, swept_drafters
from specdec.plots.style import rc_style
from tests.fake_sweeps import EACH_SECONDS, PLAIN_SECONDS, WIDER, WORKLOADS, sweep

LENGTHS, OFFERED = (1, 3, 8, 14), 0.6


@pytest.fixture(scope="module")
def summary() -> pd.DataFrame:
    return sweep(LENGTHS, offered=OFFERED)


@pytest.fixture(scope="module")
def table(summary: pd.DataFrame) -> pd.DataFrame:
    return plots.with_plain_entropy(summary)


def test_fixed_lengths_are_neither_plain_nor_adaptive(summary: pd.DataFrame) -> None:
    assert sorted(fixed_lengths(summary)["num_draft_tokens"].unique()) == list(LENGTHS)
    assert len(fixed_lengths(summary)) == len(LENGTHS) * len(WORKLOADS)


def test_the_best_in_hindsight_is_the_largest_speedup_and_never_below_plain(summary: pd.DataFrame) -> None:
    best = best_fixed(summary).set_index("run_id")
    rows = summary[summary["arm"].str.startswith("g")]
    for run, group in rows.groupby("run_id"):
        assert best.loc[run, "speedup"] == max(1.0, group["speedup"].max())
    assert best.loc["json-0", "num_draft_tokens"] > best.loc["creative-0", "num_draft_tokens"]
    losing = summary.assign(speedup=summary["speedup"].where(summary["arm"] == "plain", 0.9))
    assert set(best_fixed(losing)["num_draft_tokens"]) == {0}


def test_theory_predicts_the_machine_it_was_measured_on(summary: pd.DataFrame) -> None:
    found = predicted_speedups(summary).set_index(["run_id", "num_draft_tokens"])["predicted_speedup"]
    assert len(found) == len(LENGTHS) * len(WORKLOADS)
    for name, (_, _, alpha) in WORKLOADS.items():
        for gamma in LENGTHS:
            slower = WIDER * gamma + gamma * EACH_SECONDS / PLAIN_SECONDS
            exact = (1 + OFFERED * (expected_tokens(alpha, gamma) - 1)) / (1 + OFFERED * slower)
            assert found[f"{name}-0", gamma] == pytest.approx(exact, rel=0.15)


def test_the_tpot_ratio_is_to_the_runs_own_plain_arm(summary: pd.DataFrame) -> None:
    ratios = tpot_ratio(summary)
    assert (ratios[summary["arm"] == "plain"] == 1).all()
    long = summary["arm"] == "g14"
    assert ratios[long & (summary["workload"] == "creative")].item() > 1.3
    assert ratios[long & (summary["workload"] == "json")].item() < 0.7


def drawn(figure: Figure) -> list[Axes]:
    FigureCanvasAgg(figure).draw()
    return figure.axes


def test_the_heat_map_marks_what_was_best_and_what_was_predicted(table: pd.DataFrame) -> None:
    assert swept_drafters(table) == ["prompt_lookup"]
    with mpl.rc_context(rc_style()):
        (ax,) = drawn(gamma_figure(table))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "3", "8", "14"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["json", "qa", "creative"]
    frames = sorted((patch.get_y(), patch.get_x()) for patch in ax.patches if patch.get_gid() == "measured")
    places = [0, *LENGTHS]
    best = best_fixed(table).set_index("run_id")["num_draft_tokens"]
    runs = ["json-0", "qa-0", "creative-0"]
    assert [round(x + 0.47) for _, x in frames] == [places.index(best[run]) for run in runs]
    stars = [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "predicted"]
    assert len(stars) == len(WORKLOADS)
    assert stars[0] > stars[2]


def test_a_table_without_a_sweep_of_lengths_draws_no_heat_map(table: pd.DataFrame) -> None:
    few = table[~table["arm"].isin(["g3", "g8", "cost_aware"])]
    assert swept_drafters(few) == []
    assert not has_controllers(few)
    assert has_controllers(table)


def test_controllers_are_drawn_against_the_best_fixed_length(table: pd.DataFrame) -> None:
    with mpl.rc_context(rc_style()):
        speed, tpot = drawn(controllers_figure(table))
    assert speed.get_title(loc="left").startswith("Speedup")
    assert tpot.get_title(loc="left").startswith("p99 TPOT")
    (reference,) = [line for line in speed.lines if line.get_gid() == "best fixed"]
    assert sorted(reference.get_ydata()) == pytest.approx(sorted(best_fixed(table)["speedup"]))
    assert not [line for line in tpot.lines if line.get_gid() == "best fixed"]
    assert {0.97, 1.0} <= {float(line.get_ydata()[0]) for line in speed.lines if len(line.get_ydata()) == 2}
    assert [text.get_text() for text in tpot.get_legend().get_texts()] == ["g1", "g3", "g8", "g14", "cost_aware"]


@pytest.mark.parametrize("draw", [gamma_figure, controllers_figure])
def test_nothing_is_cut_off_and_the_machine_is_named(
    draw: Callable[[pd.DataFrame], Figure], table: pd.DataFrame
) -> None:
    with mpl.rc_context(rc_style()):
        figure = draw(table)
        axes = drawn(figure)
    titles = [figure._suptitle, figure._supxlabel]  # type: ignore[attr-defined]
    for text in [*titles, *(label for ax in axes for label in (*ax.get_yticklabels(), *ax.get_xticklabels()))]:
        extent = text.get_window_extent()
        assert figure.bbox.x0 <= extent.x0
        assert extent.x1 <= figure.bbox.x1
    assert "Imaginary CPU" in titles[1].get_text()
