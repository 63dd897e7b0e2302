"""Greedy verification of chains: the longest prefix the target would have chosen itself."""

from __future__ import annotations

from torch import Tensor

from specdec.sampling.distributions import argmax
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.rejection import accepted_prefix, chain_verdict


class GreedyVerifier(Verifier):
    """Accept while the draft equals the target's argmax; the token after is the argmax itself.

    Equal to plain greedy decoding token for token (Stern et al. 1811.03115, section 3). Uses no uniforms.
    """

    greedy_only = True
    greedy_when_certain = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`. Raises `UsageError` for trees."""
        choice = argmax(target_probs)  # [B, K + 1]
        num_accepted = accepted_prefix(draft, draft.tokens == choice[:, : draft.width])
        return chain_verdict(draft, num_accepted, choice.gather(1, num_accepted[:, None])[:, 0])
