"""Compares this engine with transformers' generate, and shows where time goes: python -m experiments.bench [--quick]

Decoding is greedy, with the same prompts and limits on both sides. Everything takes turns in one process, so that
whatever else the machine does affects all alike. Writes raw times, a summary, a Markdown table and a figure under
results/bench/ (with --quick under results/bench/quick/).
"""

from __future__ import annotations

if __name__ == "__main__":  # first of all: what follows takes seconds to import, and Ctrl-C may come meanwhile
    from specdec.machine.interrupts import hold

    hold()

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from experiments.bench import batches, contexts, drafters, drafts, forwards, generation, memory, rules
from experiments.bench.plan import FULL, QUICK, Plan
from experiments.bench.subject import Setting, Subject
from experiments.bench.tables import Row, markdown
from experiments.report import save_figure
from specdec.errors import UsageError
from specdec.machine.interrupts import check, guarded
from specdec.measurement import results
from specdec.measurement.results import Provenance
from specdec.models.loading.model import resolve_device, resolve_dtype
from specdec.plots.bench import bench_figure
from specdec.workloads import load_workload


class Part(NamedTuple):
    """One thing to measure: raw times of one dtype, and what the summary says of them.

    dtype: what it always works in, whatever the models' is; it is then measured once. Rows may say their own.
    """

    measure: Callable[[Subject, Plan], pd.DataFrame]
    summarise: Callable[[pd.DataFrame], list[Row]]
    dtype: str | None = None


PARTS: Mapping[str, Part] = {
    "generation": Part(generation.measure, generation.summarise),
    "forwards": Part(forwards.measure, forwards.summarise),
    "dtypes": Part(forwards.measure_dtypes, forwards.summarise_dtypes, dtype=forwards.REFERENCE),
    "long_forwards": Part(forwards.measure_long, forwards.summarise_long),
    "contexts": Part(contexts.measure, contexts.summarise),
    "batches": Part(batches.measure, batches.summarise),
    "drafters": Part(drafters.measure, drafters.summarise),
    "rules": Part(rules.measure, rules.summarise, dtype="float32"),
    "memory": Part(memory.measure, memory.summarise),
}
SLOW = ("memory",)
"""Left out by --quick unless asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parse(given)
    folder = options.output / "quick" if options.quick else options.output
    try:
        if not options.figures_only:
            run(options, shlex.join(["python", "-m", "experiments.bench", *given]), folder)
        summary = read(folder / "summary.csv")
        results.write_text(folder / "table.md", markdown(summary))
        save_figure(bench_figure(summary), folder / "bench")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {folder} can't be written to ({error.strerror}); make room, or give --output", file=sys.stderr)
        return 2
    print(markdown(summary))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure a little of everything: two minutes, not twenty")
    named = f"of {', '.join(PARTS)}; rows of the others stay"
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=named)
    parser.add_argument("--model", default="smollm2-135m", help="embedded model or directory (default: %(default)s)")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="a checkpoint instead of the draft model that ships")
    parser.add_argument("--draft-tokens", type=int, default=4, help="the draft model's gamma (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... or auto (default: %(default)s)")
    parser.add_argument("--workload", default="code_edit", help="a shipped one, or JSONL (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="default: %(default)s")
    parser.add_argument("--figures-only", action="store_true", help="draw table and figure again from summary.csv")
    parser.add_argument("--share-device", action="store_true", help="allow another timed run at the same time")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, command: str, folder: Path) -> None:
    """Measure part by part; each is written when it is done, so that an interruption keeps what was finished."""
    plan, parts = (QUICK if options.quick else FULL), _parts(options)
    if options.draft_tokens < 1:
        raise UsageError(f"--draft-tokens {options.draft_tokens} is not possible; it must be at least 1")
    (device,) = {str(resolve_device(options.device, resolve_dtype(dtype))) for dtype in options.dtypes}
    results.prepare_folder(folder)
    with results.timed_lock(device, shared=options.share_device), tempfile.TemporaryDirectory() as scratch:
        setting = Setting(
            model=options.model,
            device=device,
            workload=load_workload(options.workload),
            draft=options.draft,
            draft_tokens=options.draft_tokens,
            dtypes=tuple(options.dtypes),
            scratch=Path(scratch),
        )
        provenance = _provenance(command, setting)
        stamp = _stamp(setting, provenance)
        for raw, summary in measure(parts, setting, options.dtypes, plan):
            for name, table in (("raw.csv", raw), ("summary.csv", summary)):
                results.write_text(folder / name, joined(table.assign(**stamp), folder / name).to_csv(index=False))
    results.write_text(folder / "provenance.json", json.dumps(asdict(provenance), indent=2) + "\n")


def _parts(options: argparse.Namespace) -> dict[str, Part]:
    """Those asked for, or all that there is time for and something to compare with."""
    left_out = {*(SLOW if options.quick else ()), *(() if len(options.dtypes) > 1 else ("dtypes",))}
    return {name: PARTS[name] for name in options.only or PARTS if options.only or name not in left_out}


def measure(
    parts: Mapping[str, Part], setting: Setting, dtypes: Sequence[str], plan: Plan
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """Raw times and summary rows of every part in every dtype, as they are done."""
    for dtype in dtypes:
        subject = Subject(setting, dtype)
        for name, part in parts.items():
            check()
            if part.dtype is not None and dtype != dtypes[0]:
                continue
            raw = part.measure(subject, plan)
            labels = {"dtype": part.dtype or dtype, "part": name}
            yield _labelled(raw, labels), _labelled(pd.DataFrame(part.summarise(raw)), labels)


def _labelled(table: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """With what its rows do not say themselves."""
    return table.assign(**{name: label for name, label in labels.items() if name not in table})


def joined(new: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rows of one part and dtype, and the file's of others that come from the same model, draft and machine."""
    if not path.is_file():
        return new
    old = read(path)
    machine = ["model", "draft", "hardware"]
    same = (old[machine] == new[machine].iloc[0]).all(axis=1)
    replaced = old["part"].eq(new["part"].iloc[0]) & old["dtype"].isin(new["dtype"])
    both = pd.concat([old[same & ~replaced], new], ignore_index=True)
    return both.sort_values("part", key=lambda names: names.map(list(PARTS).index), kind="stable", ignore_index=True)


def read(path: Path) -> pd.DataFrame:
    """A table as it was written: text stays text, and an empty cell of text is empty text."""
    text = ("system", "arm", "measure", "limits", "part", "dtype", "model", "draft", "hardware", "date", "git_sha")
    try:
        table = pd.read_csv(path, keep_default_na=True, dtype=dict.fromkeys(text, "string"))
    except OSError as error:
        raise UsageError(f"{path} can't be read ({error.strerror}); run python -m experiments.bench first") from error
    present = [name for name in text if name in table]
    return table.assign(**{name: table[name].fillna("").astype(object) for name in present})


def _provenance(command: str, setting: Setting) -> Provenance:
    gpu = torch.cuda.get_device_name(setting.device) if setting.device.startswith("cuda") else None
    return results.collect_provenance(command, [0], setting.workload.fingerprint, torch.get_num_threads(), gpu)


def _stamp(setting: Setting, provenance: Provenance) -> dict[str, str]:
    """What every row carries."""
    return {
        "model": setting.model,
        "draft": drafts.describe(setting.draft, setting.model),
        "hardware": str(provenance.hardware),
        "date": provenance.date,
        "git_sha": provenance.revision,
    }


if __name__ == "__main__":
    sys.exit(guarded(main, "interrupted: what was measured is kept; --only measures the other parts"))
