"""Ctrl-C, held until a safe point."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from specdec.machine import interrupts
from tests.signals import ctrl_c, terminal

__all__ = ["terminal"]  # a fixture

pytestmark = pytest.mark.usefixtures("terminal")


def test_it_waits_for_a_safe_point() -> None:
    done = []

    def work() -> int:
        interrupts.check()
        ctrl_c()
        done.append("what was begun")
        interrupts.check()
        done.append("what came after")
        return 0

    assert interrupts.guarded(work, "stopped") == interrupts.INTERRUPTED
    assert done == ["what was begun"]


def test_the_sentence_is_said_once_and_only_where_it_came(capfd: pytest.CaptureFixture[str]) -> None:
    assert interrupts.guarded(lambda: 3, "stopped") == 3
    assert interrupts.guarded(lambda: None, "stopped") == 0
    assert capfd.readouterr().err == ""
    assert interrupts.guarded(ctrl_c, "stopped") == interrupts.INTERRUPTED
    assert capfd.readouterr().err == "\nstopped\n"


@pytest.mark.parametrize("error", [SystemExit(1), RuntimeError("something else broke")])
def test_whatever_the_command_makes_of_it_counts_as_interrupted(error: BaseException) -> None:
    def work() -> None:
        ctrl_c()
        raise error

    assert interrupts.guarded(work, "stopped") == interrupts.INTERRUPTED


def test_other_endings_stay_as_they_are() -> None:
    def work() -> None:
        raise SystemExit("error: no such model")

    with pytest.raises(SystemExit, match="no such model"):
        interrupts.guarded(work, "stopped")


def test_a_block_gives_the_signal_back() -> None:
    with interrupts.holding(), interrupts.holding():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_ends_with_what_came_inside_it() -> None:
    done = []

    def work() -> None:
        with interrupts.holding():
            ctrl_c()
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_it_stays_ignored_in_a_job_in_the_background() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert interrupts.guarded(ctrl_c, "stopped") == 0


def test_a_thread_leaves_the_signal_alone() -> None:
    held = []
    thread = threading.Thread(target=lambda: held.append(interrupts.hold()))
    thread.start()
    thread.join()
    assert held == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_only_waits_for_workers_does_not_wait_for_a_safe_point() -> None:
    done = []

    def work() -> None:
        interrupts.wait_for_workers()
        ctrl_c()
        done.append("never")

    assert interrupts.guarded(work, "stopped") == interrupts.INTERRUPTED
    assert not done


def test_a_second_one_ends_the_process_at_once() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from specdec.machine.interrupts import guarded\n"
        "def work():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('going on', flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('never', flush=True)\n"
        "guarded(work, 'stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (interrupts.INTERRUPTED, "going on\n", "\nstopped\n")
