"""The library is built once, whole, and for this processor; where it cannot be, the reason says how to have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec import kernels
from specdec.kernels import cpu
from specdec.kernels import library as module
from specdec.kernels.library import Build
from specdec.models.native.linear import PlainLinear, linear

fresh = module.build.__wrapped__
needs_kernels = pytest.mark.skipif(kernels.build().library is None, reason=f"no kernels: {kernels.build().reason}")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in (module.SWITCH, module.ARCHITECTURE, "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    return tmp_path


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@needs_kernels
def test_it_is_built_once(folder: Path) -> None:
    first = fresh()
    assert libraries(folder) == [f"{first.name}.so"]
    made = (folder / f"{first.name}.so").stat().st_mtime_ns
    assert fresh().name == first.name
    assert (folder / f"{first.name}.so").stat().st_mtime_ns == made
    assert first.compiler
    assert first.reason == ""


@needs_kernels
def test_processes_that_start_together_build_it_once(folder: Path) -> None:
    code = "from specdec.kernels import build; print(build().name)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=120)[0].strip() for process in running}
    assert libraries(folder) == [f"{name}.so" for name in printed]


@needs_kernels
@pytest.mark.parametrize("changed", ["cpu_model", "features"])
def test_another_processor_gets_its_own(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = fresh().name
    monkeypatch.setattr(module, changed, lambda: "another")
    assert fresh().name != here


@needs_kernels
def test_another_architecture_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = module._digest("cc 1.0", Path("libgomp.so"))
    monkeypatch.setenv(module.ARCHITECTURE, "x86-64")
    assert module._digest("cc 1.0", Path("libgomp.so")) != here


@needs_kernels
def test_there_is_one_openmp_runtime_and_it_is_torchs() -> None:
    assert kernels.build().library is not None
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line[line.index("/") :] for line in maps if "/" in line and "omp" in Path(line.split("/")[-1]).name}
    assert len({name for name in runtimes if "libgomp" in name or "libiomp" in name}) == 1


def why_not() -> Build:
    built = fresh()
    assert built.library is None
    return built


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_KERNELS", "0")
    assert (why_not().reason, why_not().remedy) == ("SPECDEC_KERNELS=0", "unset SPECDEC_KERNELS")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler (no-such-compiler)" in why_not().reason
    assert "gcc" in why_not().remedy


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> None:
    broken = tmp_path_factory.mktemp("bin") / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit\necho "error: no OpenMP" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert "error: no OpenMP" in why_not().reason
    assert libraries(folder) == []


def test_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not() == Build(None, reason="they are made for Linux, and this is darwin")


def test_without_openmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n7f02-7f03 rw-p 00000000 00:00 0\n"
    )
    monkeypatch.setattr(module, "_MAPS", tmp_path / "maps")
    assert "without OpenMP" in why_not().reason


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(folder / "file" / "below"))
    assert "SPECDEC_CACHE" in why_not().remedy


def test_without_kernels_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)
    assert type(linear(torch.ones(2, 2))) is PlainLinear
    assert not kernels.serves(torch.ones(2))
