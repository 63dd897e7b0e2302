"""Ctrl-C, held until a safe point.

Python raises KeyboardInterrupt between any two instructions, and not everything stands that: where it falls into a
`finally` of OmegaConf's, another exception takes its place. While a command runs, the first Ctrl-C therefore leaves a
note, and `check`, called between steps and runs, raises there. A second one ends the process at once: whatever is
written appears by one rename, so nothing is half-written then either.

A signal belongs to the process, and so does the note.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class _Note:
    """taken: Ctrl-C came. sentence: what the terminal is told, once. waiting: a process in which the first Ctrl-C
    raises where it falls.
    """

    taken = False
    sentence = "interrupted"
    waiting: int | None = None


_note = _Note()


def check() -> None:
    """A safe point. Raises KeyboardInterrupt where Ctrl-C came while it was held."""
    if _note.taken:
        raise KeyboardInterrupt


def guarded(command: Callable[[], int | None], sentence: str) -> int:
    """The command's exit status; after Ctrl-C, whatever the command made of it, `INTERRUPTED` and the sentence.

    The handler stays when this returns: a second Ctrl-C may come while Python is shutting down.
    """
    hold()
    _note.sentence = sentence
    try:
        try:
            return command() or 0
        finally:
            check()
    except KeyboardInterrupt:
        pass
    _say()  # last, below progress bars: they have gone with what the exception held
    return INTERRUPTED


def hold() -> bool:
    """From now on Ctrl-C waits for `check`; whether this call made it so.

    It does not where Ctrl-C is held already, is ignored (jobs in the background), or can't be handled (in a thread).
    """
    held = signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN, _on_signal)
    if held or threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(signal.SIGINT, _on_signal)
    return True


@contextmanager
def holding() -> Iterator[None]:
    """`hold` and `check` around a block: for work that a worker process may have been sent."""
    before = signal.getsignal(signal.SIGINT)
    mine = hold()
    try:
        yield
        check()
    finally:
        if mine and not _note.taken:  # after Ctrl-C the process ends, and a second one may come meanwhile
            signal.signal(signal.SIGINT, before)


def wait_for_workers() -> None:
    """From now on the first Ctrl-C raises where it falls, in this process: it only waits for others that work."""
    _note.waiting = os.getpid()


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _note.taken:
        _say()
        os._exit(INTERRUPTED)
    _note.taken = True
    if _note.waiting == os.getpid():
        raise KeyboardInterrupt


def _say() -> None:
    """Past Python's buffers, which a signal may have found in use; on a line of its own, below any progress bar."""
    if _note.sentence:
        os.write(2, f"\n{_note.sentence}\n".encode())
        _note.sentence = ""
