"""From what a dataset's row says to the messages of a prompt: one turn, several, or a whole conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from specdec.errors import UsageError

Message = dict[str, str]

TURNS: Mapping[str, slice] = {"first": slice(1), "all": slice(None)}
"""Which of a row's user turns are asked."""

_ROLES = ("system", "user", "assistant")


def conversation(value: Any, where: str) -> list[Message]:
    """A row's text as messages.

    value: a string is one user turn, a list of strings one each; a list of mappings with role and content is taken as
    it is. UsageError, naming `where`, on blank texts, other roles, and no user turn at all.
    """
    messages = [_message(turn) for turn in (value if isinstance(value, list) else [value])]
    for role, content in messages:
        if role not in _ROLES:
            raise UsageError(f"{where} has a message of role {role!r}; it must be one of {', '.join(_ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise UsageError(f"{where} has a blank text; every turn must hold words: drop the row or mend columns.text")
    if not any(role == "user" for role, _ in messages):
        raise UsageError(f"{where} has no user turn; check columns.text")
    return [{"role": role, "content": content} for role, content in messages]


class Asked(NamedTuple):
    """A prompt's messages, and what is asked after the model's own answers to it. turn: its number, from 1."""

    turn: int
    messages: list[Message]
    then: list[str]


def asked(messages: Sequence[Message], turns: slice) -> list[Asked]:
    """The chosen user turns as prompts.

    Where the data holds the answer to a turn, the next one is a prompt of its own, with the conversation so far. Where
    it holds none, the next one follows the model's. In what lies further back, user turns without an answer become one
    message: most chat templates refuse two in a row.
    """
    found: list[Asked] = []
    ends = [index for index, message in enumerate(messages) if message["role"] == "user"]
    for turn, end in list(enumerate(ends, start=1))[turns]:
        if found and messages[end - 1]["role"] == "user":
            found[-1].then.append(messages[end]["content"])
        else:
            found.append(Asked(turn, _merged(messages[: end + 1]), []))
    return found


def _message(turn: Any) -> tuple[Any, Any]:
    if isinstance(turn, Mapping):
        return turn.get("role"), turn.get("content")
    return "user", None if turn is None else str(turn)


def _merged(messages: Sequence[Message]) -> list[Message]:
    return [
        {"role": role, "content": "\n\n".join(message["content"] for message in neighbours)}
        for role, neighbours in groupby(messages, key=lambda message: message["role"])
    ]


def _as_chat(found: Asked, where: str) -> Mapping[str, Any]:
    return {"messages": tuple(found.messages)}


def _as_raw(found: Asked, where: str) -> Mapping[str, Any]:
    if len(found.messages) > 1 or found.then:
        raise UsageError(f"{where} is a conversation, which format=raw can't hold; set format=chat")
    return {"text": found.messages[0]["content"]}


FORMATS: Mapping[str, Callable[[Asked, str], Mapping[str, Any]]] = {"chat": _as_chat, "raw": _as_raw}
"""How messages become a `Prompt`: through the model's chat template, or as plain text to continue."""
