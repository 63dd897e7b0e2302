"""What an audit says: one answer with its evidence per question, and the answer to all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Answer(StrEnum):
    """To the question whether something is lossless."""

    LOSSLESS = "lossless"
    TIE = "numeric tie"  # other tokens, where the logits are closer than the arithmetic can tell
    NOT_ASKED = "not asked"
    LOSSY = "declared lossy"
    FAULT = "fault"


EXIT_STATUS = {Answer.LOSSLESS: 0, Answer.TIE: 0, Answer.NOT_ASKED: 0, Answer.FAULT: 1, Answer.LOSSY: 3}
"""2 is left to what cannot be audited at all."""

_EVIDENCE_WIDTH = 80
_SEVERITY = [Answer.NOT_ASKED, Answer.LOSSLESS, Answer.TIE, Answer.LOSSY, Answer.FAULT]


@dataclass(frozen=True)
class Finding:
    """One question. evidence: a sentence. values: what it rests on, for JSON."""

    question: str
    answer: Answer
    evidence: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Audit:
    """setup: part → what was audited."""

    setup: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def answer(self) -> Answer:
        """The worst of all answers."""
        return max((finding.answer for finding in self.findings), key=_SEVERITY.index, default=Answer.NOT_ASKED)

    @property
    def exit_status(self) -> int:
        """0 lossless, 1 fault, 3 declared lossy."""
        return EXIT_STATUS[self.answer]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"answer": self.answer, "setup": dict(self.setup), "findings": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        setup = ", ".join(f"{part} {what}" for part, what in self.setup.items())
        lines = [f"Is this setup lossless?  {setup}", ""]
        width = max(len(finding.question) for finding in self.findings)
        for finding in self.findings:
            first, *rest = textwrap.wrap(finding.evidence, _EVIDENCE_WIDTH) or [""]
            lines.append(f"{finding.question:<{width}}  {finding.answer:<14}  {first}")
            lines += [" " * (width + 18) + line for line in rest]
        return "\n".join([*lines, "", f"answer: {self.answer}"])
