"""Whether the model hub is in reach: asked once and briefly, where its own clients retry for half a minute."""

from __future__ import annotations

import contextlib
import threading

_PATIENCE_SECONDS = 3.0


def in_reach(patience_seconds: float = _PATIENCE_SECONDS) -> bool:
    """Whether the hub answers, be it with an error, within so many seconds. False in offline mode.

    Proxies, mirrors and certificates are those of the hub's own client. Without an answer, what was fetched before is
    still there: ask the client for local files alone.
    """
    answers: list[object] = []
    # In a thread of its own: no timeout reaches into a name server that does not answer.
    asking = threading.Thread(target=_ask, args=(answers, patience_seconds), daemon=True)
    asking.start()
    asking.join(patience_seconds)
    return bool(answers)


def _ask(answers: list[object], patience_seconds: float) -> None:
    from huggingface_hub import constants, get_session

    with contextlib.suppress(Exception):  # whatever HTTP library it is, no answer is no answer
        answers.append(get_session().head(constants.ENDPOINT, timeout=patience_seconds))
