"""What a conformance kit says: which rules were checked, which could not be and why, and which one is broken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specdec.errors import UsageError

Case = TypeVar("Case")


class ConformanceError(AssertionError):
    """A rule of a contract is broken; the one sentence says which part, which rule and with which values."""


class Inapplicable(Exception):  # noqa: N818 - nothing is wrong
    """A rule says nothing about this part; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One check that did not fail. rule: its docstring's first line. skipped: why it was not made, or None."""

    check: str
    rule: str
    skipped: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Report:
    """Every check of a kit, in order. subject: the class that was checked."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def checked(self) -> tuple[str, ...]:
        """Names of the checks that passed."""
        return tuple(finding.check for finding in self.findings if finding.skipped is None)

    @property
    def skipped(self) -> dict[str, str]:
        """Name → why, of the checks that were not made."""
        return {finding.check: finding.skipped for finding in self.findings if finding.skipped is not None}

    def __str__(self) -> str:
        lines = [f"{self.subject}: {len(self.checked)} checks passed, {len(self.skipped)} skipped"]
        for finding in self.findings:
            mark, text = ("ok", finding.rule) if finding.skipped is None else ("--", f"skipped: {finding.skipped}")
            lines.append(f"  {mark} {finding.check:<40} {text}{f' [{finding.note}]' if finding.note else ''}")
        return "\n".join(lines)


def require(holds: bool, message: str) -> None:
    """Raise `ConformanceError` unless the rule holds."""
    if not holds:
        raise ConformanceError(message)


def run_checks(
    subject: str,
    checks: Sequence[Callable[[Case], str | None]],
    case: Case,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Make the checks one after another. A check may return a note for the report.

    only: names to make, all where empty. skip: name → why not. Raises `ConformanceError` at the first rule that is
    broken, and `UsageError` for a name that is no check.
    """
    skip = skip or {}
    unknown = sorted({*only, *skip} - {check.__name__ for check in checks})
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no check; choose from {', '.join(check.__name__ for check in checks)}")
    findings = []
    for check in checks:
        if only and check.__name__ not in only:
            continue
        rule = (check.__doc__ or "").partition("\n")[0]
        skipped, note = skip.get(check.__name__), None
        if skipped is None:
            skipped, note = _make(subject, check, case)
        findings.append(Finding(check.__name__, rule, skipped, note))
    return Report(subject, tuple(findings))


def _make(subject: str, check: Callable[[Case], str | None], case: Case) -> tuple[str | None, str | None]:
    """Why a check was skipped, and its note."""
    try:
        return None, check(case)
    except Inapplicable as why:
        return str(why), None
    except ConformanceError as broken:
        raise ConformanceError(f"{subject} fails {check.__name__}: {broken}") from broken
    except Exception as error:
        error.add_note(f"raised while {subject} was put through {check.__name__}")
        raise
