"""Rejection down a tree: at every node a rule for several drafts keeps one of the children, or none.

The walk is SpecInfer's (Miao et al. 2305.09781, algorithm 2, VerifyStochastic) and leaves open how a node is judged;
that is what the classes in `multi_draft*.py` add.

Uniforms: `ACCEPT`, node i decides draft node i; `TARGET`, node 0 draws the token that ends the step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.tree import parent_columns


@dataclass(frozen=True)
class Siblings:
    """The drafts at one node in each of R rows, in the order they are tried.

    target: [R, V], the target's distribution at the node. tokens: [R, C], `PADDING` past a row's own number of drafts.
    coins: [R, C] uniforms. rows, nodes: [R] and [R, C], where the drafts lie in `draft`.
    """

    target: Tensor
    tokens: Tensor
    coins: Tensor
    draft: Draft
    rows: Tensor
    nodes: Tensor

    def drawn_from(self, child: int, which: Tensor) -> Tensor | None:
        """The distribution of one child in some of the R rows, [len(which), V]; None: one-hot."""
        if self.draft.probs is None:
            return None
        return self.draft.probs[self.rows[which], self.nodes[which, child]]


class Choice(NamedTuple):
    """What a node's rule decided in each of R rows.

    child: [R] int64, which of the siblings stays, -1 for none. owed: [R, V], not normalised, what the target still owes
    where none does.
    """

    child: Tensor
    owed: Tensor


class TreeRejectionVerifier(Verifier):
    """Walk from the root to a child that stays, as long as one does; then draw from what the target still owes.

    Lossless if the node's rule is. `num_examined` counts one per depth at which there was a child to judge, as in
    `GreedyTreeVerifier`, with which it agrees at temperature 0.
    """

    accepts_trees = True
    tokenwise = False

    @abstractmethod
    def choose(self, siblings: Siblings) -> Choice:
        """Keep one of the drafts at a node, or none."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`."""
        path, num_examined, owed = self._walk(draft, target_probs, uniforms.draw(Purpose.ACCEPT, 0, draft.width))
        return Verdict(
            path=path,
            num_accepted=(path != PADDING).sum(-1),
            num_examined=num_examined,
            next_token=sample(owed, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]),
        )

    def _walk(self, draft: Draft, target_probs: Tensor, coins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One depth after the other, rows that have ended left behind: path [B, K], examined [B], owed [B, V]."""
        batch, device = len(target_probs), target_probs.device
        inside = (torch.arange(draft.width) < draft.lengths[:, None]).to(device)
        parents = parent_columns(draft).masked_fill(~inside, PADDING)
        at = torch.zeros(batch, dtype=torch.long, device=device)  # column of target_probs: 0 is the root
        num_examined, path = torch.zeros_like(at), torch.full_like(parents, PADDING)
        owed = torch.empty_like(target_probs[:, 0])
        rows = torch.arange(batch, device=device)
        while True:
            owed[rows] = target_probs[rows, at[rows]]
            nodes = _children(parents[rows], at[rows])  # [R, C], K past a row's own
            has_child = (nodes < draft.width).any(-1)
            rows, nodes = rows[has_child], nodes[has_child]
            if len(rows) == 0:
                return path, num_examined, owed
            num_examined[rows] += 1
            chosen = self.choose(_siblings(draft, owed[rows], coins, rows, nodes))
            stays = chosen.child >= 0
            owed[rows[~stays]] = chosen.owed[~stays]
            kept = nodes.gather(1, chosen.child.clamp(min=0)[:, None])[stays, 0]
            rows = rows[stays]
            at[rows] = kept + 1
            path[rows, num_examined[rows] - 1] = kept


def _children(parents: Tensor, at: Tensor) -> Tensor:
    """Nodes below column `at` [R] of each row in ascending order: [R, K] → [R, C], K past a row's own number."""
    width = parents.shape[1]
    below = parents == at[:, None]
    nodes = torch.where(below, torch.arange(width, device=parents.device), width).sort(-1).values
    return nodes[:, : int(below.sum(-1).amax())] if below.numel() else nodes


def _siblings(draft: Draft, target: Tensor, coins: Tensor, rows: Tensor, nodes: Tensor) -> Siblings:
    real = nodes.clamp(max=draft.width - 1)
    tokens = draft.tokens[rows[:, None], real].masked_fill(nodes == draft.width, PADDING)
    return Siblings(target, tokens, coins[rows[:, None], real], draft, rows, real)
