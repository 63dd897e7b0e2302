"""Checks whether this machine is fit to run: python -m specdec.doctor

Prints one line for each thing it checks, with the way out if something is wrong. It fetches nothing, and writes nothing
but the CPU kernels, which it builds if they are missing. Exits with 1 if a line says `fail`.
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
    parser = argparse.ArgumentParser(
        prog="python -m specdec.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="where runs will go (default: %(default)s)"
    )
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
