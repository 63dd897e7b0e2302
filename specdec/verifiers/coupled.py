"""Drafter-invariant verification: what is emitted is decided by the noise of each position, whoever drafted.

Daliri, Musco, Suresh 2408.07978, "Coupling without Communication and Drafter-Invariant Speculative Decoding". The
target's choice at a position is the winner of a race that depends on (seed, request, position) alone, see
`Uniforms.choose`; a draft token stays if it is that choice. A sampled run is therefore the same token for token under
every drafter and every gamma, plain decoding with this rule included.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import Verifier, worth_asking
from specdec.verifiers.rejection import chain_verdict, refuse_trees


class CoupledVerifier(Verifier):
    """Accept while the draft equals the target's choice; the token after is the choice itself.

    Lossless: the noise of a position is independent of everything before it. A deterministic draft is accepted as often
    as by token-wise rejection; a sampled one at least (1 - TV) / (1 + TV) of the time if it is drawn by
    `Uniforms.draft`, which then runs the same race. Draft probabilities are not looked at.
    """

    coupled = True
    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`. Raises `UsageError` for trees."""
        refuse_trees(draft)
        num_accepted = torch.zeros_like(draft.lengths, device=target_probs.device)
        next_token, walking = num_accepted.clone(), torch.ones_like(num_accepted, dtype=torch.bool)
        tokens = F.pad(draft.tokens, (0, 1), value=PADDING)  # [B, K + 1], what no choice ever equals at the end
        for node in range(draft.width + 1):
            rows = worth_asking(walking)
            if not len(rows):
                break
            there = uniforms.select(rows.tolist()) if rows.is_cpu else uniforms
            chosen, going = there.choose(target_probs[rows, node], node), walking[rows]
            next_token[rows] = torch.where(going, chosen, next_token[rows])
            walking[rows] = going & (tokens[rows, node] == chosen)
            num_accepted += walking
        return chain_verdict(draft, num_accepted, next_token)
