"""Fits `controller=survival` to recorded runs: python -m experiments.fit_survival results/NAME [options]

Every examined draft token of the chosen runs counts once: its draft probability, its position, whether it was kept.
Runs at temperature 0 and lookup drafters are left out, because their recorded draft probabilities are all 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from specdec.controllers.survival import SurvivalModel, fit_survival
from specdec.errors import UsageError
from specdec.measurement.results import Run, load_runs
from specdec.measurement.traces import DRAFTED_KINDS, TraceError


def examined_tokens(runs: Sequence[Run], arms: Sequence[str] = ()) -> pd.DataFrame:
    """Draft tokens with a probability of their own: columns draft_prob, draft_position, accepted.

    arms: only these; empty: every arm whose draft probabilities are not all 1.
    """
    parts = []
    for run in runs:
        tokens = run.frames().tokens
        drafted = tokens[tokens["kind"].isin(DRAFTED_KINDS) & tokens["draft_prob"].notna()]
        for arm, rows in drafted.groupby("arm"):
            if (arm in arms) if arms else (rows["draft_prob"] < 1).any():
                parts.append(rows.assign(accepted=rows["kind"] == "accepted"))
    if not parts:
        raise UsageError(
            "no run holds draft probabilities below 1; record a draft model at temperature above 0, "
            "or name other arms with --arm"
        )
    return pd.concat(parts, ignore_index=True)[["draft_prob", "draft_position", "accepted"]]


def fit(folder: Path, arms: Sequence[str] = ()) -> SurvivalModel:
    """Fit on the finished runs of an experiment. Raises `UsageError` where they teach nothing."""
    runs = load_runs(folder)
    if not runs:
        raise UsageError(f"no finished run lies in {folder / 'runs'}; make some with python -m experiments.sweep")
    tokens = examined_tokens(runs, arms)
    return fit_survival(tokens["draft_prob"], tokens["draft_position"], tokens["accepted"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fit_survival",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="an experiment's folder, results/NAME")
    parser.add_argument("--arm", action="append", default=[], help="fit on this arm alone; may be given several times")
    parser.add_argument("--output", type=Path, help="where to write (default: survival.json in the folder)")
    options = parser.parse_args(arguments)
    output = options.output or options.folder / "survival.json"
    try:
        model = fit(options.folder, options.arm)
        model.save(output)
    except (UsageError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{output} can't be written ({error.strerror}); name another file with --output", file=sys.stderr)
        return 2
    print(
        f"P(accepted) = sigmoid({model.bias:.3f} + {model.confidence:.3f} logit(draft probability) "
        f"+ {model.depth:.3f} (position - 1)), from {model.num_tokens} draft tokens\n"
        f"use it with controller=survival controller.coefficients={output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
