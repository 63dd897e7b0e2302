"""Typical acceptance: keep what the target finds plausible. Lossy, and declared so."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.sampling.distributions import entropy_bits, sample, token_probs
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import Draft, Verdict
from specdec.verifiers.base import Verifier, worth_asking
from specdec.verifiers.rejection import chain_verdict, refuse_trees


class TypicalVerifier(Verifier):
    """Accept a token if P(token) > min(epsilon, delta · exp(-H(P))), H in nats. The token after is drawn from P.

    Cai et al. 2401.10774 (Medusa), section 3.3.2, as published code has it: their candidates begin with a token of the
    target's own, which is always accepted; here that token has been emitted already, as the last step's recovered or
    bonus token, so every drafted token is put to the test. At temperature 0 it decides exactly as `GreedyVerifier`.

    Lossy: the draft's distribution leaks into the output. How much depends on both models and is measured, not bounded.
    """

    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in {"epsilon": epsilon, "delta": delta}.items():
            if not 0 <= value <= 1:
                raise UsageError(f"{name}={value} is not a probability threshold; it must be in [0, 1]")
        self.epsilon = epsilon
        self.delta = delta
        self.greedy_when_certain = min(epsilon, delta) < 1  # at 1 even a certain token is refused, and drawn

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`. Raises `UsageError` for trees."""
        refuse_trees(draft)
        target = token_probs(target_probs[:, : draft.width], draft.tokens)  # [B, K]
        num_accepted = torch.zeros_like(draft.lengths, device=target.device)
        lengths = draft.lengths.to(target.device)
        walking = torch.ones_like(num_accepted, dtype=torch.bool)
        for node in range(draft.width):
            walking &= lengths > node
            walking &= self._typical(target[:, node], target_probs, walking, node)
            num_accepted += walking
        rows = torch.arange(len(target), device=target.device)
        next_token = sample(target_probs[rows, num_accepted], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return chain_verdict(draft, num_accepted, next_token)

    def _typical(self, probs: Tensor, target_probs: Tensor, walking: Tensor, node: int) -> Tensor:
        """[B] bool for the probabilities [B] of one node's tokens, right for the rows that are `walking`, [B] bool.

        Entropies, in [0, ln V], only where they decide.
        """
        typical = probs > self.epsilon
        doubtful = walking & ~typical & (probs > self.delta / target_probs.shape[-1])
        rows = worth_asking(doubtful)
        if len(rows):
            nats = entropy_bits(target_probs[rows, node]) * math.log(2)
            typical[rows] |= doubtful[rows] & (probs[rows] > self.delta * torch.exp(-nats))
        return typical
