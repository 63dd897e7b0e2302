"""What the doctor says: a line for each thing that it checks.

A check is a function of plain values, so that any machine can be described to it. A section gathers the values of this
machine, and imports what it needs itself: a broken package spoils its own section and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """fail: something will not run. warn: it runs, but slower, or with less than one may expect."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and the way out; only `ok` may do without one."""

    level: Level
    subject: str
    fact: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level != Level.OK and not self.remedy:
            raise ValueError(f"{self.subject} is wrong ({self.fact}), yet no way out is given")

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.subject:<13}  {self.fact}" + (f"; {self.remedy}" if self.remedy else "")


Section = Callable[[], Iterable[Finding]]


def examine(sections: Iterable[Section]) -> Iterator[Finding]:
    """What every section finds. One whose packages are missing or broken is a finding itself."""
    for section in sections:
        try:
            yield from section()
        except (ImportError, OSError) as error:
            remedy = "install into a fresh environment: make setup"
            yield Finding(Level.FAIL, section.__name__, f"can't be examined ({error})", remedy)


def gigabytes(num_bytes: int | None) -> str:
    """In words; None is an amount that the system does not say."""
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
