"""Several independent drafts at a node, all judged by one threshold: SpecTr's k-sequential selection."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.verifiers.base import SiblingDraws
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.tree_rejection import Choice, Siblings

_MOST_ITERATIONS = 200


class KSeqVerifier(WithReplacementVerifier):
    """Accept a child with probability min(1, target / (rho · draft)), rho the same for all children of a node.

    Lossless. K-SEQ, Sun et al. 2310.15141, algorithm 3: with beta(rho) = Σ min(draft, target / rho) and K children,
    rho solves 1 - (1 - beta)^K = rho · beta. The children of a node must be drawn independently from one distribution;
    drafts without probabilities are deterministic instead, and judged as `TopKVerifier` does.
    """

    greedy_when_certain = True

    siblings = SiblingDraws.INDEPENDENT

    def choose(self, siblings: Siblings) -> Choice:
        """See `TreeRejectionVerifier.choose`. Raises `UsageError` where children report different distributions."""
        everyone = torch.arange(len(siblings.rows), device=siblings.rows.device)
        draft_probs = siblings.drawn_from(0, everyone)
        if draft_probs is None:
            return super().choose(siblings)
        _refuse_different(siblings, draft_probs)
        target, tokens = siblings.target, siblings.tokens.clamp(min=0)
        count = (siblings.tokens >= 0).sum(-1)
        rho, beta = k_seq_threshold(target, draft_probs, count)
        stays = siblings.coins * draft_probs.gather(1, tokens) * rho[:, None] < target.gather(1, tokens)
        stays &= siblings.tokens >= 0
        child = torch.where(stays.any(-1), stays.long().argmax(-1), -1)
        common = torch.minimum(draft_probs, target / rho[:, None])
        factor = torch.where(beta > 0, _any_of(beta, count) / beta, 0)
        owed = (target - common * factor[:, None]).clamp_(min=0)
        return Choice(child, torch.where(owed.sum(-1, keepdim=True) > 0, owed, target))


def k_seq_threshold(target: Tensor, draft_probs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """rho and beta(rho) of each row: [R, V], [R, V], [R] → [R], [R].

    rho falls from K to the solution by repeating rho ← (1 - (1 - beta)^K) / beta. It never falls below, and every rho
    on the way is lossless, so that how soon one stops is a matter of acceptance alone.
    """
    rho = count.to(target)
    tolerance = 8 * torch.finfo(target.dtype).eps
    for _ in range(_MOST_ITERATIONS):
        beta = torch.minimum(draft_probs, target / rho[:, None]).sum(-1).clamp_(max=1)
        lower = torch.where(beta > 0, _any_of(beta, count) / beta, rho).clamp(min=1)
        if bool((rho - lower <= tolerance * rho).all()):
            break
        rho = torch.minimum(rho, lower)
    return rho, beta


def _any_of(beta: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - beta)^count, exact where beta is small."""
    return -torch.expm1(count * torch.log1p(-beta))


def _refuse_different(siblings: Siblings, draft_probs: Tensor) -> None:
    """Compare at the drafted tokens alone: there, drawing without replacement or from different models shows."""
    everyone = torch.arange(len(siblings.rows), device=siblings.rows.device)
    tokens, real = siblings.tokens.clamp(min=0), siblings.tokens >= 0
    eldest = draft_probs.gather(1, tokens)
    for index in range(1, tokens.shape[1]):
        other = siblings.drawn_from(index, everyone)
        assert other is not None, "drafts have probabilities or they have none"
        same = (other.gather(1, tokens) == eldest) | ~real | ~real[:, index, None]
        if not bool(same.all()):
            raise UsageError(
                "KSeqVerifier was given siblings drawn from different distributions; draft with replacement, or verify "
                "with WithReplacementVerifier"
            )
