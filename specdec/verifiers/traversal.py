"""Traversal verification: a tree is judged from its leaves up, so that a whole branch is kept or refused at once.

Weng et al. 2505.12398, "Traversal Verification for Speculative Tree Decoding". Every node has a weight p, 1 at the
root. On the way down it is p(child) = min(p(node) · P(child) / Q(child), 1), as in block verification. A leaf is kept,
and with it the whole path to it, with probability p. Where it is refused it is cut off, and its parent owes less:

    R = Σ max(p·P - Q, 0);   P ← max(p·P - Q, 0) / R;   p ← R / (R + 1 - p)        (0 / 0 → 1)

with Q what the refused child was drawn from. Its next child is tried with these, or it is a leaf itself. Where even
the root is left alone, the step's one token is drawn from what the root owes. On a chain this is block verification.

Uniforms: `ACCEPT`, node i decides draft node i; `TARGET`, node 0 draws the token that ends the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.tree import parent_columns

_Parents = list[int]
"""Of each node of one tree, -1 the root."""


class TraversalVerifier(Verifier):
    """Keep the first path that its own coin keeps, leaves before their parents. Lossless; declares no alpha.

    Children may be drawn in any way, as long as each reports what it was drawn from once its elder siblings were known.
    """

    accepts_trees = True
    tokenwise = False
    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`."""
        lengths = draft.lengths.tolist()
        columns = parent_columns(draft).tolist()
        trees = [[column - 1 for column in row[:length]] for row, length in zip(columns, lengths, strict=True)]
        state = _State(draft, target_probs, uniforms.draw(Purpose.ACCEPT, 0, draft.width))
        ends = _walk(trees, state)
        paths = [_path(tree, end) for tree, end in zip(trees, ends, strict=True)]
        refused = [end in tree for tree, end in zip(trees, ends, strict=True)]
        device = target_probs.device
        path = [[*nodes, *[PADDING] * (draft.width - len(nodes))] for nodes in paths]
        num_accepted = torch.tensor([len(nodes) for nodes in paths], device=device)
        owed = state.owed[torch.arange(len(ends), device=device), torch.tensor(ends, device=device) + 1]
        return Verdict(
            path=torch.tensor(path, dtype=torch.long, device=device).reshape(len(ends), draft.width),
            num_accepted=num_accepted,
            num_examined=num_accepted + torch.tensor(refused, device=device),
            next_token=sample(owed, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]),
        )


class _State:
    """Weight and remaining target distribution of every node, while the batch is walked."""

    def __init__(self, draft: Draft, target_probs: Tensor, coins: Tensor) -> None:
        self.owed = target_probs.clone()  # [B, K + 1, V], normalised; column 0 is the root
        self._draft = draft
        self._coins = coins
        self._weights = torch.ones_like(target_probs[:, :, 0])  # [B, K + 1]

    def enter(self, rows: Tensor, nodes: Tensor, above: Tensor) -> None:
        """Give one node in each of some rows its weight; `above` are their parents' columns."""
        tokens, draft = self._draft.tokens[rows, nodes], self._draft.probs
        ratio = self._weights[rows, above] * self.owed[rows, above, tokens]
        if draft is not None:
            ratio = ratio / draft[rows, nodes, tokens]
        self._weights[rows, nodes + 1] = ratio.clamp(max=1)

    def leave(self, rows: Tensor, nodes: Tensor, above: Tensor) -> Tensor:
        """Whether each node is kept, all below it being refused: [R] bool. Parents of the refused owe less."""
        kept = self._coins[rows, nodes] < self._weights[rows, nodes + 1]
        rows, nodes, above = rows[~kept], nodes[~kept], above[~kept]
        weight = self._weights[rows, above]
        left = self.owed[rows, above] * weight[:, None]  # [R, V]
        if self._draft.probs is None:  # one-hot: p·P ≤ 1
            left.scatter_(1, self._draft.tokens[rows, nodes, None], 0.0)
        else:
            left.sub_(self._draft.probs[rows, nodes]).clamp_(min=0)
        total = left.sum(-1)
        some = total > 0
        self.owed[rows[some], above[some]] = left[some] / total[some, None]
        # Nothing owed: certain to stay if its weight is 1 (P and Q agree), certain to go otherwise.
        self._weights[rows, above] = torch.where(weight < 1, total / (total + 1 - weight), 1)
        return kept


def _walk(trees: Sequence[_Parents], state: _State) -> list[int]:
    """The node at which each row's kept path ends, -1 the root. Rows take their steps side by side."""
    ends = [-1] * len(trees)
    tours = {row: _tour(tree) for row, tree in enumerate(trees)}
    device = state.owed.device
    while tours:
        steps = {row: next(tour, None) for row, tour in tours.items()}
        for leaving in (False, True):
            now = [(row, step[0]) for row, step in steps.items() if step is not None and step[1] == leaving]
            if not now:
                continue
            above = [trees[row][node] + 1 for row, node in now]
            where = [torch.tensor(column, device=device) for column in (*zip(*now, strict=True), above)]
            if not leaving:
                state.enter(*where)
                continue
            for (row, node), kept in zip(now, state.leave(*where).tolist(), strict=True):
                if kept:
                    ends[row], steps[row] = node, None
        tours = {row: tour for row, tour in tours.items() if steps[row] is not None}
    return ends


def _tour(parents: _Parents, root: int = -1) -> Iterator[tuple[int, bool]]:
    """Down into every node, and out of it once all below it is done: (node, whether it is left)."""
    for node, parent in enumerate(parents):
        if parent == root:
            yield node, False
            yield from _tour(parents, node)
            yield node, True


def _path(parents: _Parents, node: int) -> list[int]:
    return [*_path(parents, parents[node]), node] if node >= 0 else []
