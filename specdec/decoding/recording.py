"""What one step leaves behind: read back once, turned into records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.decoding.judging import Judged, Measured, Ruling
from specdec.errors import ModelError
from specdec.sampling.distributions import in_bits
from specdec.types import StepRecord, TokenKind, TokenRecord, Verdict


@dataclass
class Lap:
    """Seconds of one step by what they were spent on."""

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    rollback: float = 0.0
    other: float = 0.0


@dataclass(frozen=True)
class StepId:
    """Where a record belongs: which request, which of its steps, and how long it was before."""

    request_id: str
    step: int
    context_length: int


@dataclass(frozen=True)
class _Node:
    """What was measured at one position."""

    measured: Measured
    model_entropy: float
    sampling_entropy: float


class Recording:
    """One batch's step on the host.

    paths: accepted node indices, per row. examined: the nodes on the way, the rejected one last, per row (in a tree a
    rejection is a depth none of whose nodes was accepted; its first child stands for it). granted: the token drawn
    from the target, per row.
    """

    def __init__(
        self, where: Sequence[StepId], ruling: Ruling, examined: list[list[_Node]], granted: list[_Node]
    ) -> None:
        self._where = where
        self._ruling = ruling
        self._examined = examined
        self._granted = granted

    @property
    def paths(self) -> Sequence[Sequence[int]]:
        """Accepted nodes from the root down, per row."""
        return self._ruling.paths

    def verdict(self) -> Verdict:
        """What was decided, for drafters that follow it; on the host."""
        return self._ruling.verdict()

    def tokens(self, row: int) -> list[int]:
        """What the step yields for a row before any stop: the accepted tokens and one more."""
        accepted = self._examined[row][: len(self.paths[row])]
        return [*(node.measured.token_id for node in accepted), self._granted[row].measured.token_id]

    def token_records(self, row: int) -> list[TokenRecord]:
        """Examined nodes in order, then the token drawn from the target."""
        accepted, examined, where = len(self.paths[row]), self._examined[row], self._where[row]
        kinds = [TokenKind.ACCEPTED] * accepted + [TokenKind.REJECTED] * (len(examined) - accepted)
        records = [
            _token_record(where, position, kind, node)
            for position, (kind, node) in enumerate(zip(kinds, examined, strict=True), start=1)
        ]
        last = TokenKind.RECOVERED if len(examined) > accepted else TokenKind.BONUS
        kind, position = (last, accepted + 1) if where.step > 0 else (TokenKind.PREFILL, 0)
        return [*records, _token_record(where, position, kind, self._granted[row])]

    def step_record(self, row: int, lap: Lap, end_seconds: float) -> StepRecord:
        """Counts before any stop; `specdec.decoding.sequence` cuts them."""
        accepted, where = len(self.paths[row]), self._where[row]
        return StepRecord(
            request_id=where.request_id,
            step=where.step,
            batch_size=len(self.paths),
            context_length=where.context_length,
            num_drafted=len(self._ruling.tokens[row]),
            num_examined=len(self._examined[row]),
            num_accepted=accepted,
            num_emitted=accepted + 1,
            cut=False,
            draft_seconds=lap.draft,
            forward_seconds=lap.forward,
            verify_seconds=lap.verify,
            rollback_seconds=lap.rollback,
            other_seconds=lap.other,
            end_seconds=end_seconds,
        )


def _token_record(where: StepId, position: int, kind: TokenKind, node: _Node) -> TokenRecord:
    return TokenRecord(
        request_id=where.request_id,
        step=where.step,
        draft_position=position,
        token_id=node.measured.token_id,
        kind=kind,
        emitted=kind is not TokenKind.REJECTED,
        target_prob=node.measured.target_prob,
        draft_prob=node.measured.draft_prob,
        model_entropy_bits=node.model_entropy,
        sampling_entropy_bits=node.sampling_entropy,
        expected_acceptance=node.measured.expected_acceptance,
    )


def record_step(judged: Judged, where: Sequence[StepId], model: str) -> Recording:
    """Measure a judged step and read it back.

    Raises `ModelError` where the target's logits are NaN or +inf, before anything of the step is emitted.
    """
    ruling, found = judged.read()
    measured, granted = judged.measured(ruling, found)
    model_bits = in_bits(found["model_nats"])
    sampling_bits = judged.sampling_bits(found, model_bits)

    def node(row: int, found: Measured, parent: int) -> _Node:
        return _Node(found, model_bits[row][parent + 1], sampling_bits[row][parent + 1])

    examined = [
        [node(row, measured[row][index], ruling.parents[row][index]) for index in nodes]
        for row, nodes in enumerate(ruling.examined)
    ]
    drawn = [node(row, found, ruling.ends[row]) for row, found in enumerate(granted)]
    for row, place in enumerate(where):
        _refuse_broken([*examined[row], drawn[row]], place, model)
    return Recording(where, ruling, examined, drawn)


def _refuse_broken(nodes: list[_Node], where: StepId, model: str) -> None:
    if any(math.isnan(node.model_entropy) or math.isnan(node.measured.target_prob) for node in nodes):
        raise ModelError(
            f"{model} gave NaN or infinite logits at step {where.step} of request {where.request_id!r}; "
            f"try dtype=float32, or check the checkpoint"
        )
