"""Builds decode.c for this processor, once, with the compiler that is there.

The library lies in the user's cache under a name made of everything it depends on, so that another processor, compiler
or torch gets its own. It appears whole or not at all. Where it cannot be built the reason is kept, and models compute
through torch's operators.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from specdec.machine.folders import cache_root
from specdec.machine.processor import cpu_model, features

SWITCH = "SPECDEC_KERNELS"
"""Set to 0, nothing is built or used."""
ARCHITECTURE = "SPECDEC_KERNELS_MARCH"
"""The compiler's -march, for tests of what other processors get: x86-64, x86-64-v3, ... Unset: this processor's."""
_SOURCE = Path(__file__).with_name("decode.c")
_COMPILE = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-c")
_MAPS = Path("/proc/self/maps")
_OPENMP = ("libgomp", "libiomp5")
_PATIENCE = 120  # seconds
_INSTALL = "install gcc, or name another C compiler that has OpenMP in CC"


@dataclass(frozen=True)
class Build:
    """The library, or why there is none, and the way out if there is one.

    compiler: its own first line about itself. name: of the library's file, made of all that it depends on.
    """

    library: ctypes.CDLL | None
    compiler: str = ""
    name: str = ""
    reason: str = ""
    remedy: str = ""


class _NotBuiltError(Exception):
    """Its arguments: the reason, and the way out."""


@cache
def build() -> Build:
    """This process's library, compiled now where no earlier process has."""
    try:
        command, compiler = _compiler()
        openmp = _openmp()
        path = cache_root() / f"kernels-{_digest(compiler, openmp)}.so"
        if not path.is_file():
            _compile(command, openmp, path)
        return Build(ctypes.CDLL(str(path)), compiler, path.stem)
    except _NotBuiltError as error:
        reason, remedy = error.args
        return Build(None, reason=reason, remedy=remedy)
    except OSError as error:
        remedy = "set SPECDEC_CACHE to a folder you may write to, from which programs may run"
        return Build(None, reason=str(error), remedy=remedy)


def _compiler() -> tuple[list[str], str]:
    """Its command, and what it says it is."""
    if os.environ.get(SWITCH) == "0":
        raise _NotBuiltError(f"{SWITCH}=0", f"unset {SWITCH}")
    if not sys.platform.startswith("linux"):
        raise _NotBuiltError(f"they are made for Linux, and this is {sys.platform}", "")
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise _NotBuiltError(f"there is no C compiler ({command[0]})", _INSTALL)
    return command, _run([*command, "--version"]).partition("\n")[0]


def _openmp() -> Path:
    """The OpenMP runtime that torch has loaded. With another, its threads and ours would take turns waiting."""
    import torch  # noqa: F401  it is torch that loads the runtime

    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        path = Path(line[line.index("/") :]) if "/" in line else Path()
        if path.name.startswith(_OPENMP):
            return path
    raise _NotBuiltError("this torch was built without OpenMP", "")


def _options() -> tuple[str, ...]:
    return (f"-march={os.environ.get(ARCHITECTURE, 'native')}", *_COMPILE)


def _digest(compiler: str, openmp: Path) -> str:
    """Of everything that the library depends on."""
    sources = [_SOURCE, *sorted(_SOURCE.parent.glob("*.h"))]
    texts = [source.read_text(encoding="utf-8") for source in sources]
    parts = (*texts, *_options(), compiler, str(openmp), platform.machine(), cpu_model(), features())
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(command: list[str], openmp: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if path.is_file():  # made by another process meanwhile
            return
        compiled, linked = Path(folder, "decode.o"), Path(folder, "decode.so")
        _run([*command, *_options(), str(_SOURCE), "-o", str(compiled)])
        _run([*command, "-shared", str(compiled), str(openmp), "-lm", "-o", str(linked)])
        linked.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        raise _NotBuiltError(f"{command[0]} failed ({lines[0] if lines else error})", _INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise _NotBuiltError(f"{command[0]} took more than {_PATIENCE} s", "try again") from error
    return done.stdout
