"""Ctrl-C in a sweep, at every point of it: 130, one sentence, and nothing lost that was finished."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from experiments import sweep
from specdec.machine import interrupts
from specdec.machine.interrupts import INTERRUPTED
from tests.commands import HERE, ROOT
from tests.signals import signalling, terminal
from tests.test_run_smoke import settings, undrawn

__all__ = ["settings", "terminal", "undrawn"]  # fixtures

pytestmark = pytest.mark.usefixtures("terminal")

SENTENCE = "interrupted: finished runs are kept, and the same command goes on with the rest"
SWEEP = ["sampling.temperature=0,1", "~arms.oracle"]

COMPOSE = "hydra._internal.config_loader_impl:ConfigLoaderImpl"
OMEGACONF = "omegaconf.base:Node._invalidate_flags_cache"  # where KeyboardInterrupt becomes an AttributeError
STEP = "specdec.decoding.engine:Engine._step"
POINTS = {
    # when: the function at whose call Ctrl-C comes, once so many runs are finished, and how many are in the end
    "composing the sweep": (f"{COMPOSE}._load_configuration_impl", 0, 0),
    "inside OmegaConf": (OMEGACONF, 0, 0),
    "counting the runs": ("experiments.callbacks:num_runs", 0, 0),
    "composing the first run": (f"{COMPOSE}.load_sweep_config", 0, 0),
    "loading": ("experiments.sweep:load_target", 0, 0),
    "building the arms": ("experiments.arms:_describe", 0, 0),
    "warming up": ("specdec.measurement.interleaving:_warm_up", 0, 0),
    "decoding": (STEP, 0, 0),
    "comparing": ("experiments.sweep:compare_arms", 0, 1),
    "writing": ("specdec.measurement.traces:write", 0, 1),
    "between two runs": ("experiments.callbacks:SweepCallback.on_job_end", 1, 1),
    "inside OmegaConf, between two runs": (OMEGACONF, 1, 1),
    "composing the second run": (f"{COMPOSE}.load_sweep_config", 1, 1),
    "decoding the second run": (STEP, 1, 1),
    "reporting": ("experiments.report:summarise", 2, 2),
    "drawing": ("experiments.report:save_figure", 2, 2),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "results" / "adhoc" / "runs"


def finished(runs: Path) -> dict[str, int]:
    """Runs, with the time when they were written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("[!.]*/metadata.json")}


def folders(runs: Path) -> set[str]:
    return {path.name for path in runs.glob("*") if path.is_dir()}


