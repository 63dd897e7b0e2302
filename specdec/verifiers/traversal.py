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

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import Draft, Verdict, ancestor_mask
from specdec.verifiers.base import Verifier, worth_asking
from specdec.verifiers.tree import parent_columns, path_of


class TraversalVerifier(Verifier):
    """Keep the first path that its own coin keeps, leaves before their parents. Lossless; declares no alpha.

    Children may be drawn in any way, as long as each reports what it was drawn from once its elder siblings were known.
    """

    accepts_trees = True
    tokenwise = False
    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`."""
        inside = (torch.arange(draft.width) < draft.lengths[:, None]).to(target_probs.device)
        parents = parent_columns(draft).masked_fill(~inside, 0)  # [B, K]; what hangs from the root last disturbs nobody
        above = ancestor_mask(parents - 1)[:, 1:, 1:]  # [B, K, K]
        state = _State(draft, target_probs, uniforms.draw(Purpose.ACCEPT, 0, draft.width))
        ends = _walk(parents, inside, _tour(parents, above), state)  # [B], as columns of `owed`: 0 is the root
        rows = torch.arange(len(ends), device=ends.device)
        kept = F.pad(above, (0, 0, 1, 0))[rows, ends]  # [B, K]
        num_accepted = kept.sum(-1)
        return Verdict(
            path=path_of(kept),
            num_accepted=num_accepted,
            num_examined=num_accepted + (inside & (parents == ends[:, None])).any(-1),
            next_token=sample(state.owed[rows, ends], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]),
        )


class _State:
    """Weight and remaining target distribution of every node, while the batch is walked.

    Node K is nobody's: rows that have nothing to do at a step do it there.
    """

    def __init__(self, draft: Draft, target_probs: Tensor, coins: Tensor) -> None:
        self.owed = F.pad(target_probs, (0, 0, 0, 1))  # [B, K + 2, V], normalised; column 0 is the root
        self._last = draft.width - 1
        self._tokens = F.pad(draft.tokens.clamp(min=0), (0, 1))
        self._probs = draft.probs
        self._coins = F.pad(coins, (0, 1))
        self._weights = torch.ones_like(self.owed[:, :, 0])  # [B, K + 2]

    def enter(self, rows: Tensor, nodes: Tensor, above: Tensor) -> None:
        """Give one node in each of some rows its weight; `above` are their parents' columns."""
        tokens = self._tokens[rows, nodes]
        ratio = self._weights[rows, above] * self.owed[rows, above, tokens]
        if self._probs is not None:
            ratio = ratio / self._probs[rows, nodes.clamp(max=self._last), tokens]
        self._weights[rows, nodes + 1] = ratio.clamp(max=1)

    def leave(self, rows: Tensor, nodes: Tensor, above: Tensor) -> Tensor:
        """Whether each node is kept, all below it being refused: [R] bool. Parents of the refused owe less."""
        kept = self._coins[rows, nodes] < self._weights[rows, nodes + 1]
        weight, before = self._weights[rows, above], self.owed[rows, above]  # [R], [R, V]
        left = before * weight[:, None]
        if self._probs is None:  # one-hot: p·P ≤ 1
            left.scatter_(1, self._tokens[rows, nodes, None], 0.0)
        else:
            left.sub_(self._probs[rows, nodes.clamp(max=self._last)]).clamp_(min=0)
        total = left.sum(-1)
        less = ~kept & (total > 0)
        self.owed[rows, above] = torch.where(less[:, None], left / total[:, None], before)
        # Nothing owed: certain to stay if its weight is 1 (P and Q agree), certain to go otherwise.
        owing = torch.where(weight < 1, total / (total + 1 - weight), 1)
        self._weights[rows, above] = torch.where(kept, weight, owing)
        return kept


def _walk(parents: Tensor, inside: Tensor, tour: Tensor, state: _State) -> Tensor:
    """The column at which each row's kept path ends, [B], 0 the root. Rows take their steps side by side."""
    width = parents.shape[1]
    ends, walking = torch.zeros_like(parents[:, :1].sum(-1)), torch.ones_like(inside[:, :1].any(-1))
    columns, real = F.pad(parents, (0, 1), value=width + 1), F.pad(inside, (0, 1))
    for step in tour.unbind(1):
        here = step % width
        active = walking & real.gather(1, here[:, None])[:, 0]
        for leaving in (False, True):
            now = active & ((step >= width) == leaving)
            rows = worth_asking(now)
            if not len(rows):
                continue
            nodes = torch.where(now, here, width)[rows]
            above = columns.gather(1, torch.where(now, here, width)[:, None])[rows, 0]
            if not leaving:
                state.enter(rows, nodes, above)
                continue
            kept = now[rows] & state.leave(rows, nodes, above)
            ends[rows] = torch.where(kept, nodes + 1, ends[rows])
            walking[rows] &= ~kept
    return ends


def _tour(parents: Tensor, above: Tensor) -> Tensor:
    """Down into every node, and out of it once all below it is done: [B, 2K], node i for entering, K + i for leaving.

    parents: [B, K] columns. above: [B, K, K], whether j is i or an ancestor of it. Before a node is entered, so are its
    ancestors, and the elder siblings of all of these have been left with everything below them.
    """
    width = parents.shape[1]
    size = above.sum(1)  # [B, K], nodes of the tree below and with each
    elder = (parents[:, :, None] == parents[:, None]) & torch.ones_like(above[0]).tril(-1)
    done = (above * (elder * size[:, None]).sum(-1)[:, None]).sum(-1)
    enter = above.sum(-1) - 1 + 2 * done
    nodes = torch.arange(width, device=parents.device).expand_as(parents)
    tour = torch.empty(len(parents), 2 * width, dtype=torch.long, device=parents.device)
    return tour.scatter_(1, enter, nodes).scatter_(1, enter + 2 * size - 1, nodes + width)
