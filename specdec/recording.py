"""What one step leaves behind: measured on the device in a few tensors, read back once, turned into records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import ModelError
from specdec.judging import Judged
from specdec.sampling import entropy_bits, expected_acceptance, logits_entropy_bits, parent_probs, token_probs
from specdec.types import Draft, SamplingParams, StepRecord, TokenKind, TokenRecord, Verdict


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
    """Host copy of what was measured at one position."""

    token_id: int
    target_prob: float
    draft_prob: float | None
    model_entropy: float
    sampling_entropy: float
    expected_acceptance: float | None


class Recording:
    """One batch's step on the host.

    paths: accepted node indices, per row. examined: the nodes on the way, the rejected one last, per row (in a tree a
    rejection is a depth none of whose nodes was accepted; its first child stands for it). granted: the token drawn
    from the target, per row. drafted: nodes proposed, per row.
    """

    def __init__(
        self,
        where: Sequence[StepId],
        paths: list[list[int]],
        drafted: list[int],
        examined: list[list[_Node]],
        granted: list[_Node],
    ) -> None:
        self.paths = paths
        self._where = where
        self._drafted = drafted
        self._examined = examined
        self._granted = granted

    def tokens(self, row: int) -> list[int]:
        """What the step yields for a row before any stop: the accepted tokens and one more."""
        accepted = self._examined[row][: len(self.paths[row])]
        return [*(node.token_id for node in accepted), self._granted[row].token_id]

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
        """Counts before any stop; `specdec.sequence` cuts them."""
        accepted, where = len(self.paths[row]), self._where[row]
        return StepRecord(
            request_id=where.request_id,
            step=where.step,
            batch_size=len(self.paths),
            context_length=where.context_length,
            num_drafted=self._drafted[row],
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
        token_id=node.token_id,
        kind=kind,
        emitted=kind is not TokenKind.REJECTED,
        target_prob=node.target_prob,
        draft_prob=node.draft_prob,
        model_entropy_bits=node.model_entropy,
        sampling_entropy_bits=node.sampling_entropy,
        expected_acceptance=node.expected_acceptance,
    )


@dataclass(frozen=True)
class Verified:
    """A step on the device, from the target's logits [B, K + 1, V] to the verdict on what was judged."""

    logits: Tensor
    sampling: Sequence[SamplingParams]
    judged: Judged
    verdict: Verdict


def record_step(verified: Verified, where: Sequence[StepId], model: str) -> Recording:
    """Measure a verified step and read it back.

    Raises `ModelError` where the target's logits are NaN or +inf, before anything of the step is emitted.
    """
    draft, verdict = verified.judged.draft, verified.verdict
    num_accepted, num_examined, drafted = (
        counts.tolist() for counts in (verdict.num_accepted, verdict.num_examined, draft.lengths)
    )
    paths = [row[:count] for row, count in zip(verdict.path.tolist(), num_accepted, strict=True)]
    examined = [
        [*path, _first_child(draft, row, path)] if num_examined[row] > len(path) else path
        for row, path in enumerate(paths)
    ]
    # Nobody asks for what lies behind the last node examined.
    width = 1 + max((node for nodes in examined for node in nodes), default=-1)
    measured = [[_node(values) for values in row] for row in _measure(verified, width).tolist()]
    nodes = [[measured[row][node] for node in chosen] for row, chosen in enumerate(examined)]
    granted = [row[width] for row in measured]
    for row, place in enumerate(where):
        _refuse_broken([*nodes[row], granted[row]], place, model)
    return Recording(where, paths, drafted, nodes, granted)


def _first_child(draft: Draft, row: int, path: Sequence[int]) -> int:
    """The first node below the last one of the path, or below the root."""
    last = path[-1] if path else -1
    return last + 1 if draft.parents is None else draft.parents[row].tolist().index(last)


def _measure(verified: Verified, width: int) -> Tensor:
    """[B, width + 1, 6] float64: token id, target and draft probability, model and sampling entropy, expected
    acceptance.

    Entry i < width belongs to draft node i, the last entry to the token drawn from the target.
    """
    judged, verdict = verified.judged, verified.verdict
    draft, at = _first_nodes(judged.draft, width), _positions(judged.draft, verdict, width)  # at: [B, width + 1]
    probs, next_token = judged.target_probs[:, : width + 1], verdict.next_token[:, None]
    model_entropy = logits_entropy_bits(verified.logits[:, : width + 1])
    out = probs.new_full((*at.shape, 6), torch.nan, dtype=torch.float64)
    out[:, width, :1] = judged.ids(next_token)
    out[:, width, 1] = probs[torch.arange(len(probs), device=probs.device), at[:, width], verdict.next_token]
    out[:, :, 3] = model_entropy.gather(1, at)
    out[:, :, 4] = _sampling_entropy(verified, width, model_entropy).gather(1, at)
    if width > 0:
        target = token_probs(parent_probs(draft, probs), draft.tokens)
        out[:, :width, 0] = judged.ids(draft.tokens.clamp(min=0))
        out[:, :width, 1] = target
        out[:, :width, 2] = 1.0 if draft.probs is None else token_probs(draft.probs, draft.tokens)
        out[:, :width, 5] = target if draft.probs is None else expected_acceptance(draft, probs)
    return out


def _first_nodes(draft: Draft, width: int) -> Draft:
    """The draft's first `width` nodes; parents come before children, so that is a draft too."""
    probs = None if draft.probs is None else draft.probs[:, :width]
    parents = None if draft.parents is None else draft.parents[:, :width]
    return Draft(draft.tokens[:, :width], draft.lengths, probs, parents)


def _positions(draft: Draft, verdict: Verdict, width: int) -> Tensor:
    """[B, width + 1], the position of `logits` that each draft node, and last the drawn token, was judged at."""
    if draft.parents is None:
        at = torch.arange(width + 1, device=draft.tokens.device).repeat(len(draft.tokens), 1)
        at[:, width] = verdict.num_accepted
        return at
    path = F.pad(verdict.path, (1, 0), value=-1)  # [B, D + 1], from the root
    last = path.gather(1, verdict.num_accepted[:, None])
    return torch.cat([draft.parents[:, :width].clamp(min=-1), last], dim=1) + 1


def _sampling_entropy(verified: Verified, width: int, model_entropy: Tensor) -> Tensor:
    """[B, width + 1]. Two common cases need no pass over the vocabulary."""
    if all(sampling.greedy for sampling in verified.sampling):
        return torch.zeros_like(model_entropy)
    if all(sampling.untouched for sampling in verified.sampling):
        return model_entropy
    return entropy_bits(verified.judged.target_probs[:, : width + 1])


def _node(values: list[float]) -> _Node:
    token_id, target_prob, draft_prob, model_entropy, sampling_entropy, acceptance = values
    return _Node(
        token_id=int(token_id),
        target_prob=target_prob,
        draft_prob=None if math.isnan(draft_prob) else draft_prob,
        model_entropy=model_entropy,
        sampling_entropy=sampling_entropy,
        expected_acceptance=None if math.isnan(acceptance) else acceptance,
    )


def _refuse_broken(nodes: list[_Node], where: StepId, model: str) -> None:
    if any(math.isnan(node.model_entropy) or math.isnan(node.target_prob) for node in nodes):
        raise ModelError(
            f"{model} gave NaN or infinite logits at step {where.step} of request {where.request_id!r}; "
            f"try dtype=float32, or check the checkpoint"
        )
