"""Trees from an EAGLE-style head: several guesses per position, verified in one forward of the target.

A static tree has the same shape at every step (EAGLE 2401.15077, section 4.1; SpecInfer 2305.09781); a joint tree
follows the head's own confidence (EAGLE-2 2406.16858, section 4): the nodes with the largest product of probabilities
from the root down. Tokens are chosen, not drawn, so drafts are deterministic whatever the temperature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf, prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.return_types import topk as TopK

from specdec.drafters.base import DraftContext, StopDrafting
from specdec.drafters.chains import Limits, broken_logits
from specdec.drafters.eagle import EagleDrafter
from specdec.errors import UsageError
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, refuse


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
    """All candidates of one depth: `fan` children of each of F nodes, one node after the other.

    above: [B, F], these nodes, counted over the candidates of all depths, -1 the root. tokens: [B, F * fan] target ids.
    scores: [B, F * fan], log of the product of probabilities from the root down; NaN where a distribution is broken.
    """

    above: Tensor
    tokens: Tensor
    scores: Tensor
    fan: int


@dataclass(frozen=True)
class _Frontier:
    """The F nodes that get children next.

    nodes: [B, F], counted as in `_Level.above`. scores: [B, F]. stream: [B, F, d], the head's, after the node.
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
        limits = Limits([min(limit, self._tree.depth) for limit in self._limits(context, max_tokens)])
        if not limits.deepest:
            return Draft.empty(context.batch_size, context.device)
        stream = self._read(context, [len(self._unread[slot]) for slot in context.slots])
        starts = [self._cache.lengths[slot] for slot in context.slots]
        levels = self._grow(context, _Frontier.root(stream), starts, limits, stop)
        self._cache.rollback(context.slots, starts)
        draft = _likeliest(levels, limits.read(), self._tree.num_nodes)
        broken = torch.cat([level.scores for level in levels], dim=1).isnan()
        return replace(draft, deferred=refuse(broken, broken_logits(self._checkpoint.name, context)))

    def _grow(
        self,
        context: DraftContext,
        frontier: _Frontier,
        starts: Sequence[int],
        limits: Limits,
        stop: StopDrafting,
    ) -> list[_Level]:
        """The candidates of every depth. Rows that have ended grow with the others, and are cut afterwards."""
        levels: list[_Level] = []
        view, positions = self._cache.view(context.slots), torch.tensor(starts, device=context.device)[:, None]
        while True:
            depth = len(levels) + 1
            logits = self._head.logits(frontier.stream)  # [B, F, Vd]
            levels.append(self._candidates(frontier, logits, depth))
            if context.watched:
                limits.stop(stop(*self._likeliest_of(context, logits, levels[-1]), depth), depth)
            if depth >= limits.deepest:
                return levels
            chosen, sees = self._chosen(frontier, levels)
            stream = self._head.forward(
                levels[-1].tokens.gather(1, chosen.indices),
                _rows(frontier.stream, chosen.indices // levels[-1].fan),
                positions.expand_as(chosen.indices) + (depth - 1),
                view,
                sees,
                starts,
            )
            first = sum(level.tokens.shape[1] for level in levels[:-1])
            frontier = _Frontier(chosen.indices + first, chosen.values, stream, sees)

    def _candidates(self, frontier: _Frontier, logits: Tensor, depth: int) -> _Level:
        """The likeliest children of every frontier node."""
        fan = min(self._tree.children(depth), logits.shape[-1])
        best = logits.float().log_softmax(-1).topk(fan, dim=-1)  # [B, F, fan]
        return _Level(
            above=frontier.nodes,
            tokens=self._head.vocabulary.to_target(best.indices).flatten(1),
            scores=(frontier.scores[..., None] + best.values).flatten(1),
            fan=fan,
        )

    def _likeliest_of(self, context: DraftContext, logits: Tensor, level: _Level) -> tuple[Tensor, Tensor]:
        """What `stop` is shown: the distribution [B, V] behind a level's likeliest node, and its token [B]."""
        best = level.scores.argmax(-1, keepdim=True)  # [B, 1]
        own = _rows(logits, best // level.fan)[:, 0]
        return context.confidence(self._token_map.expand(own), None), level.tokens.gather(1, best)[:, 0]

    def _chosen(self, frontier: _Frontier, levels: Sequence[_Level]) -> tuple[TopK, Tensor]:
        """Which candidates of the last level get children, [B, F], and what each of them sees, [B, F, N]."""
        level = levels[-1]
        width = min(self._tree.expanded(len(levels)), level.tokens.shape[1])
        best = level.scores.topk(width, dim=-1)
        itself = torch.eye(width, dtype=torch.bool, device=level.scores.device).expand(len(level.scores), -1, -1)
        return best, torch.cat((_rows(frontier.sees, best.indices // level.fan), itself), dim=-1)


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    """[B, F, n] at [B, G] → [B, G, n]."""
    return table.gather(1, rows[..., None].expand(-1, -1, table.shape[-1]))


def _likeliest(levels: Sequence[_Level], limits: Sequence[int], num_nodes: int) -> Draft:
    """The candidates with the largest joint probability as a tree, limits[b] deep at most.

    No node is likelier than its parent, and of equals the sort keeps the one that came first, so whoever is kept has
    its parent kept too.
    """
    tokens, scores = (torch.cat(parts, dim=1) for parts in zip(*((v.tokens, v.scores) for v in levels), strict=True))
    ends = [0, *accumulate(level.tokens.shape[1] for level in levels)]
    counts, none = torch.tensor([ends[limit] for limit in limits]), ends[-1]
    lengths = counts.clamp(max=num_nodes)
    width, ragged = int(lengths.max()), len(set(limits)) > 1 or limits[0] < len(levels)
    if ragged:  # what lies deeper than a row may get is likelier than nothing
        outside = torch.arange(none) >= counts[:, None]
        scores = scores.masked_fill(outside.to(scores.device), -inf)
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    if ragged:
        kept = kept.masked_fill((torch.arange(width) >= lengths[:, None]).to(kept.device), none)
    return _tree(levels, tokens, kept.sort(dim=1).values, lengths)


def _tree(levels: Sequence[_Level], tokens: Tensor, kept: Tensor, lengths: Tensor) -> Draft:
    """kept: [B, K], which of the [B, M] candidates, ascending; M is padding."""
    none, device = tokens.shape[1], kept.device
    above = torch.cat([level.above for level in levels], dim=1)  # [B, nodes that have children]
    parents = above[:, _places(tuple((level.above.shape[1], level.fan) for level in levels), device)]  # [B, M]
    # What a candidate is called in the draft: its place among those kept. One column more, for the root and padding.
    names = torch.full((len(kept), none + 1), PADDING, device=device)
    names.scatter_(1, kept, torch.arange(kept.shape[1], device=device).expand_as(kept))
    names[:, none] = PADDING
    above = F.pad(parents, (0, 1), value=-1).gather(1, kept)
    return Draft(
        F.pad(tokens, (0, 1), value=PADDING).gather(1, kept),
        lengths,
        None,
        names.gather(1, above.masked_fill(above < 0, none)),
    )


@cache
def _places(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """For every candidate of all levels, (nodes, children of each), the place of its parent among those nodes: [M]."""
    fans = [fan for nodes, fan in shapes for _ in range(nodes)]
    return torch.tensor([place for place, fan in enumerate(fans) for _ in range(fan)], device=device)
