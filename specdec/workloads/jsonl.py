"""The file format of a workload: a header object, then one object per prompt, one per line.

    {"workload": "qa", "tier": "mixed", "license": "Apache-2.0", "format": "chat", "max_new_tokens": 128, ...}
    {"id": "qa-001", "text": "Why is the sky dark at night?"}

`format` is `chat` (the text is a user message, put through the model's chat template) or `raw` (the text is
continued as it stands). A header may also hold `stop`, `source` and `description`; a prompt may hold
`system` (chat only) and its own `stop` and `max_new_tokens`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import UsageError
from specdec.types import Prompt
from specdec.workloads.base import TIERS, Workload

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class _Field:
    """What one key of a line may hold."""

    accepts: Callable[[Any], bool]
    wanted: str
    required: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1  # a bool is an int, and no count


def _is_stop(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(stop, str) and stop for stop in value)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _as_chat(record: Mapping[str, Any]) -> dict[str, Messages]:
    system = [{"role": "system", "content": record["system"]}] if "system" in record else []
    return {"messages": (*system, {"role": "user", "content": record["text"]})}


def _as_raw(record: Mapping[str, Any]) -> dict[str, str]:
    return {"text": record["text"]}


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {"chat": _as_chat, "raw": _as_raw}

_STOP = _Field(_is_stop, "a list of strings, none of them empty")
_HEADER = {
    "workload": _Field(_is_text, "the workload's name", required=True),
    "tier": _Field(TIERS.__contains__, f"one of {', '.join(TIERS)}", required=True),
    "license": _Field(_is_text, "an SPDX licence identifier", required=True),
    "format": _Field(lambda value: value in tuple(_FORMATS), f"one of {', '.join(_FORMATS)}", required=True),
    "max_new_tokens": _Field(_is_count, "a whole number of at least 1", required=True),
    "stop": _STOP,
    "source": _Field(_is_string, "a string"),
    "description": _Field(_is_string, "a string"),
}
_RAW_PROMPT = {
    "id": _Field(_is_text, "a name of its own", required=True),
    "text": _Field(_is_text, "a string that is not blank", required=True),
    "stop": _STOP,
    "max_new_tokens": _Field(_is_count, "a whole number of at least 1"),
}
_PROMPT = {"raw": _RAW_PROMPT, "chat": {**_RAW_PROMPT, "system": _Field(_is_string, "a string")}}


def parse_workload(content: str, path: str) -> Workload:
    """Read a workload out of a file's `content`; `path` only names it in error messages.

    UsageError, with file and line, on anything that is not the format above.
    """
    records = [
        (f"{path}, line {number}", _parse_line(line, f"{path}, line {number}"))
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not records:
        raise UsageError(f"{path} is empty; it needs a header line and at least one prompt")
    where, header = records[0]
    _check(header, _HEADER, f"{where} (the header)")
    if len(records) == 1:
        raise UsageError(f"{path} holds a header and no prompts; add at least one line with id and text")
    prompts = tuple(_parse_prompt(record, header, where) for where, record in records[1:])
    _refuse_duplicate_ids(prompts, path)
    return Workload(header["workload"], header["tier"], header.get("description", ""), header["license"], prompts)


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON ({error.msg}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where} is not a JSON object; write one object in braces per line")
    return record


def _check(record: Mapping[str, Any], fields: Mapping[str, _Field], where: str) -> None:
    for name, rule in fields.items():
        if name not in record:
            if rule.required:
                raise UsageError(f"{where} lacks {name!r}; it must be {rule.wanted}")
        elif not rule.accepts(record[name]):
            raise UsageError(f"{where} has {name}={record[name]!r}; it must be {rule.wanted}")
    # A key that nobody reads would be an option silently ignored.
    unknown = next((name for name in record if name not in fields), None)
    if unknown is not None:
        raise UsageError(f"{where} has an unknown field {unknown!r}; the known ones are {', '.join(fields)}")


def _parse_prompt(record: Mapping[str, Any], header: Mapping[str, Any], where: str) -> Prompt:
    _check(record, _PROMPT[header["format"]], where)
    return Prompt(
        id=record["id"],
        workload=header["workload"],
        tier=header["tier"],
        max_new_tokens=record.get("max_new_tokens", header["max_new_tokens"]),
        stop=tuple(record.get("stop", header.get("stop", ()))),
        **_FORMATS[header["format"]](record),
    )


def _refuse_duplicate_ids(prompts: tuple[Prompt, ...], path: str) -> None:
    prompt_id, count = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{path} uses the id {prompt_id!r} {count} times; give every prompt an id of its own")
