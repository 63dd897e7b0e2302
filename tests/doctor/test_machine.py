"""What the doctor says of processors, memory, load and GPUs described to it."""

from __future__ import annotations

import sys
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec import kernels
from specdec.doctor import machine as doctor
from specdec.doctor.findings import Finding, Level, examine
from specdec.errors import UsageError
from specdec.kernels import Build
from specdec.measurement.results import Hardware
from specdec.models.loading import model as loading
from specdec.models.native import linear


def machine(num_threads: int | None = 4) -> Hardware:
    return Hardware("A processor", 4, num_threads, 8_000_000_000, None)


@pytest.mark.parametrize("section", ["machine", "gpus"])
def test_without_torch_only_what_needs_torch_fails(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = list(examine([getattr(doctor, section), lambda: [Finding(Level.OK, "last", "fine")]]))
    assert [(line.level, line.subject) for line in found] == [("fail", section), ("ok", "last")]
    assert "torch" in found[0].fact


@pytest.mark.parametrize(
    ("threads", "quota", "environment", "level", "remedy"),
    [
        (4, None, {}, "ok", ""),
        (2, None, {}, "ok", ""),  # torch's own choice where cores share their units
        (None, None, {}, "ok", ""),
        (1, None, {"OMP_NUM_THREADS": "1"}, "warn", "unset it"),
        (4, None, {"OMP_NUM_THREADS": "4"}, "ok", ""),
        (8, None, {}, "warn", "hardware.num_threads=4"),
        (4, 2.5, {}, "warn", "hardware.num_threads=2"),
        (4, 0.5, {}, "warn", "hardware.num_threads=1"),
        (2, 2.0, {"OMP_NUM_THREADS": "2"}, "ok", ""),
    ],
)
def test_threads_match_the_cores_that_may_be_used(
    threads: int | None, quota: float | None, environment: dict[str, str], level: str, remedy: str
) -> None:
    found = doctor.cpu(machine(threads), quota, environment)
    assert found.level == level
    assert remedy in found.remedy
    assert "A processor, 4 cores" in found.fact


@pytest.mark.parametrize(("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5)])
def test_a_containers_quota_is_read(text: str, cores: float | None, tmp_path: Path) -> None:
    assert doctor.quota_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text(text)
    assert doctor.quota_cores(tmp_path) == cores


def test_memory_is_no_more_than_a_container_grants(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    assert doctor.memory_bytes(8 << 30, info, tmp_path) == (8 << 30, None)
    info.write_text("MemTotal:  8388608 kB\nMemFree:  1024 kB\nMemAvailable:  6291456 kB\n")
    assert doctor.memory_bytes(8 << 30, info, tmp_path) == (8 << 30, 6 << 30)
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.memory_bytes(8 << 30, info, tmp_path) == (8 << 30, 6 << 30)
    (tmp_path / "memory.max").write_text(f"{2 << 30}\n")
    assert doctor.memory_bytes(8 << 30, info, tmp_path) == (2 << 30, 2 << 30)


def test_memory_below_what_the_embedded_model_needs_is_warned_of() -> None:
    assert doctor.memory(8 * 10**9, doctor.MEMORY_BYTES).level == Level.OK
    assert doctor.memory(8 * 10**9, doctor.MEMORY_BYTES - 1).level == Level.WARN
    assert "does not say" in doctor.memory(None, None).fact


@pytest.mark.parametrize(
    ("busy", "cores", "level"), [(0.1, 2, "ok"), (1.0, 2, "warn"), (1.0, 64, "ok"), (9.0, 64, "warn")]
)
def test_a_busy_machine_is_named(busy: float, cores: int, level: str) -> None:
    found = doctor.load(busy, cores)
    assert found.level == level
    assert f"{busy:.2f} of {cores} cores" in found.fact


def test_a_revision_that_cannot_be_had_again_is_named() -> None:
    assert doctor.revision("abcdef", "abcdef").level == Level.OK
    assert doctor.revision("abcdef", "abcdef-dirty").level == Level.WARN
    assert doctor.revision(None, "unknown").level == Level.WARN


def test_kernels_that_were_not_built_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "build", lambda: Build(None, reason="there is no C compiler", remedy="install gcc"))
    found = next(doctor.kernels())
    assert (found.level, found.remedy) == (Level.WARN, "install gcc")
    assert "no C compiler" in found.fact
    monkeypatch.setattr(kernels, "build", lambda: Build(None, reason="they are made for Linux"))
    assert next(doctor.kernels()).level == Level.OK  # nothing can be done about it
    monkeypatch.setattr(kernels, "build", lambda: Build(CDLL(None), compiler="cc 1.0"))
    assert next(doctor.kernels()) == Finding(Level.OK, "kernels", "built by cc 1.0")


def test_doctor_says_what_bfloat16_means_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "linear", linear.PlainLinear)
    _, float32, bfloat16 = doctor.kernels()
    assert float32.fact == "products by PlainLinear"
    assert bfloat16.level == Level.OK
    assert "weights are stored in it and computed with in float32" in bfloat16.fact


def test_products_are_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "linear", lambda weight: lambda x: x @ weight.T.to(x.dtype) + 1)
    assert [found.level for found in doctor.kernels()][1:] == [Level.FAIL, Level.FAIL]
    assert all("wrong" in found.fact for found in list(doctor.kernels())[1:])

    def gone(weight: torch.Tensor) -> linear.Linear:
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear, "linear", gone)
    assert all("no such operator" in found.fact for found in list(doctor.kernels())[1:])


def test_no_gpu_is_fine_unless_there_should_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", Path("nowhere"))
    assert list(doctor.gpus()) == [Finding(Level.OK, "gpu", "no GPU: target.device=cpu")]
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", Path(__file__))
    (found,) = doctor.gpus()
    assert found.level == Level.WARN
    assert "CUDA build" in found.remedy


@pytest.mark.parametrize(
    ("lacking", "level", "remedy"),
    [
        ((), "ok", ""),
        ((torch.bfloat16,), "warn", "target.dtype=float16"),
        ((torch.float32, torch.bfloat16), "fail", "cpu"),
    ],
)
def test_each_gpu_is_tried_out(
    lacking: tuple[torch.dtype, ...], level: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, dtype: torch.dtype) -> torch.device:
        if dtype in lacking:
            raise UsageError(f"{name} has no {dtype}")
        return torch.device(name)

    made = SimpleNamespace(name="A GPU", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: made)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (12_000_000_000, 16_000_000_000))
    monkeypatch.setattr(loading, "resolve_device", resolve)
    found = list(doctor.gpus())
    assert [line.subject for line in found] == ["cuda:0", "cuda:1"]
    assert {line.level for line in found} == {level}
    assert "A GPU, compute capability 7.5" in found[0].fact
    assert ("12.0 GB of 16.0 GB free" in found[0].fact) is (level != "fail")
    assert remedy in found[0].remedy
