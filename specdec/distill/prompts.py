"""Prompts to train drafts on: as varied as the evaluation workloads in form, and none of them.

Chat prompts are sentences with slots. Raw ones (records, edits, copies) are made from the same words and from the
source of Python's standard library, which every machine has and no evaluation prompt quotes.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.types import Prompt

_SLOT = re.compile(r"\{(\w+)\}")
_CHAT_SHARES = {
    "code": 20,
    "math": 7,
    "qa": 10,
    "summarise": 8,
    "creative": 14,
    "brainstorm": 8,
    "multilingual": 6,
}
_RAW_SHARES = {"json": 11, "code_edit": 10, "repeat": 6}


def training_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` different prompts, the same for the same seed, standard library and package version.

    Raises `UsageError` for a count below 1.
    """
    if count < 1:
        raise UsageError(f"a draft cannot be trained on {count} prompts; ask for at least 1")
    words = _Words(random.Random(seed))
    shares = _CHAT_SHARES | _RAW_SHARES
    found: dict[str, Prompt] = {}
    while len(found) < count:
        (kind,) = words.random.choices(list(shares), list(shares.values()))
        prompt = _make(kind, words, f"train-{kind}-{len(found):06d}")
        found.setdefault(json.dumps([prompt.text, prompt.messages]), prompt)
    return list(found.values())


def _make(kind: str, words: _Words, name: str) -> Prompt:
    if kind in _RAW:
        return Prompt(name, text=_RAW[kind](words), workload=kind)
    described = _templates()["chat"][kind]
    system = words.random.choice(described["systems"])
    content = words.fill(words.random.choice(described["templates"]))
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Prompt(name, messages=tuple(messages), workload=kind)


@cache
def _templates() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((resources.files(__package__) / "templates.json").read_text("utf-8"))
    return found


class _Words:
    """Random words for slots."""

    def __init__(self, source: random.Random) -> None:
        self.random = source

    def fill(self, template: str) -> str:
        """Every {slot} replaced; within one template a slot's values differ as far as there are enough."""
        unused: dict[str, Iterator[str]] = {}

        def value(match: re.Match[str]) -> str:
            slot = match[1]
            return next(unused.setdefault(slot, self._values(slot)), match[0])

        return _SLOT.sub(value, template)

    def pick(self, slot: str, count: int) -> list[str]:
        """So many values of a slot, different where there are enough."""
        values = self._values(slot)
        return [next(values) for _ in range(count)]

    def _values(self, slot: str) -> Iterator[str]:
        if slot == "passage":
            while True:
                yield self.random.choice(_passages())
        words = _templates()["slots"][slot]
        while True:
            yield from self.random.sample(words, len(words))


