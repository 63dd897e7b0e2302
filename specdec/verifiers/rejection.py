"""Token-wise rejection sampling, and the words every chain rule shares.

- *drafted*: proposed. *examined*: proposed and reached by the rule, that is everything up to and including the
  first rejection. *accepted*: kept; always a prefix of the chain.
- *recovered token*: drawn from the residual after a rejection.
- *bonus token*: drawn from the target's distribution when every drafted token was accepted, also when none was.
- *residual*: norm((target_probs - draft_probs)₊), what the target still owes once the draft has had its share.

Uniforms: `ACCEPT`, node i decides draft node i; `TARGET`, node 0 draws the one recovered or bonus token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.sampling.distributions import sample, token_probs
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import Verifier


class RejectionVerifier(Verifier):
    """Accept a token with probability min(1, target / draft); replace the first rejected one from the residual.

    Lossless. Leviathan, Kalman, Matias 2211.17192 (algorithm 1); Chen et al. 2302.01318 (algorithm 2).
    At temperature 0 it decides exactly as `GreedyVerifier`.
    """

    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`. Raises `UsageError` for trees."""
        target = token_probs(target_probs[:, : draft.width], draft.tokens)  # [B, K]
        threshold = uniforms.draw(Purpose.ACCEPT, 0, draft.width)
        if draft.probs is not None:
            threshold = threshold * token_probs(draft.probs, draft.tokens)
        accepted = threshold < target  # strict: what the target cannot emit is refused even when the uniform is 0
        num_accepted = accepted_prefix(draft, accepted)
        distribution = recovered_or_bonus_probs(draft, target_probs, num_accepted)
        next_token = sample(distribution, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return chain_verdict(draft, num_accepted, next_token)


def refuse_trees(draft: Draft) -> None:
    """Raise `UsageError` for a draft with parents."""
    if draft.parents is not None:
        raise UsageError("a chain rule was given a draft with parents; choose a verifier that accepts trees")


def accepted_prefix(draft: Draft, accepted: Tensor) -> Tensor:
    """How many tokens of each chain survive, given [B, K] bool per token: [B] int64. Padding never does."""
    refuse_trees(draft)
    drafted = torch.arange(draft.width) < draft.lengths[:, None]
    return (accepted & drafted.to(accepted.device)).long().cumprod(-1).sum(-1)


def recovered_or_bonus_probs(
    draft: Draft, target_probs: Tensor, num_accepted: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Distribution of the token that ends the step, not normalised: [B, V].

    The residual where a drafted token was rejected, the target's own distribution where none was. A residual
    that is numerically empty (target and draft agree up to rounding) falls back to the target's distribution.
    weights: [B], what the target counts in the residual, 1 where not given.
    """
    rows = torch.arange(len(target_probs), device=target_probs.device)
    target = target_probs[rows, num_accepted]
    if draft.width == 0:
        return target
    node = num_accepted.clamp(max=draft.width - 1)
    rejected = num_accepted < draft.lengths.to(num_accepted.device)
    if draft.probs is None:
        share = torch.zeros_like(target).scatter_(1, draft.tokens[rows, node].clamp(min=0)[:, None], 1)
    else:
        share = draft.probs[rows, node]
    residual = (target if weights is None else target * weights[:, None]).sub(share).clamp_(min=0)
    owed = rejected & (residual.sum(-1) > 0)
    return torch.where(owed[:, None], residual, target)


def chain_verdict(draft: Draft, num_accepted: Tensor, next_token: Tensor) -> Verdict:
    """The verdict that keeps the first `num_accepted` [B] nodes of each chain."""
    nodes = torch.arange(draft.width, device=num_accepted.device)
    return Verdict(
        path=torch.where(nodes < num_accepted[:, None], nodes, PADDING),
        num_accepted=num_accepted,
        num_examined=torch.minimum(num_accepted + 1, draft.lengths.to(num_accepted.device)),
        next_token=next_token,
    )
