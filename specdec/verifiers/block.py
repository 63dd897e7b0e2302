"""Block verification: a chain is judged as a whole, so that a lucky token can pay for an unlucky one before it.

Sun et al. 2403.10444, "Block Verification Accelerates Speculative Decoding", algorithm 2. With P the target and Q the
draft distribution at a position:

- *weight* p of a prefix: p(0) = 1, p(i) = min(p(i-1) · P(token i) / Q(token i), 1).
- *owed* R(i) = Σ max(p(i)·P - Q, 0) at the position after the prefix: what the draft will leave the target there.
- A prefix of i tokens is kept with probability p(i) at the chain's end, R(i) / (R(i) + 1 - p(i)) before it; the
  longest prefix kept counts, not the first one refused.

Uniforms: `ACCEPT`, node i - 1 decides the prefix of i tokens; `TARGET`, node 0 draws the token that ends the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.distributions import sample, token_probs
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import Draft, Verdict
from specdec.verifiers.base import Verifier, worth_asking
from specdec.verifiers.rejection import chain_verdict, recovered_or_bonus_probs, refuse_trees


class BlockVerifier(Verifier):
    """Keep the longest prefix that its own coin keeps. Lossless; on average never shorter than token-wise rejection.

    accepted ÷ examined is no estimate of alpha here: prefixes are refused together.
    """

    tokenwise = False
    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`. Raises `UsageError` for trees."""
        refuse_trees(draft)
        weights = _prefix_weights(draft, target_probs)  # [B, K + 1]
        num_accepted = _longest_kept(draft, target_probs, weights, uniforms.draw(Purpose.ACCEPT, 0, draft.width))
        weight = weights.gather(1, num_accepted[:, None])[:, 0]
        distribution = recovered_or_bonus_probs(draft, target_probs, num_accepted, weight)
        next_token = sample(distribution, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return chain_verdict(draft, num_accepted, next_token)


def _prefix_weights(draft: Draft, target_probs: Tensor) -> Tensor:
    """p of every prefix, the empty one first: [B, K + 1]."""
    ratios = token_probs(target_probs[:, : draft.width], draft.tokens)  # [B, K]
    if draft.probs is not None:
        smallest = torch.finfo(ratios.dtype).tiny  # padding alone has draft probability 0
        ratios = ratios / token_probs(draft.probs, draft.tokens).clamp(min=smallest)
    weights = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] * ratio).clamp(max=1))
    return torch.stack(weights, dim=1)


def _longest_kept(draft: Draft, target_probs: Tensor, weights: Tensor, coins: Tensor) -> Tensor:
    """From the end of every chain backwards, so that what is owed is summed up only where it decides: [B] int64.

    A prefix is never kept with more than its weight, since what is owed is at most that.
    """
    lengths = draft.lengths.to(weights.device)
    kept = torch.zeros_like(lengths)
    for length in range(draft.width, 0, -1):
        weight = weights[:, length]
        open_ = (lengths >= length) & (kept == 0) & (coins[:, length - 1] < weight)
        kept = torch.where(open_, length, kept)
        if length == draft.width:
            continue
        unsure = open_ & (lengths > length) & (weight < 1)
        rows = worth_asking(unsure)
        if len(rows):
            chance = _chance(draft, target_probs, weight[rows], rows, length)
            kept[rows] *= ~unsure[rows] | (coins[rows, length - 1] < chance)
    return kept


def _chance(draft: Draft, target_probs: Tensor, weight: Tensor, rows: Tensor, length: int) -> Tensor:
    """R / (R + 1 - p) of the prefix of `length` tokens in some rows, [R]; their weight is p < 1."""
    target = target_probs[rows, length]
    if draft.probs is None:  # one-hot: of p·P only the drafted token's share is taken, for p·P ≤ 1
        owed = weight * (1 - target.gather(1, draft.tokens[rows, length, None].clamp(min=0))[:, 0])
    else:
        owed = target.mul_(weight[:, None]).sub_(draft.probs[rows, length]).clamp_(min=0).sum(-1)
    return owed / (owed + 1 - weight)
