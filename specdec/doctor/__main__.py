"""Is this machine fit to run? python -m specdec.doctor: a line for each thing, and the way out where it is wrong.

A check is a function of plain values, so that any machine can be described to it; a section gathers the values of this
one and imports what it needs itself, so that a broken package costs its section and no other. Nothing is fetched, and
nothing is left behind but the kernels, which are built where they are not yet. Exits with 1 where a line says `fail`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.doctor.findings import Finding, Level, examine
from specdec.doctor.installation import installation
from specdec.doctor.machine import gpus, machine
from specdec.doctor.places import ROOM_BYTES, caches, place


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specdec.doctor", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder runs will be written to")
    options = parser.parse_args(arguments)

    def outputs() -> Iterator[Finding]:
        yield place("results", options.results, ROOM_BYTES, "set results_dir to a folder you may write to")

    failed = False
    for finding in examine([installation, machine, gpus, caches, outputs]):
        print(finding, flush=True)
        failed |= finding.level == Level.FAIL
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
