"""Whether the hub is in reach: answered soon, whatever stands between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from specdec.machine import hub


class Silent(BaseHTTPRequestHandler):
    """Takes a request and says nothing until the test is over."""

    over = threading.Event()

    def do_HEAD(self) -> None:
        self.over.wait(30)


class Failing(BaseHTTPRequestHandler):
    """Answers, if only with an error."""

    def do_HEAD(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            Silent.over.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Moves the hub."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return lambda address: monkeypatch.setattr(constants, "ENDPOINT", address)


def test_any_answer_is_an_answer(at: Callable[[str], None]) -> None:
    with serving(Failing) as address:
        at(address)
        assert hub.in_reach()


def test_silence_is_waited_for_no_longer_than_asked(at: Callable[[str], None]) -> None:
    Silent.over.clear()
    with serving(Silent) as address:
        at(address)
        assert not hub.in_reach(patience_seconds=0.1)
        assert not Silent.over.is_set()


def test_nobody_there(at: Callable[[str], None]) -> None:
    with serving(Failing) as address:
        at(address)
    assert not hub.in_reach()


def test_offline_mode_asks_nobody(at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with serving(Failing) as address:
        at(address)
        assert not hub.in_reach()
