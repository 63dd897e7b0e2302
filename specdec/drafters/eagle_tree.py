"""Trees from an EAGLE-style head: several guesses per position, verified in one forward of the target.

A static tree has the same shape at every step (EAGLE 2401.15077, section 4.1; SpecInfer 2305.09781); a joint tree
follows the head's own confidence (EAGLE-2 2406.16858, section 4): the nodes with the largest product of probabilities
from the root down. Tokens are chosen, not drawn, so drafts are deterministic whatever the temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafters.base import DraftContext, StopDrafting
from specdec.drafters.chains import refuse_broken
from specdec.drafters.eagle import EagleDrafter
from specdec.errors import UsageError
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft


class TreeShape(ABC):
    """How a tree grows. depth: of its deepest nodes; num_nodes: kept in the end, without the root."""

    depth: int
    num_nodes: int

    @abstractmethod
    def children(self, depth: int) -> int:
        """Children of every node that is expanded; `depth` is theirs."""

    @abstractmethod
    def expanded(self, depth: int) -> int:
        """How many nodes of this depth get children at most, the likeliest first."""


class StaticTree(TreeShape):
    """branching[i] children for every node of depth i: [4, 2, 1] has 4 + 8 + 8 nodes."""

    def __init__(self, branching: Sequence[int]) -> None:
        if not branching or min(branching) < 1:
            raise UsageError(f"branching={list(branching)} is not possible; give one number above 0 per depth")
        self._branching = tuple(branching)
        self.depth = len(branching)
        self.num_nodes = sum(self.expanded(depth) for depth in range(1, self.depth + 1))

    def children(self, depth: int) -> int:
        """See `TreeShape.children`."""
        return self._branching[depth - 1]

    def expanded(self, depth: int) -> int:
        """All of them."""
        return prod(self._branching[:depth])


class JointTree(TreeShape):
    """The likeliest `top_k` nodes of a depth get `top_k` children each; the likeliest `num_nodes` of all are kept."""

    def __init__(self, top_k: int, depth: int, num_nodes: int) -> None:
        for name, value in (("top_k", top_k), ("depth", depth), ("num_nodes", num_nodes)):
            if value < 1:
                raise UsageError(f"{name}={value} is not possible; a tree needs at least 1")
        self._top_k = top_k
        self.depth = depth
        self.num_nodes = min(num_nodes, top_k + (depth - 1) * top_k**2)

    def children(self, depth: int) -> int:
        """See `TreeShape.children`."""
        return self._top_k

    def expanded(self, depth: int) -> int:
        """See `TreeShape.expanded`."""
        return self._top_k


@dataclass(frozen=True)
class _Level:
    """All candidates of one depth, M of them per row.

    tokens: [B, M] target ids. parents: [B, M], counted over the candidates of all depths, -1 the root. scores: [B, M],
    log of the product of probabilities from the root down; -inf for a row that has ended.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


@dataclass(frozen=True)
class _Frontier:
    """The F nodes that get children next.

    nodes: [B, F], counted as in `_Level.parents`. scores: [B, F]. stream: [B, F, d], the head's, after the node.
    sees: [B, F, N] bool, which of the N nodes expanded so far are its ancestors or itself.
    """

    nodes: Tensor
    scores: Tensor
    stream: Tensor
    sees: Tensor

    @classmethod
    def root(cls, stream: Tensor) -> _Frontier:
        """stream: [B, 1, d]."""
        nodes = torch.full(stream.shape[:2], -1, device=stream.device)
        return cls(nodes, torch.zeros_like(nodes, dtype=torch.float32), stream, nodes[..., None][..., :0].bool())


