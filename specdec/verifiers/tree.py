"""Verification of trees at temperature 0."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.distributions import argmax
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import Verifier


class GreedyTreeVerifier(Verifier):
    """Walk from the root along the child equal to the target's argmax; stop where no child is.

    SpecInfer 2305.09781, algorithm 2 (VerifyGreedy). Of siblings with the same token the first is walked.

    `num_examined` counts one per depth at which the walk met at least one child to compare, not every sibling:
    accepted nodes, plus one if the last of them (or the root) has children and all were refused. For a chain
    this is everything up to and including the first rejection, so accepted / examined stays comparable by depth.
    """

    greedy_only = True
    accepts_trees = True
    tokenwise = False
    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`."""
        choice = argmax(target_probs)  # [B, K + 1]
        parents = parent_columns(draft)  # [B, K], as columns of `choice`: 0 is the root
        valid = torch.arange(draft.width) < draft.lengths[:, None]
        valid = valid.to(choice.device)
        walked = _walked(draft.tokens, parents, valid, choice)  # [B, K + 1]
        columns = torch.arange(draft.width + 1, device=choice.device)
        end = torch.where(walked, columns, 0).amax(-1, keepdim=True)  # [B, 1], where the walk stopped
        refused = ((parents == end) & valid).any(-1)
        num_accepted = walked[:, 1:].sum(-1)
        return Verdict(
            path=path_of(walked[:, 1:]),
            num_accepted=num_accepted,
            num_examined=num_accepted + refused,
            next_token=choice.gather(1, end)[:, 0],
        )


def parent_columns(draft: Draft) -> Tensor:
    """Where each node's parent stands in `target_probs`, 0 the root: [B, K] int64. Padding has any."""
    if draft.parents is None:
        return torch.arange(draft.width, device=draft.tokens.device).expand(len(draft.tokens), -1)
    return draft.parents + 1


def path_of(kept: Tensor) -> Tensor:
    """The nodes that are kept, [B, K] bool → [B, K] int64. Parents come before children, so from the root down."""
    width = kept.shape[1]
    nodes = torch.where(kept, torch.arange(width, device=kept.device), width).sort(-1).values
    return nodes.masked_fill(nodes == width, PADDING)


def _walked(tokens: Tensor, parents: Tensor, valid: Tensor, choice: Tensor) -> Tensor:
    """The root, and the nodes that are chosen and have only chosen nodes above them: [B, K + 1] bool."""
    chosen = valid & (tokens == choice.gather(1, parents))
    siblings = parents[:, :, None] == parents[:, None, :]  # [B, K, K]
    earlier = torch.ones_like(siblings[0]).tril(-1)
    chosen &= ~(siblings & earlier & chosen[:, None, :]).any(-1)
    # Pointer jumping: each round doubles how far up a node has looked, so depth costs only its logarithm.
    walked = torch.cat([torch.ones_like(choice[:, :1], dtype=torch.bool), chosen], 1)
    above = torch.cat([torch.zeros_like(choice[:, :1]), parents], 1)
    for _ in range(tokens.shape[1].bit_length()):
        walked = walked & walked.gather(1, above)
        above = above.gather(1, above)
    return walked
