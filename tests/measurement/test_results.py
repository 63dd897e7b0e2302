"""Runs on disk: whole or absent, identified by what they depend on, and never written by two at once."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import stat
from importlib.metadata import PackageNotFoundError

import numpy as np
import pandas as pd
import pytest

from specdec.errors import UsageError
from specdec.measurement import results, traces
from specdec.measurement.results import ArmMetadata, RunMetadata
from specdec.measurement.traces import TraceError
from specdec.version import __version__
from tests.fake_traces import PLAIN, fake_arm, fake_metadata, fake_trace


@pytest.fixture
def metadata():
    arms = {"plain": PLAIN, "fast": fake_arm(lossless="equal")}
    return fake_metadata(arms, config={"seed": 0, "arms": ["plain", "fast"]}, skipped_arms={"oracle": "greedy only"})


@pytest.fixture
def frames():
    rng = np.random.default_rng(0)
    arms = {"plain": 0, "fast": 4}
    listed = {name: [fake_trace("p1", gamma, 0.5, 1.0, 12, rng)] for name, gamma in arms.items()}
    return traces.concat(traces.to_frames(listed[name], name) for name in arms)


def test_metadata_round_trip(metadata):
    again = RunMetadata.from_json(metadata.to_json())
    assert again == metadata
    assert list(again.arms) == ["plain", "fast"]
    assert again.plain_arm == "plain"


def test_an_unknown_lossless_is_refused():
    with pytest.raises(UsageError, match="lossless='maybe'"):
        fake_arm(lossless="maybe")


def test_a_written_run_is_finished_and_loads(tmp_path, metadata, frames):
    assert not results.is_finished(tmp_path, metadata.run_id)
    with results.run_lock(tmp_path, metadata.run_id):
        folder = results.write_run(tmp_path, metadata, frames)
    assert results.is_finished(tmp_path, metadata.run_id)
    assert {path.name for path in folder.iterdir()} == {
        "metadata.json", "steps.parquet", "tokens.parquet", "requests.parquet",
    }  # fmt: skip
    (run,) = results.load_runs(tmp_path)
    assert run.metadata == metadata
    pd.testing.assert_frame_equal(run.frames().steps, frames.steps)
    assert os.access(folder, os.R_OK | os.X_OK)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_finished_run_is_not_overwritten(tmp_path, metadata, frames):
    results.write_run(tmp_path, metadata, frames)
    with pytest.raises(UsageError, match="already in"):
        results.write_run(tmp_path, metadata, frames)


def test_an_interrupted_write_leaves_no_run(tmp_path, metadata, frames, monkeypatch):
    def interrupt(frames, folder):
        (folder / "steps.parquet").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(traces, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        results.write_run(tmp_path, metadata, frames)
    assert not results.is_finished(tmp_path, metadata.run_id)
    assert list((tmp_path / "runs").iterdir()) == []


def test_leftovers_are_ignored_and_cleared(tmp_path, metadata, frames):
    results.write_run(tmp_path, metadata, frames)
    mine, other = (tmp_path / "runs" / f".{name}.x.partial" for name in (metadata.run_id, "another"))
    for leftover in (mine, other):
        leftover.mkdir()
        (leftover / "metadata.json").write_text("{}")
    assert len(results.load_runs(tmp_path)) == 1
    with results.run_lock(tmp_path, metadata.run_id):
        assert not mine.exists()
        assert other.exists()  # another process may be writing it


def test_contradictory_tables_are_not_written(tmp_path, metadata, frames):
    broken = dataclasses.replace(frames, steps=frames.steps.assign(num_emitted=9))
    with pytest.raises(TraceError, match="request p1"):
        results.write_run(tmp_path, metadata, broken)
    assert not results.is_finished(tmp_path, metadata.run_id)


def test_run_id_depends_on_what_matters_and_nothing_else(monkeypatch):
    config = {"gamma": 4, "target": {"model": "a", "dtype": "float32"}}
    reordered = {"target": {"dtype": "float32", "model": "a"}, "gamma": 4}
    base = results.run_id(config, "prompts")
    assert base == results.run_id(reordered, "prompts")
    assert len(base) == 12
    assert base != results.run_id({**config, "gamma": 5}, "prompts")
    assert base != results.run_id(config, "other prompts")
    monkeypatch.setattr(results, "__version__", "9.9")
    assert base != results.run_id(config, "prompts")
    with pytest.raises(UsageError, match="plain JSON"):
        results.run_id({"gamma": object()}, "prompts")


def hold(lock, arguments, line):
    with lock(*arguments):
        line.send("held")
        line.poll(None)  # until the other end is closed


@pytest.fixture
def elsewhere():
    """Holds a lock in another process."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(lock, *arguments):
        line, theirs = context.Pipe()
        process = context.Process(target=hold, args=(lock, arguments, theirs))
        process.start()
        theirs.close()
        started.append((process, line))
        assert line.recv() == "held"

    yield start
    for process, line in started:
        line.close()
        process.join()
        assert process.exitcode == 0


def test_two_processes_cannot_write_one_run(tmp_path, elsewhere):
    elsewhere(results.run_lock, tmp_path, "abc")
    with pytest.raises(UsageError, match="run abc is being written"), results.run_lock(tmp_path, "abc"):
        pass
    with results.run_lock(tmp_path, "other"):
        pass


def test_two_timed_runs_are_refused_unless_shared(tmp_path, elsewhere):
    elsewhere(results.timed_lock, "cpu", False, tmp_path)
    with pytest.raises(UsageError, match="another timed run is using core"), results.timed_lock("cpu", False, tmp_path):
        pass
    with results.timed_lock("cpu", True, tmp_path), results.timed_lock("cuda:0", False, tmp_path):
        pass


def test_locks_are_released(tmp_path):
    held = 0
    for _ in range(2):
        with results.run_lock(tmp_path, "abc"), results.timed_lock("cpu", False, tmp_path):
            held += 1
    assert held == 2


def test_visible_devices_name_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with results.timed_lock("cuda:1", False, tmp_path):
        assert (tmp_path / "specdec-timed-cuda1.lock").exists()
    with results.timed_lock("cuda", False, tmp_path):
        assert (tmp_path / "specdec-timed-cuda3.lock").exists()


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="results can't be written to"):
        results.prepare_folder(blocked / "experiment")


def test_a_checkout_that_is_not_installed_gives_the_same_ids(monkeypatch):
    installed = results.run_id({"gamma": 4}, "prompts")

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(results, "version", absent)
    assert results.run_id({"gamma": 4}, "prompts") == installed
    assert results.collect_provenance("", [], "", num_threads=1).packages["specdec-lab"] == __version__


def test_provenance_says_where_a_result_comes_from():
    found = results.collect_provenance("make sweep", [1, 2], "ff", num_threads=2)
    assert found.command == "make sweep"
    assert found.seeds == [1, 2]
    assert found.hardware.num_cores >= 1
    assert found.packages["numpy"] == np.__version__
    assert found.date.endswith("+00:00")
    json.dumps(dataclasses.asdict(found))
    dirty = dataclasses.replace(found, git_sha="0123456789abcdef", git_dirty=True)
    assert dirty.revision == "0123456789-dirty"
    assert dataclasses.replace(dirty, git_sha=None, git_dirty=False).revision == "unknown"


def test_arms_are_described_in_order():
    assert [field.name for field in dataclasses.fields(ArmMetadata)][:4] == [
        "drafter", "verifier", "controller", "num_draft_tokens",
    ]  # fmt: skip
