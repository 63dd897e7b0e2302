"""Makes tables and figures from the finished runs of an experiment: python -m experiments.report results/NAME

It reads files only, so it also works on a sweep that was interrupted. With --figures-only it needs no runs, only the
tables. Exits with 1 if a row says `fault`, and with 2 if there is nothing to report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from specdec.errors import UsageError
from specdec.machine.interrupts import check, guarded
from specdec.measurement.metrics import POSITION_COLUMNS, SUMMARY_COLUMNS, Column, conform, per_position, summarise
from specdec.measurement.results import Run, load_runs, write_text
from specdec.measurement.traces import TraceError, replacing
from specdec.plots import TIERS, figures

Tables = tuple[pd.DataFrame, pd.DataFrame]
"""summary.csv and positions.csv."""


def report(folder: Path, figures_only: bool = False) -> pd.DataFrame:
    """Write `summary.csv`, `positions.csv` and `figures/`; returns the summary.

    figures_only: draw again from the tables that are there. Raises `UsageError` where there is nothing to report.
    """
    summary, positions = _read_tables(folder) if figures_only else _aggregate(load_runs(folder), folder)
    try:
        if not figures_only:
            write_text(folder / "summary.csv", summary.to_csv(index=False))
            write_text(folder / "positions.csv", positions.to_csv(index=False))
        (folder / "figures").mkdir(exist_ok=True)
        for name, figure in figures(summary, positions).items():
            check()
            save_figure(figure, folder / "figures" / name)
    except OSError as error:
        raise UsageError(f"the report can't be written to {folder} ({error.strerror}); copy the folder") from error
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="an experiment's folder, results/NAME")
    parser.add_argument("--figures-only", action="store_true", help="draw again from the tables that are there")
    options = parser.parse_args(arguments)
    try:
        summary = report(options.folder, options.figures_only)
    except (UsageError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(summary))
    print("\n".join(["", *remarks(summary)]))
    return 1 if (summary["lossless"] == "fault").any() else 0


def table(summary: pd.DataFrame) -> str:
    """The summary as a person reads it in a terminal."""
    shown = {
        "workload": summary["workload"],
        "tier": summary["tier"],
        "T": summary["temperature"].map("{:g}".format),
        "entropy": _format(summary["model_entropy_bits"], "{:.2f}"),
        "repetition": _format(summary["repetition_share"], "{:.2f}"),
        "arm": summary["arm"] + summary["synthetic"].map({True: " (synthetic)", False: ""}),
        "alpha": _format(summary["acceptance_rate"], "{:.2f}"),
        "tau": _format(summary["block_efficiency"], "{:.2f}"),
        "c": _format(summary["drafting_cost"], "{:.3f}"),
        "tok/s": _format(summary["tokens_per_second"], "{:.1f}"),
        "speedup": _limits(summary, "speedup", "{:.2f}"),
        "p99 step, ms": _p99(summary),
        "lossless": summary["lossless"].fillna("-"),
    }
    rows = pd.DataFrame(shown).astype(str)
    first = ~rows.duplicated(["workload", "T"])
    rows.loc[~first, ["workload", "tier", "T"]] = ""
    lines = [list(shown), *rows.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in cells)


def remarks(summary: pd.DataFrame) -> list[str]:
    """What a reader must know beside the numbers, one sentence each."""
    return [
        *tier_order(summary),
        *_named(summary, summary["lossless"] == "fault", "FAULT: greedy output differs from plain decoding in {}."),
        *_named(summary, summary["lossless"] == "tie", "First difference at a near-tie of the target's logits in {}."),
        *_named(summary, summary["num_failures"] > 0, "Requests failed and are in no number in {}."),
        *_unbounded(summary),
        *_revisions(summary),
    ]


def tier_order(summary: pd.DataFrame) -> Iterator[str]:
    """Per temperature: whether mean measured entropy orders the tiers, and which workloads are out of order."""
    plain = summary.drop_duplicates("run_id")
    for temperature, rows in plain.groupby("temperature"):
        means = rows.groupby("tier")["model_entropy_bits"].mean()
        tiers = [tier for tier in TIERS if tier in means.index]
        if len(tiers) < 2:
            continue
        ordered = all(means[lower] < means[higher] for lower, higher in pairwise(tiers))
        values = ", ".join(f"{tier} {means[tier]:.2f}" for tier in tiers)
        verdict = "orders" if ordered else "does NOT order"
        yield f"Temperature {temperature:g}: mean measured entropy {verdict} the tiers ({values} bits)."
        if strays := [*_strays(rows, means, tiers)]:
            yield f"Temperature {temperature:g}: out of order: {'; '.join(strays)}."


def _strays(rows: pd.DataFrame, means: pd.Series, tiers: Sequence[str]) -> Iterator[str]:
    """Workloads above the mean of the tier above theirs, or below the mean of the tier below."""
    for lower, higher in pairwise(tiers):
        for _, row in rows.iterrows():
            entropy = row["model_entropy_bits"]
            if row["tier"] == lower and entropy > means[higher]:
                yield f"{row['workload']} ({lower}, {entropy:.2f} bits) is above the mean of {higher}"
            if row["tier"] == higher and entropy < means[lower]:
                yield f"{row['workload']} ({higher}, {entropy:.2f} bits) is below the mean of {lower}"


def _aggregate(runs: Sequence[Run], folder: Path) -> Tables:
    if not runs:
        raise UsageError(f"no finished run lies in {folder / 'runs'}; make some with python -m experiments.sweep")
    summaries, positions = [], []
    for run in runs:
        check()
        try:
            frames = run.frames()
        except TraceError as error:
            raise TraceError(f"run {run.metadata.run_id} in {run.folder}: {error}") from error
        summaries.append(summarise(frames.steps, frames.tokens, frames.requests, run.metadata))
        positions.append(per_position(frames.tokens, run.metadata))
    return pd.concat(summaries, ignore_index=True), pd.concat(positions, ignore_index=True)


def _read_tables(folder: Path) -> Tables:
    try:
        summary = _read_table(folder / "summary.csv", SUMMARY_COLUMNS)
        return summary, _read_table(folder / "positions.csv", POSITION_COLUMNS)
    except OSError as error:
        raise UsageError(f"{error.filename} can't be read ({error.strerror}); run the sweep first") from error


def _read_table(path: Path, columns: Sequence[Column]) -> pd.DataFrame:
    try:
        text: Any = {column.name: "string" for column in columns if column.kind == "text"}
        return conform(pd.read_csv(path, dtype=text), columns)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path} does not follow docs/results.md ({error}); aggregate its runs again") from error


def save_figure(figure: Figure, path: Path) -> None:
    """PNG and SVG without a date or random ids, so that the same tables give the same files."""
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        with (
            mpl.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "path"}),
            replacing(path.with_suffix(suffix)) as temporary,
        ):
            figure.savefig(temporary, dpi=150, metadata=metadata)


def _format(numbers: pd.Series, pattern: str) -> pd.Series:
    write: Callable[[float], str] = pattern.format
    return numbers.map(lambda number: "-" if pd.isna(number) else write(number))


def _limits(summary: pd.DataFrame, name: str, pattern: str) -> pd.Series:
    value, low, high = (_format(summary[column], pattern) for column in (name, f"{name}_low", f"{name}_high"))
    return value + " [" + low + ", " + high + "]"


def _p99(summary: pd.DataFrame) -> pd.Series:
    names = [f"step_latency_p99{side}_seconds" for side in ("", "_low", "_high")]
    value, low, high = (_format(summary[name] * 1e3, "{:.1f}") for name in names)
    return value + " [" + low + ", " + high.replace("inf", "unbounded") + "]"


def _named(summary: pd.DataFrame, chosen: pd.Series, sentence: str) -> Iterator[str]:
    rows = summary[chosen.fillna(False).astype(bool)]
    if len(rows):
        places = rows["workload"] + " T=" + rows["temperature"].map("{:g}".format) + " " + rows["arm"]
        yield sentence.format(", ".join(places))


def _unbounded(summary: pd.DataFrame) -> Iterator[str]:
    count = int((summary["step_latency_p99_high_seconds"] == float("inf")).sum())
    if count:
        yield f"p99 step latency has no upper limit in {count} of {len(summary)} rows: too few independent steps."


def _revisions(summary: pd.DataFrame) -> Iterator[str]:
    revisions = sorted(summary["git_sha"].unique())
    if len(revisions) > 1:
        yield f"Runs come from several revisions of the code: {', '.join(revisions)}."


if __name__ == "__main__":
    sys.exit(guarded(main, "interrupted: the same command makes the report"))
