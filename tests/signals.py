"""Ctrl-C, sent to oneself at a chosen call. Imports nothing heavy: processes of their own begin with it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdec.machine import interrupts


def ctrl_c() -> None:
    """What a terminal sends."""
    signal.raise_signal(signal.SIGINT)


def signalling(function: Callable[..., Any], due: Callable[[], bool], times: int = 1) -> Callable[..., Any]:
    """The function, with Ctrl-C, `times` of it, at its first call that is due."""
    left = times

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        while left and due():
            left -= 1
            ctrl_c()
        return function(*args, **kwargs)

    return wrapped


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C as a process in a terminal has it at its start, whatever started these tests; and as it was, after."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(interrupts, "_note", interrupts._Note())
    yield
    signal.signal(signal.SIGINT, before)
