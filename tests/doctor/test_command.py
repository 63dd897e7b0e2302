"""The doctor's lines and its command, run on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.doctor import __main__ as doctor
from specdec.doctor.findings import Finding, Level, examine


def test_a_line_is_aligned_and_ends_with_the_way_out() -> None:
    assert str(Finding(Level.OK, "load", "calm")) == "ok    load           calm"
    assert str(Finding(Level.WARN, "onednn", "not there", "mend it")) == "warn  onednn         not there; mend it"


@pytest.mark.parametrize("level", [Level.WARN, Level.FAIL])
def test_nothing_is_wrong_without_a_way_out(level: Level) -> None:
    with pytest.raises(ValueError, match="no way out"):
        Finding(level, "load", "high")


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("no library")])
def test_a_broken_section_is_a_finding_and_the_others_go_on(error: Exception) -> None:
    def broken() -> Iterator[Finding]:
        yield Finding(Level.OK, "first", "fine")
        raise error

    def whole() -> Iterator[Finding]:
        yield Finding(Level.OK, "last", "fine")

    found = list(examine([broken, whole]))
    assert [(line.level, line.subject) for line in found] == [("ok", "first"), ("fail", "broken"), ("ok", "last")]
    assert str(error) in found[1].fact


def test_the_command_prints_a_line_each_and_leaves_nothing_but_kernels(tmp_path: Path) -> None:
    environment = {**os.environ, "SPECDEC_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specdec.doctor", "--results", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert done.returncode == int(any(line.startswith("fail") for line in lines))
    subjects = [line[6:19].strip() for line in lines]
    for subject in (
        "specdec-lab",
        "revision",
        "cpu",
        "kernels",
        "float32",
        "bfloat16",
        "memory",
        "load",
        "smollm2-135m",
        "hub cache",
    ):
        assert subject in subjects
    assert subjects[-1] == "results"
    assert {line[:6].strip() for line in lines} <= {"ok", "warn", "fail"}
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert all(name.startswith("kernels-") for name in left)


def test_the_exit_status_is_1_where_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for section in ("installation", "machine", "gpus", "caches"):
        monkeypatch.setattr(doctor, section, lambda: [Finding(Level.WARN, "load", "high", "wait")])
    assert doctor.main(["--results", str(tmp_path)]) == 0, "a warning fails nothing"
    (tmp_path / "file").write_text("in the way")
    assert doctor.main(["--results", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("fail  results ")