class EagleTreeDrafter(EagleDrafter):
    """The head of `EagleDrafter`, run once per depth over all nodes of the frontier.

    The controller's number of draft tokens limits the depth; its `stop` is asked about the likeliest node of each.
    """

    proposes_trees = True

    def __init__(self, checkpoint: str, *, tree: TreeShape, check_revision: bool = True) -> None:
        """tree: `StaticTree` or `JointTree`; for the rest see `EagleDrafter`."""
        super().__init__(checkpoint, check_revision=check_revision)
        self._tree = tree

    def max_nodes(self, depth: int) -> int:
        """See `Drafter.max_nodes`."""
        return self._tree.num_nodes

    def reserve(self, num_slots: int, capacity: int) -> None:
        """The head's own cache also holds nodes that are expanded and not kept."""
        tree = self._tree
        super().reserve(num_slots, capacity + sum(tree.expanded(depth) for depth in range(1, tree.depth)))

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Deterministic trees, siblings all different, parents before their children."""
        limits = [min(limit, self._tree.depth) for limit in self._limits(context, max_tokens)]
        if not any(limits):
            return Draft.empty(context.batch_size, context.device)
        stream = self._read(context, [len(self._unread[slot]) for slot in context.slots])
        starts = [self._cache.lengths[slot] for slot in context.slots]
        levels = self._grow(context, _Frontier.root(stream), starts, limits, stop)
        self._cache.rollback(context.slots, starts)
        return _likeliest(levels, self._tree.num_nodes)

    def _grow(
        self,
        context: DraftContext,
        frontier: _Frontier,
        starts: Sequence[int],
        limits: Sequence[int],
        stop: StopDrafting,
    ) -> list[_Level]:
        """The candidates of every depth."""
        levels: list[_Level] = []
        while True:
            depth = len(levels) + 1
            logits = self._head.logits(frontier.stream)  # [B, F, Vd]
            refuse_broken(logits, self._checkpoint.name, context)
            levels.append(self._candidates(frontier, logits, [depth > limit for limit in limits], depth))
            if context.watched:
                stops = stop(*self._likeliest_of(context, logits, levels[-1]), depth).tolist()
                limits = [min(limit, depth) if ends else limit for limit, ends in zip(limits, stops, strict=True)]
            if depth >= max(limits):
                return levels
            frontier = self._expand(context, frontier, levels, starts)

    def _candidates(self, frontier: _Frontier, logits: Tensor, ended: Sequence[bool], depth: int) -> _Level:
        """The likeliest children of every frontier node."""
        scores = logits.float()
        best = scores.topk(min(self._tree.children(depth), logits.shape[-1]), dim=-1)  # [B, F, k]
        log_probs = (best.values - scores.logsumexp(-1, keepdim=True)).clamp(max=0)
        joint = (frontier.scores[..., None] + log_probs).flatten(1)
        return _Level(
            tokens=self._head.vocabulary.to_target(best.indices).flatten(1),
            parents=frontier.nodes.repeat_interleave(best.values.shape[-1], dim=1),
            scores=joint.masked_fill(torch.tensor(ended, device=joint.device)[:, None], -inf),
        )

    def _likeliest_of(self, context: DraftContext, logits: Tensor, level: _Level) -> tuple[Tensor, Tensor]:
        """What `stop` is shown: the distribution [B, V] behind a level's likeliest node, and its token [B]."""
        best = level.scores.argmax(-1, keepdim=True)  # [B, 1]
        above = best // (level.tokens.shape[1] // logits.shape[1])
        own = logits.gather(1, above[..., None].expand(-1, -1, logits.shape[-1]))[:, 0]
        return context.confidence(self._token_map.expand(own), None), level.tokens.gather(1, best)[:, 0]

    def _expand(
        self, context: DraftContext, frontier: _Frontier, levels: Sequence[_Level], starts: Sequence[int]
    ) -> _Frontier:
        """Run the head on the likeliest nodes of the last level."""
        depth, level = len(levels), levels[-1]
        width = min(self._tree.expanded(depth), level.tokens.shape[1])
        best = level.scores.topk(width, dim=-1)  # [B, F]
        above = best.indices // (level.tokens.shape[1] // frontier.nodes.shape[1])  # [B, F], in the old frontier
        itself = torch.eye(width, dtype=torch.bool, device=above.device).expand(len(above), -1, -1)
        sees = torch.cat((_rows(frontier.sees, above), itself), dim=-1)
        positions = torch.tensor(starts, device=above.device)[:, None].expand(-1, width) + depth - 1
        stream = self._head.forward(
            level.tokens.gather(1, best.indices),
            _rows(frontier.stream, above),
            positions,
            self._cache.view(context.slots),
            sees,
            starts,
        )
        first = sum(earlier.tokens.shape[1] for earlier in levels[:-1])
        return _Frontier(best.indices + first, best.values, stream, sees)


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    """[B, F, n] at [B, G] → [B, G, n]."""
    return table.gather(1, rows[..., None].expand(-1, -1, table.shape[-1]))


def _likeliest(levels: Sequence[_Level], num_nodes: int) -> Draft:
    """The candidates with the largest joint probability as a tree.

    No node is likelier than its parent, and of equals the sort keeps the one that came first, so whoever is kept has
    its parent kept too.
    """
    tokens, parents, scores = (
        torch.cat(parts, dim=1)
        for parts in zip(*((level.tokens, level.parents, level.scores) for level in levels), strict=True)
    )
    order = scores.sort(dim=1, descending=True, stable=True)
    alive = order.values[:, :num_nodes] > -inf
    lengths, none = alive.sum(1), scores.shape[1]
    width = int(lengths.max())
    kept = order.indices[:, :width].masked_fill(~alive[:, :width], none).sort(dim=1).values  # [B, K], `none` padding
    # What a candidate is called in the draft: its place among those kept. One column more, for the root and padding.
    names = torch.full((len(kept), none + 1), PADDING, device=kept.device)
    names.scatter_(1, kept, torch.arange(width, device=kept.device).expand(len(kept), -1))
    names[:, none] = PADDING
    above = F.pad(parents, (0, 1), value=-1).gather(1, kept)
    return Draft(
        F.pad(tokens, (0, 1), value=PADDING).gather(1, kept),
        lengths.cpu(),
        None,
        names.gather(1, above.masked_fill(above < 0, none)),
    )
