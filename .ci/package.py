"""The package as its users get it: `make package`.

Builds the sdist and the wheel, compares what they hold with what git holds, installs each into a clean environment, and
runs the README's first lines of Python there, from an empty folder. Takes a package index and about two minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SDIST_FILES = ("specdec", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore")
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The checkout must not be importable, or the installed package would not be what runs."""


def main() -> None:
    """Every step, or the one that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        sdist, wheel = build(Path(scratch, "dist"))
        compare(wheel.name, held_by_wheel(wheel), tracked("specdec"))
        compare(sdist.name, held_by_sdist(sdist), tracked(*SDIST_FILES))
        python = clean_environment(Path(scratch, "environment"))
        lines, empty = readme_lines(), Path(scratch, "empty")
        empty.mkdir()
        install(python, wheel, "--constraint", str(ROOT / "constraints.txt"))
        run_lines(python, lines, empty)
        install(python, sdist, "--no-deps", "--force-reinstall")  # what it depends on is there from the wheel
        run_lines(python, lines, empty)
    print(f"{wheel.name} and {sdist.name} install, and run the README's lines")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), cwd=ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def tracked(*paths: str) -> set[str]:
    """What git holds under these paths."""
    return set(run("git", "ls-files", "--", *paths, cwd=ROOT).splitlines())


def held_by_wheel(wheel: Path) -> set[str]:
    """Every file but the metadata, among which the licence has to be."""
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        sys.exit(f"error: {wheel.name} has no licence")
    return names - metadata


def held_by_sdist(sdist: Path) -> set[str]:
    """Every file but the metadata, without the folder they lie in."""
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    return names - {"PKG-INFO"}


def compare(name: str, held: set[str], expected: set[str]) -> None:
    """Exit where an archive lacks a file, or has one too many."""
    for fault, files in (("lacks", expected - held), ("has what git has not", held - expected)):
        if files:
            sys.exit(f"error: {name} {fault}: {', '.join(sorted(files))}")


def clean_environment(folder: Path) -> str:
    """An environment with pip alone; returns its interpreter."""
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def install(python: str, archive: Path, *options: str) -> None:
    """The archive, and a check that all it asks for is there."""
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", *options, str(archive), cwd=archive.parent)
    run(python, "-m", "pip", "check", cwd=archive.parent)


def readme_lines() -> str:
    """README's first block of Python."""
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if block is None:
        sys.exit("error: README.md has no block of Python")
    return block[1]


def run_lines(python: str, lines: str, folder: Path) -> None:
    """Run them as a user would, and read the count of tokens that they print last."""
    printed = run(python, "-c", lines, cwd=folder)
    counted = re.search(r"^(\d+) tokens in (\d+) forward passes$", printed, re.MULTILINE)
    if counted is None or not 0 < int(counted[2]) <= int(counted[1]):
        sys.exit(f"error: the README's lines printed {printed!r}")
    print(counted[0])


def run(*command: str, cwd: Path) -> str:
    """What the command prints. Exit with its output where it fails."""
    done = subprocess.run(command, cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
