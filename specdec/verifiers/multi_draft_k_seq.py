"""Several independent drafts at a node, all judged by one threshold: SpecTr's k-sequential selection."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.types import DeferredError, refuse
from specdec.verifiers.base import SiblingDraws, worth_asking
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.tree_rejection import Choice, Siblings

_MOST_ITERATIONS = 200
_ITERATIONS_UNSEEN = 40  # where looking whether they have converged would be to wait for the device
_DIFFERENT = UsageError(
    "KSeqVerifier was given siblings drawn from different distributions; draft with replacement, or verify with "
    "WithReplacementVerifier"
)


class KSeqVerifier(WithReplacementVerifier):
    """Accept a child with probability min(1, target / (rho · draft)), rho the same for all children of a node.

    Lossless. K-SEQ, Sun et al. 2310.15141, algorithm 3: with beta(rho) = Σ min(draft, target / rho) and K children,
    rho solves 1 - (1 - beta)^K = rho · beta. The children of a node must be drawn independently from one distribution;
    drafts without probabilities are deterministic instead, and judged as `TopKVerifier` does.
    """

    greedy_when_certain = True

    siblings = SiblingDraws.INDEPENDENT

    def judge(self, siblings: Siblings) -> Choice:
        """See `TreeRejectionVerifier.judge`. What is owed shrinks with the last sibling, by the share of all."""
        everyone = torch.arange(len(siblings.rows), device=siblings.rows.device)
        draft_probs = siblings.drawn_from(0, everyone)
        if draft_probs is None:
            return super().judge(siblings)
        target, count = siblings.target, (siblings.tokens >= 0).sum(-1)
        rho, beta = _threshold(siblings, draft_probs, count)
        drafted = draft_probs.gather(1, siblings.token)[:, 0]
        stays = siblings.coin * drafted * rho < target.gather(1, siblings.token)[:, 0]
        common = torch.minimum(draft_probs, target / rho[:, None])
        factor = torch.where(beta > 0, _any_of(beta, count) / beta, 0)
        owed = (target - common * factor[:, None]).clamp_(min=0)
        spent = (siblings.index == count - 1)[:, None] & (owed.sum(-1, keepdim=True) > 0)
        return Choice(stays, torch.where(spent, owed, target), siblings.mass, self.misfits(siblings))

    def misfits(self, siblings: Siblings) -> tuple[DeferredError, ...]:
        """See `WithReplacementVerifier.misfits`. Compared at the drafted tokens alone: there, drawing without
        replacement or from different models shows."""
        everyone = torch.arange(len(siblings.rows), device=siblings.rows.device)
        own, eldest = siblings.drawn_from(siblings.index, everyone), siblings.drawn_from(0, everyone)
        if own is None or eldest is None:
            return ()
        tokens, real = siblings.tokens.clamp(min=0), siblings.tokens >= 0
        return refuse((own.gather(1, tokens) != eldest.gather(1, tokens)) & real, _DIFFERENT)


def _threshold(siblings: Siblings, draft_probs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`k_seq_threshold` of each node, [R], [R]: found with its first child and kept for the others."""
    notes, rows = siblings.notes, siblings.rows
    first = siblings.index == 0
    which = worth_asking(first)
    for name in ("rho", "beta"):
        notes.setdefault(name, siblings.target.new_ones(len(siblings.draft.tokens)))
    if len(which):
        found = k_seq_threshold(siblings.target[which], draft_probs[which], count[which])
        for name, values in zip(("rho", "beta"), found, strict=True):
            notes[name][rows[which]] = torch.where(first[which], values, notes[name][rows[which]])
    return notes["rho"][rows], notes["beta"][rows]


def k_seq_threshold(target: Tensor, draft_probs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """rho and beta(rho) of each row: [R, V], [R, V], [R] → [R], [R].

    rho falls from K to the solution by repeating rho ← (1 - (1 - beta)^K) / beta. It never falls below, and every rho
    on the way is lossless, so that how soon one stops is a matter of acceptance alone.
    """
    rho = count.to(target)
    tolerance = 8 * torch.finfo(target.dtype).eps
    for _ in range(_MOST_ITERATIONS if rho.is_cpu else _ITERATIONS_UNSEEN):
        beta = torch.minimum(draft_probs, target / rho[:, None]).sum(-1).clamp_(max=1)
        lower = torch.where(beta > 0, _any_of(beta, count) / beta, rho).clamp(min=1)
        if rho.is_cpu and (rho - lower <= tolerance * rho).all():
            break
        rho = torch.minimum(rho, lower)
    return rho, beta


def _any_of(beta: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - beta)^count, exact where beta is small."""
    return -torch.expm1(count * torch.log1p(-beta))
