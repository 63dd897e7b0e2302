"""Any dataset as a workload, by configuration alone: which columns, which rows, how they become prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from string import Formatter
from typing import Any, TypeVar

from specdec.errors import UsageError
from specdec.types import Prompt, Turn
from specdec.workloads.base import TIERS, Workload
from specdec.workloads.rows import Row, read_rows, stem
from specdec.workloads.turns import FORMATS, TURNS, Asked, Message, asked, conversation

T = TypeVar("T")


def load_dataset(
    path: str,
    *,
    columns: Mapping[str, str | None],
    name: str | None = None,
    config: str | None = None,
    split: str = "test",
    streaming: bool = False,
    template: str = "{text}",
    format: str = "chat",
    turns: str = "first",
    category: str | Sequence[str] | None = None,
    placeholder: str | None = None,
    skip_placeholders: bool = False,
    tier: str = "unknown",
    tiers: Mapping[str, str] | None = None,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    limit: int | None = None,
    shuffle_seed: int | None = None,
    license: str = "unknown",
    description: str = "",
) -> Workload:
    """Load a local file, a folder or a hub dataset; docs/datasets.md has a table of the options.

    path, config, split, streaming: as in `rows.read_rows`. columns: field → column, dots reach into nested ones;
    `text` is what is asked (a string, a list of turns, or a list of messages with role and content), `id` and
    `category` are optional, others are for `template`, which is put around every user turn. format: `chat` or `raw`.
    turns: `first`, or `all`: every user turn, after the data's answers as far as it has any, else after the model's.
    category: keep rows of these only; they join the workload's name. placeholder: text that stands for withheld data;
    refused, or left out if `skip_placeholders`. tiers: category → tier, where it is not `tier`. limit: prompts, after
    shuffling. UsageError, naming the value and the way out, on anything that is not possible.
    """
    wanted = (category,) if isinstance(category, str) else tuple(category or ())
    shape = _Shape(
        workload="_".join([name or stem(path), *(["+".join(wanted)] if wanted else [])]),
        columns={field: column for field, column in columns.items() if column is not None},
        template=template,
        pack=_choice("format", format, FORMATS),
        turns=_choice("turns", turns, TURNS),
        tier=_tier("tier", tier),
        tiers={key: _tier(f"tiers.{key}", value) for key, value in (tiers or {}).items()},
        max_new_tokens=max_new_tokens,
        stop=tuple(stop),
    )
    shape.check(categories=bool(wanted))
    rows = _of_categories(read_rows(path, config, split, streaming), shape, wanted, path)
    prompts = _without_placeholders(_prompts(rows, shape), placeholder, skip_placeholders, path)
    found = tuple(islice(prompts, _enough(limit, shuffle_seed, wanted)))
    _refuse_none_and_duplicates(found, path)
    workload = Workload(shape.workload, _common_tier(found), description, license, found)
    workload = workload if shuffle_seed is None else workload.shuffled(shuffle_seed)
    return workload if limit is None else workload.first(limit)


@dataclass(frozen=True)
class _Shape:
    """How a row becomes prompts."""

    workload: str
    columns: Mapping[str, str]
    template: str
    pack: Callable[[Asked, str], Mapping[str, Any]]
    turns: slice
    tier: str
    tiers: Mapping[str, str]
    max_new_tokens: int
    stop: tuple[str, ...]

    def check(self, *, categories: bool) -> None:
        """Refuse, before any row is read, what no row could satisfy."""
        if "text" not in self.columns:
            raise UsageError("columns maps no text; set columns.text to the column that holds the prompt")
        if (categories or self.tiers) and "category" not in self.columns:
            raise UsageError("category and tiers need categories; set columns.category to the column that holds them")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens={self.max_new_tokens} is not possible; it must be at least 1")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop={list(self.stop)} is not possible; give a list of strings, none of them empty")
        fields = self.template_fields()
        unknown = next((field for field in fields if field not in self.columns), None)
        if unknown is not None:
            raise UsageError(f"the template names {unknown!r}; columns maps {', '.join(self.columns)}")
        if "text" not in fields:
            raise UsageError(f"template={self.template!r} leaves out {{text}}; without it all prompts are the same")

    def template_fields(self) -> list[str]:
        """The names in braces. UsageError on a stray brace."""
        try:
            return [field for _, field, _, _ in Formatter().parse(self.template) if field is not None]
        except ValueError as error:
            raise UsageError(f"template={self.template!r} has a stray brace; double it to keep it") from error

    def value(self, row: Row, field: str) -> Any:
        """What the row holds in the column mapped to `field`. UsageError if it lacks the column."""
        column = self.columns[field]
        if column in row.values:
            return row.values[column]
        nested = dict(_flattened(row.values))
        if column not in nested:
            known = ", ".join(nested) or "none"
            raise UsageError(f"{row.where} has no column {column!r} (columns.{field}); its columns are {known}")
        return nested[column]

    def messages(self, row: Row) -> list[Message]:
        """The row's conversation, the template around each user turn."""
        others = {field: _joined(self.value(row, field)) for field in self.template_fields() if field != "text"}
        return [
            {**message, "content": self.template.format(text=message["content"], **others)}
            if message["role"] == "user"
            else message
            for message in conversation(self.value(row, "text"), row.where)
        ]


