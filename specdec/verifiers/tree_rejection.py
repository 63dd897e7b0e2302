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
from specdec.types import PADDING, DeferredError, Draft, Verdict
from specdec.verifiers.base import Verifier, worth_asking
from specdec.verifiers.tree import parent_columns, path_of


@dataclass(frozen=True)
class Siblings:
    """The drafts at one node in each of R rows, in the order they are tried, and the one whose turn it is.

    owed: [R, V], what the target still owes at the node, once elder siblings were refused; mass: [R], its sum, where it
    is not kept normalised. target: [R, V], the target's distribution at the node. tokens: [R, C], `PADDING` past a
    row's own number of drafts. coins: [R, C] uniforms. index: [R], whose turn it is. rows, nodes: [R] and [R, C], where
    the drafts lie in `draft`. notes: what a rule keeps from one sibling to the next, by name, [B, ...].
    """

    owed: Tensor
    mass: Tensor
    target: Tensor
    tokens: Tensor
    coins: Tensor
    index: Tensor
    draft: Draft
    rows: Tensor
    nodes: Tensor
    notes: dict[str, Tensor]

    @property
    def token(self) -> Tensor:
        """Whose turn it is: [R, 1]."""
        return self.tokens.gather(1, self.index[:, None]).clamp(min=0)

    @property
    def coin(self) -> Tensor:
        """Its uniform: [R]."""
        return self.coins.gather(1, self.index[:, None])[:, 0]

    def drawn_from(self, child: int | Tensor, which: Tensor) -> Tensor | None:
        """The distribution of one child in some of the R rows, [len(which), V]; None: one-hot."""
        if self.draft.probs is None:
            return None
        return self.draft.probs[self.rows[which], self.nodes[which, child]]


class Choice(NamedTuple):
    """What a node's rule decided about one child in each of R rows.

    stays: [R] bool. owed: [R, V], not normalised, what the target owes once it is refused. mass: see `Siblings`.
    deferred: see `Verdict`.
    """

    stays: Tensor
    owed: Tensor
    mass: Tensor
    deferred: tuple[DeferredError, ...] = ()


class TreeRejectionVerifier(Verifier):
    """Walk from the root to a child that stays, as long as one does; then draw from what the target still owes.

    Lossless if the node's rule is. `num_examined` counts one per depth at which there was a child to judge, as in
    `GreedyTreeVerifier`, with which it agrees at temperature 0.
    """

    accepts_trees = True
    tokenwise = False

    @abstractmethod
    def judge(self, siblings: Siblings) -> Choice:
        """Keep or refuse the draft whose turn it is."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`.

        One pass over the nodes: a parent comes before its children, and elder siblings before younger, so that whoever
        is a child of where the walk has come to is the next to be tried.
        """
        walk = _Walk(draft, target_probs, uniforms.draw(Purpose.ACCEPT, 0, draft.width))
        for node in range(draft.width):
            tried = walk.children_of_end(node)
            rows = worth_asking(tried)
            if len(rows):
                siblings = walk.siblings(node, rows)
                walk.go_on(node, rows, tried[rows], siblings.index, self.judge(siblings))
        return walk.verdict(uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])


class _Walk:
    """How far each row has come. Columns count the root as 0 and node i as i + 1."""

    def __init__(self, draft: Draft, target_probs: Tensor, coins: Tensor) -> None:
        self._draft, self._target, self._coins = draft, target_probs, coins
        inside = (torch.arange(draft.width) < draft.lengths[:, None]).to(target_probs.device)
        self._parents = parent_columns(draft).masked_fill(~inside, PADDING)  # [B, K]
        self._end = torch.zeros(len(target_probs), dtype=torch.long, device=target_probs.device)
        self._num_examined = torch.zeros_like(self._end)
        self._kept = torch.zeros_like(inside)  # [B, K]
        self._owed = target_probs[:, 0].clone()
        self._mass = torch.ones_like(self._owed[:, 0])
        self._notes: dict[str, Tensor] = {}
        self._deferred: tuple[DeferredError, ...] = ()

    def children_of_end(self, node: int) -> Tensor:
        """Rows in which the node comes right below the last one kept: [B] bool."""
        return self._parents[:, node] == self._end

    def siblings(self, node: int, rows: Tensor) -> Siblings:
        """All children of the node's parent. C is K where their number is not known on the host."""
        parents, width = self._parents[rows], self._draft.width
        below = parents == parents[:, node, None]  # [R, K]
        nodes = torch.where(below, torch.arange(width, device=rows.device), width).sort(-1).values
        if nodes.is_cpu:
            nodes = nodes[:, : int(below.sum(-1).amax())]
        real = nodes.clamp(max=width - 1)
        tokens = self._draft.tokens[rows[:, None], real].masked_fill(nodes == width, PADDING)
        index = below[:, :node].sum(-1)
        at, coins = self._target[rows, parents[:, node].clamp(min=0)], self._coins[rows[:, None], real]
        return Siblings(
            self._owed[rows], self._mass[rows], at, tokens, coins, index, self._draft, rows, real, self._notes
        )

    def go_on(self, node: int, rows: Tensor, tried: Tensor, index: Tensor, choice: Choice) -> None:
        """Take a step down, or leave less to owe, in those of the rows that have `tried` the node, [R] bool."""
        stays = tried & choice.stays
        self._num_examined[rows] += tried & (index == 0)
        self._kept[rows, node] = stays
        self._end[rows] = torch.where(stays, node + 1, self._end[rows])
        owed = torch.where(stays[:, None], self._target[rows, node + 1], choice.owed)
        self._owed[rows] = torch.where(tried[:, None], owed, self._owed[rows])
        self._mass[rows] = torch.where(tried, torch.where(stays, 1.0, choice.mass), self._mass[rows])
        self._deferred += choice.deferred

    def verdict(self, uniforms: Tensor) -> Verdict:
        """The path kept, and a token drawn from what the target owes at its end."""
        return Verdict(
            path=path_of(self._kept),
            num_accepted=self._kept.sum(-1),
            num_examined=self._num_examined,
            next_token=sample(self._owed, uniforms),
            deferred=self._deferred,
        )