def command(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """`python -m experiments.sweep -m ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["experiments.sweep", "-m", *HERE, *overrides, *SWEEP])
    return sweep.command()


@pytest.mark.parametrize("when", POINTS)
def test_at_any_moment_it_ends_with_one_sentence_and_loses_nothing(
    when: str, settings: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place, before, after = POINTS[when]
    owner, _, name = place.replace(":", ".").rpartition(".")
    with monkeypatch.context() as patch:
        function = getattr(resolve_name(owner), name)
        patch.setattr(resolve_name(owner), name, signalling(function, lambda: len(finished(runs)) == before))
        assert command(settings, patch) == INTERRUPTED
    shown = capfd.readouterr().err
    assert shown.count(SENTENCE) == 1
    assert shown.endswith(f"{SENTENCE}\n")
    assert "Traceback" not in shown
    assert "rror" not in shown
    assert len(finished(runs)) == after
    assert folders(runs) == set(finished(runs)), "something is half-written"


@pytest.mark.usefixtures("undrawn")
def test_it_goes_on_where_it_stopped(settings: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        step = resolve_name(STEP)
        patch.setattr("specdec.decoding.engine.Engine._step", signalling(step, lambda: len(finished(runs)) == 1))
        assert command(settings, patch) == INTERRUPTED
    kept = finished(runs)
    assert len(kept) == 1
    monkeypatch.setattr(interrupts, "_note", interrupts._Note())
    assert command(settings, monkeypatch) == 0
    assert len(finished(runs)) == 2
    assert kept.items() <= finished(runs).items(), "a finished run was run again"


# In processes of their own

PRELUDE = """
import runpy, signal, sys
from tests.signals import signalling
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
RUN = "\nrunpy.run_module('experiments.sweep', run_name='__main__', alter_sys=True)\n"


def process(code: str, overrides: list[str], *path: Path) -> subprocess.CompletedProcess[str]:
    """`python -m experiments.sweep -m ...` as a terminal starts it, after what `code` puts in its way."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code + RUN, "-m", *overrides, *SWEEP],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_while_packages_are_imported(settings: list[str], runs: Path) -> None:
    code = """
import builtins
builtins.__import__ = signalling(builtins.__import__, lambda: "hydra" in sys.modules and "torch" not in sys.modules)
"""
    done = process(code, settings)
    assert done.returncode == INTERRUPTED, done.stderr
    assert done.stderr.endswith(f"\n{SENTENCE}\n")
    assert "Traceback" not in done.stderr
    assert not finished(runs)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_second_one_stops_at_once(
    settings: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
from specdec.measurement import traces
traces.write = signalling(traces.write, lambda: True, times=2)
"""
    done = process(code, settings)
    assert done.returncode == INTERRUPTED, done.stderr
    assert done.stderr.endswith(f"\n{SENTENCE}\n")
    assert not finished(runs)
    assert all(name.startswith(".") for name in folders(runs)), "what was begun bears no run's name"
    assert command(settings, monkeypatch) == 0
    assert len(finished(runs)) == 2
    assert folders(runs) == set(finished(runs)), "what was begun is cleared away"


LAUNCHER = """
import multiprocessing
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore

def _work(launch, pipe):
    try:
        launch()
    except BaseException as error:
        pipe.send(error)

class ProcessLauncher(BasicLauncher):
    '''A process for all runs; what ends them is raised where they are waited for, as joblib does it.'''
    def launch(self, job_overrides, initial_job_idx):
        here, there = multiprocessing.Pipe()
        launch = super().launch
        worker = multiprocessing.get_context("fork").Process(
            target=_work, args=(lambda: launch(job_overrides, initial_job_idx), there)
        )
        worker.start()
        worker.join()
        if here.poll():
            raise here.recv()
        return []

ConfigStore.instance().store("process", {"_target_": f"{__name__}.ProcessLauncher"}, group="hydra/launcher")
"""


@pytest.mark.slow
def test_in_a_worker(settings: list[str], runs: Path, tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    (plugins / "hydra_plugins").mkdir(parents=True)
    (plugins / "hydra_plugins" / "process_launcher.py").write_text(LAUNCHER)
    code = f"""
import os, pathlib, specdec.decoding.engine as engine
parent, runs = os.getpid(), pathlib.Path({str(runs)!r})
due = lambda: os.getpid() != parent and len(list(runs.glob("[!.]*/metadata.json"))) == 1
engine.Engine._step = signalling(engine.Engine._step, due)
"""
    done = process(code, [*settings, "hydra/launcher=process"], plugins)
    assert done.returncode == INTERRUPTED, done.stderr
    assert done.stderr.endswith(f"\n{SENTENCE}\n")
    assert "Traceback" not in done.stderr
    assert len(finished(runs)) == 1
    assert folders(runs) == set(finished(runs)), "something is half-written"


@pytest.mark.slow
def test_at_random_moments(settings: list[str], runs: Path) -> None:
    """Eight times the same sweep, stopped somewhere in what one takes or later; one that got to its end begins anew."""
    code = """
import os, threading
from specdec.machine.interrupts import hold
hold()
threading.Timer(float(os.environ["CTRL_C_AFTER"]), os.kill, (os.getpid(), signal.SIGINT)).start()
"""
    chance, kept = random.Random(15), {}
    for _ in range(8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CTRL_C_AFTER", str(chance.uniform(0, 12)))
            done = process(code, settings)
        assert done.returncode in (0, INTERRUPTED), done.stderr
        assert done.stderr.count(SENTENCE) == (done.returncode == INTERRUPTED)
        assert "Traceback" not in done.stderr
        assert kept.items() <= finished(runs).items(), "a finished run was lost"
        assert folders(runs) == set(finished(runs)), "something is half-written"
        kept = finished(runs)
        if done.returncode == 0:
            assert len(kept) == 2
            shutil.rmtree(runs)
            kept = {}