def _prompts(rows: Iterator[tuple[int, Row]], shape: _Shape) -> Iterator[Prompt]:
    for number, row in rows:
        own = str(shape.value(row, "id")) if "id" in shape.columns else f"{shape.workload}-{number}"
        category = str(shape.value(row, "category")) if shape.tiers else ""
        found = asked(shape.messages(row), shape.turns)
        several = sum(1 + len(each.then) for each in found) > 1
        for each in found:
            yield Prompt(
                id=f"{own}/{each.turn}" if several else own,
                workload=shape.workload,
                tier=shape.tiers.get(category, shape.tier),
                max_new_tokens=shape.max_new_tokens,
                stop=shape.stop,
                then=tuple(Turn(f"{own}/{turn}", text) for turn, text in enumerate(each.then, start=each.turn + 1)),
                **shape.pack(each, row.where),
            )


def _of_categories(rows: Iterator[Row], shape: _Shape, wanted: tuple[str, ...], path: str) -> Iterator[tuple[int, Row]]:
    """Rows of the wanted categories, each with its number from 1 in the whole split."""
    seen: dict[str, None] = {}
    for number, row in enumerate(rows, start=1):
        category = str(shape.value(row, "category")) if wanted else ""
        seen[category] = None
        if not wanted or category in wanted:
            yield number, row
    missing = next((category for category in wanted if category not in seen), None)
    if missing is not None:
        raise UsageError(f"{path} has no row of category {missing!r}; its categories are {', '.join(seen) or 'none'}")


def _without_placeholders(
    prompts: Iterator[Prompt], placeholder: str | None, skip: bool, path: str
) -> Iterator[Prompt]:
    for prompt in prompts:
        texts = [prompt.text or "", *(message["content"] for message in prompt.messages or ())]
        texts += [turn.text for turn in prompt.then]
        if placeholder is None or not any(placeholder in text for text in texts):
            yield prompt
        elif not skip:
            raise UsageError(
                f"prompt {prompt.id!r} of {path} holds a placeholder ({placeholder!r}), not the data; prepare the data "
                "as its authors describe and set workload.path to it, or set skip_placeholders=true to run the rest"
            )


def _enough(limit: int | None, shuffle_seed: int | None, wanted: tuple[str, ...]) -> int | None:
    """How many prompts to read: the first few need not wait for the rest, which may be millions.

    A shuffle needs them all, and so does the search for a category that isn't there.
    """
    return limit if limit is not None and limit > 0 and shuffle_seed is None and len(wanted) < 2 else None


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _joined(value: Any) -> str:
    return "\n".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _choice(option: str, value: str, choices: Mapping[str, T]) -> T:
    if value not in choices:
        raise UsageError(f"{option}={value!r} is not possible; choose one of {', '.join(choices)}")
    return choices[value]


def _tier(option: str, value: str) -> str:
    return _choice(option, value, {tier: tier for tier in TIERS})


def _common_tier(prompts: tuple[Prompt, ...]) -> str:
    tiers = {prompt.tier for prompt in prompts}
    return tiers.pop() if len(tiers) == 1 else "unknown"


def _refuse_none_and_duplicates(prompts: tuple[Prompt, ...], path: str) -> None:
    if not prompts:
        raise UsageError(f"{path} gives no prompts; check the file, category and skip_placeholders")
    ids = [name for prompt in prompts for name in (prompt.id, *(turn.id for turn in prompt.then))]
    prompt_id, count = Counter(ids).most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"{path} uses the id {prompt_id!r} {count} times; set columns.id to a column that is unique, or to null"
        )
