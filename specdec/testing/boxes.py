"""Integration of a rule that is a step function of its uniforms: the boxes on which it is constant, and their volumes.

Uniforms are multiples of 2^-53. On that lattice an edge is found by bisection to the last digit, so nothing need be
known about a rule's thresholds, and volumes are right to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 2**53  # uniforms are multiples of 1 / STEPS
_PROBES = 16
_SECTIONS = 8  # a search in eighths calls the rule a third as often as one in halves


class Leaves(NamedTuple):
    """Boxes on which the verdict is constant: which draft, one verdict as a row of integers, the volume."""

    case: Tensor  # [L]
    outcome: Tensor  # [L, M]
    volume: Tensor  # [L]


Outcome = Callable[[Tensor, Tensor], Tensor]
"""(draft [N], uniforms as multiples of 2^-53 [N, C]) → verdict [N, M]."""


def integrate(outcome: Outcome, num_cases: int, num_uniforms: int) -> Leaves:
    """Split every draft's unit cube until the verdict agrees wherever a box is probed.

    Probed are the two extreme corners, which suffices for rules that compare each uniform with thresholds in a fixed
    sense, and points in between for those that do not.
    """
    generator = torch.Generator().manual_seed(0)
    case = torch.arange(num_cases)
    low = torch.zeros(num_cases, num_uniforms, dtype=torch.long)
    high = torch.full_like(low, STEPS)
    leaves = []
    while True:
        between = torch.rand(len(case), _PROBES, num_uniforms, generator=generator, dtype=torch.float64)
        inside = low[:, None] + (between * (high - low)[:, None]).long()
        probes = torch.cat([low[:, None], high[:, None] - 1, inside], dim=1)  # [N, P, C]
        found = _at(outcome, case, probes)
        differs = (found != found[:, :1]).any(-1)  # [N, P]
        split = differs.any(-1)
        volume = ((high - low).double() / STEPS).prod(-1)
        leaves.append(Leaves(case[~split], found[~split, 0], volume[~split]))
        if not bool(split.any()):
            break
        case, low, high, ends = case[split], low[split], high[split], probes[split, differs.long().argmax(1)[split]]
        axis, edge = _edge(outcome, case, low, ends)
        case = case.repeat(2)
        below, above = high.scatter(1, axis, edge), low.scatter(1, axis, edge)
        low, high = torch.cat([low, above]), torch.cat([below, high])
    return Leaves(*(torch.cat(column) for column in zip(*leaves, strict=True)))


def _at(outcome: Outcome, case: Tensor, points: Tensor) -> Tensor:
    """Verdicts at several points per box: [N], [N, P, C] → [N, P, M]."""
    boxes, count, _ = points.shape
    return outcome(case.repeat_interleave(count), points.flatten(0, 1)).view(boxes, count, -1)


def _edge(outcome: Outcome, case: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Where between two points with different verdicts one uniform alone changes it: (which [R, 1], from where on).

    start [R, C] lies below end [R, C] in every coordinate. One coordinate after the other moves from start to end; the
    first that matters is bisected.
    """
    count = start.shape[1]
    moved = torch.arange(count) < torch.arange(count + 1)[:, None]  # [C + 1, C]
    walk = torch.where(moved, end[:, None], start[:, None])
    found = _at(outcome, case, walk)
    axis = (found[:, 1:] != found[:, :-1]).any(-1).long().argmax(1, keepdim=True)  # [R, 1]
    rows = torch.arange(len(case))
    here, before = walk[rows, axis[:, 0]], found[rows, axis[:, 0]]
    low, high = start.gather(1, axis), end.gather(1, axis)
    while bool((high - low > 1).any()):
        points = low + (high - low) * torch.arange(1, _SECTIONS) // _SECTIONS  # [R, _SECTIONS - 1]
        tried = torch.where(torch.arange(count) == axis[:, :, None], points[:, :, None], here[:, None])
        same = (_at(outcome, case, tried) == before[:, None]).all(-1)
        section = same.long().cumprod(-1).sum(-1, keepdim=True)
        bounds = torch.cat([low, points, high], dim=1)
        low, high = bounds.gather(1, section), bounds.gather(1, section + 1)
    return axis, high
