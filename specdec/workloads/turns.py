"""From what a dataset's row says to the messages of a prompt: one turn, several, or a whole conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from specdec.errors import UsageError

Message = dict[str, str]

TURNS: Mapping[str, slice] = {"first": slice(1), "all": slice(None)}
"""Which of a row's user turns become prompts."""

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


def up_to(messages: Sequence[Message], turns: slice) -> list[list[Message]]:
    """For each of the chosen user turns, the conversation that ends in it.

    Answers are there as far as the data holds them. User turns with no answer between them become one message: a
    model's own answers don't exist before it has run, and most chat templates refuse two user turns in a row.
    """
    ends = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return [_merged(messages[: end + 1]) for end in ends[turns]]


def _message(turn: Any) -> tuple[Any, Any]:
    if isinstance(turn, Mapping):
        return turn.get("role"), turn.get("content")
    return "user", None if turn is None else str(turn)


def _merged(messages: Sequence[Message]) -> list[Message]:
    return [
        {"role": role, "content": "\n\n".join(message["content"] for message in neighbours)}
        for role, neighbours in groupby(messages, key=lambda message: message["role"])
    ]


def _as_chat(messages: Sequence[Message], where: str) -> Mapping[str, Any]:
    return {"messages": tuple(messages)}


def _as_raw(messages: Sequence[Message], where: str) -> Mapping[str, Any]:
    if len(messages) > 1:
        raise UsageError(f"{where} is a conversation, which format=raw can't hold; set format=chat")
    return {"text": messages[0]["content"]}


FORMATS: Mapping[str, Callable[[Sequence[Message], str], Mapping[str, Any]]] = {"chat": _as_chat, "raw": _as_raw}
"""How messages become a `Prompt`: through the model's chat template, or as plain text to continue."""
