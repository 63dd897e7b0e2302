"""The commands as a terminal shows them, run in this process: a new one spends most of its time on imports."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
HERE = (f"--config-path={ROOT}/conf", "hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
"""What a Hydra command needs to run in a process that goes on: its configuration, and no logging of its own."""

PROMPTS = """\
{"workload": "tiny", "tier": "low", "license": "Apache-2.0", "format": "raw", "max_new_tokens": 12, \
"source": "tests", "description": "a few bytes"}
{"id": "tiny-0", "text": "abc abc "}
{"id": "tiny-1", "text": "abc abc abc "}
{"id": "tiny-2", "text": "abc abc abc abc "}
{"id": "tiny-3", "text": "abc abc abc abc abc "}
"""
"""Short prompts: the tiny model's window is 128 bytes."""


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    stdout: str
    stderr: str


def run(main: Callable[[], Any], *arguments: str) -> Ran:
    """`main` with these arguments, options first as Hydra wants them."""
    options = sorted((*arguments, *HERE), key=lambda argument: not argument.startswith("-"))
    with (
        patch.object(sys, "argv", [main.__module__, *options]),
        patch.object(sys, "path", [*sys.path]),
        redirect_stdout(io.StringIO()) as stdout,
        redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            status = main()
        except SystemExit as ended:
            status = ended.code
            if isinstance(status, str):
                print(status, file=stderr)
                status = 1
    return Ran(int(status or 0), stdout.getvalue(), stderr.getvalue())
