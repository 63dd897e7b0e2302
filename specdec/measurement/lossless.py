"""Is a greedy arm's output the plain arm's, token for token, and if not: a numeric tie, or a fault?

Two orders of summation may give logits that differ in the last bits, and where two tokens are that close the argmax
flips. That is neither a bug nor to be hidden: the first divergence is recomputed in float64, and only a gap below the
stated tolerance is called a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from specdec.models.base import LanguageModel
from specdec.types import Request, Trace

TIE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}
"""The largest gap of float64 logits that the arithmetic of a dtype may flip."""

ExactLogits = Callable[[Sequence[int]], Tensor]
"""Token ids → float64 logits [V] of the next token."""


class Outcome(StrEnum):
    """What the comparison of a greedy arm with plain decoding found."""

    EQUAL = "equal"
    TIE = "tie"
    FAULT = "fault"
    DECLARED = "declared"  # the rule declares itself lossy, so nothing was compared


@dataclass(frozen=True)
class Comparison:
    """position: index of the first differing output token. gap: float64 distance there from the largest logit.

    tokens: plain decoding's token and the arm's. logits: theirs, in float64.
    """

    outcome: Outcome
    request_id: str = ""
    position: int | None = None
    gap: float | None = None
    tokens: tuple[int, int] | None = None
    logits: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.position is None:
            return str(self.outcome)
        gap = "output ended early" if self.gap is None else f"float64 logit gap {self.gap:.3g}"
        if self.tokens is not None and self.logits is not None:
            pairs = zip(self.tokens, self.logits, strict=True)
            gap += ", " + " against ".join(f"{logit:.6f} of token {token}" for token, logit in pairs)
        return f"{self.outcome} at output token {self.position} of request {self.request_id!r} ({gap})"


def exact_logits(in_float64: Callable[[], LanguageModel]) -> ExactLogits:
    """Next-token logits in float64, recomputed from nothing: no cache, no batch.

    The float64 model is built at the first call: most comparisons never need it.
    """
    build = cache(in_float64)

    @torch.inference_mode()
    def compute(tokens: Sequence[int]) -> Tensor:
        model = build()
        ids = torch.tensor(tokens, device=model.device)[None]
        positions = torch.arange(len(tokens), device=model.device)[None]
        last = torch.tensor([[len(tokens) - 1]], device=model.device)
        view = model.new_cache(1, len(tokens)).view([0])
        return model.forward(ids, positions, view, logits_at=last).logits[0, 0].double()

    return compute


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first position where the sequences differ, their lengths included; None if equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def compare(request: Request, plain: Trace, arm: Trace, exact: ExactLogits, tolerance: float) -> Comparison:
    """One request decoded plainly and by another arm, both greedily.

    A tie needs both tokens within `tolerance` of the largest float64 logit. An output that merely ends earlier is a
    fault: the same tokens end at the same place.
    """
    at = first_difference(plain.token_ids, arm.token_ids)
    if at is None:
        return Comparison(Outcome.EQUAL, request.id)
    if at >= min(len(plain.token_ids), len(arm.token_ids)):
        return Comparison(Outcome.FAULT, request.id, at)
    logits = exact([*request.prompt_ids, *plain.token_ids[:at]])
    tokens = (plain.token_ids[at], arm.token_ids[at])
    ours, theirs = (float(logits[token]) for token in tokens)
    gap = float(logits.max()) - min(ours, theirs)
    outcome = Outcome.TIE if gap <= tolerance else Outcome.FAULT
    return Comparison(outcome, request.id, at, gap, tokens, (ours, theirs))


def compare_all(
    requests: Sequence[Request], plain: Sequence[Trace], arm: Sequence[Trace], exact: ExactLogits, tolerance: float
) -> Comparison:
    """The worst comparison over an arm's requests: a fault before a tie before equality."""
    return worst_of(compare_each(requests, plain, arm, exact, tolerance))


def compare_each(
    requests: Sequence[Request], plain: Sequence[Trace], arm: Sequence[Trace], exact: ExactLogits, tolerance: float
) -> list[Comparison]:
    """Every request of the arm compared, in the arm's order."""
    by_id = {trace.request_id: trace for trace in plain}
    wanted = {request.id: request for request in requests}
    return [compare(wanted[trace.request_id], by_id[trace.request_id], trace, exact, tolerance) for trace in arm]


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    """The first fault, else the first tie, else equality."""
    severity = [Outcome.EQUAL, Outcome.TIE, Outcome.FAULT]
    return max([Comparison(Outcome.EQUAL), *comparisons], key=lambda comparison: severity.index(comparison.outcome))