def _json(words: _Words) -> str:
    """A table in some notation, and the beginning of its records."""
    columns, rows = _table(words)
    separator = words.random.choice([",", " | ", "; ", "\t"])
    notation = words.random.choice(["table", "records", "object"])
    records = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    if notation == "object":
        return _settings(words, columns, rows)
    if notation == "records":  # records again, with one key changed or one more
        key, value = (
            words.random.choice(["ok", "seen", "year", "region"]),
            words.random.choice([True, 1, "north", 2020]),
        )
        source = "\n".join(records)
        records = [json.dumps(dict(zip(columns, row, strict=True)) | {key: value}) for row in rows]
    else:
        head = "| " + " | ".join(columns) + " |" if separator == " | " else separator.join(columns)
        source = "\n".join([head, *(separator.join(str(cell) for cell in row) for row in rows)])
    lead = words.random.choice(["", "Convert to JSON.\n\n", "The same as JSON, one record per line:\n\n", "Data:\n"])
    link = words.random.choice(["\n\n", "\n\nJSON:\n", "\n\n[\n", "\n\nAs records:\n\n"])
    start = "\n".join(records)
    return lead + source + link + start[: len(records[0]) + words.random.randint(2, len(records[1]) // 2)]


def _settings(words: _Words, columns: list[str], rows: list[list[object]]) -> str:
    first, second = (json.dumps(dict(zip(columns, row, strict=True)), indent=2) for row in rows[:2])
    lead = words.random.choice(["Two entries of the file:", "The configuration, for two hosts.", "Write the next one."])
    return f"{lead}\n\n{first}\n\n{second[: words.random.randint(5, len(second) // 2)]}"


def _table(words: _Words) -> tuple[list[str], list[list[object]]]:
    makers: dict[str, Callable[[], object]] = {
        "name": lambda: words.fill("{name} {surname}"),
        "item": lambda: words.fill("{thing}"),
        "city": lambda: words.fill("{city}"),
        "job": lambda: words.fill("{trade}"),
        "color": lambda: words.fill("{colour}"),
        "id": lambda: words.random.randint(100, 999),
        "price": lambda: words.random.randint(100, 9999) / 100,
        "active": lambda: words.random.random() < 0.5,
        "age": lambda: words.random.randint(18, 80),
        "email": lambda: words.fill("{name}@example.com").lower(),
        "date": lambda: (
            f"20{words.random.randint(10, 24)}-0{words.random.randint(1, 9)}-{words.random.randint(10, 28)}"
        ),
        "code": lambda: words.random.choice("ABCDEFGH") + str(words.random.randint(10, 99)),
    }
    columns = words.random.sample(list(makers), words.random.randint(3, 5))
    return columns, [[makers[column]() for column in columns] for _ in range(words.random.randint(3, 6))]


def _code_edit(words: _Words) -> str:
    """A function, and the beginning of the same with one name or number changed."""
    source = words.random.choice(_functions())
    names = sorted({name for name in re.findall(r"\b[a-z_]{3,}\b", source) if source.count(name) > 2} - _KEYWORDS)
    numbers = sorted(set(re.findall(r"\b\d+\b", source)))
    if names and (not numbers or words.random.random() < 0.7):
        old, new = words.random.choice(names), words.fill("{thing}_{colour}")
        lead = words.random.choice([f"Rename `{old}` to `{new}`.", f"`{old}` is called `{new}` from now on."])
    elif numbers:
        old, new = words.random.choice(numbers), str(words.random.randint(2, 99))
        lead = f"Use {new} in place of {old}."
    else:
        old, new, lead = "self", "this", "Write `this` for `self`."
    edited = re.sub(rf"\b{old}\b", new, source)
    link = words.random.choice(["", "Updated:\n\n", "After the change:\n\n", "The new version:\n\n"])
    return f"{lead}\n\n```python\n{source}\n```\n\n{link}```python\n{_beginning(edited, words)}"


def _repeat(words: _Words) -> str:
    """A paragraph, list or table, and the beginning of its copy."""
    lead, link = "", words.random.choice(["Again:", "The same once more:", "Copy:", "Repeated word for word:"])
    kind = words.random.choice(["passage", "list", "table"])
    if kind == "passage":
        text = words.random.choice(_passages())
    elif kind == "list":
        text = "\n".join(words.fill("{name} {surname}, {trade}, {city}") for _ in range(words.random.randint(4, 9)))
    else:
        columns, rows = _table(words)
        lines: list[Sequence[object]] = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in lines)
    return f"{lead}{text}\n\n{link}\n\n{_beginning(text, words)}"


def _beginning(text: str, words: _Words) -> str:
    return text[: words.random.randint(len(text) // 12, len(text) // 4)].rstrip() or text[:8]


_RAW: Mapping[str, Callable[[_Words], str]] = {"json": _json, "code_edit": _code_edit, "repeat": _repeat}
_KEYWORDS = {"self", "def", "return", "for", "not", "and", "None", "raise", "with", "import", "from", "else", "elif"}
_KEYWORDS |= {"while", "try", "except", "class", "lambda", "yield", "the", "pass", "break", "continue", "finally"}


@cache
def _functions() -> tuple[str, ...]:
    """Functions of 6 to 30 lines from the standard library, without their docstrings."""
    found = []
    for tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
                text = ast.unparse(node)
                if 6 <= text.count("\n") <= 30 and len(text) < 900:
                    found.append(text)
    return tuple(sorted(set(found)))


@cache
def _passages() -> tuple[str, ...]:
    """Paragraphs of 40 to 120 words from the standard library's docstrings."""
    found = set()
    for tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    text = " ".join(paragraph.split())
                    if 40 <= len(text.split()) <= 120:
                        found.add(text)
    return tuple(sorted(found))


@cache
def _modules() -> tuple[ast.Module, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in _templates()["standard_library"]]
    return tuple(ast.parse(file.read_text(encoding="utf-8")) for file in files if file.is_file())
