"""Acceptance at a set rate: isolates what the system costs from what the drafter earns."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import Draft, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.rejection import accepted_prefix, chain_verdict


class SyntheticVerifier(Verifier):
    """Accept each examined token with probability `acceptance_rate` whatever it is. Lossy, and says so.

    The token that ends the step is drawn from the target's distribution, so it is real even where the draft is not.
    """

    lossless = False
    synthetic = True

    def __init__(self, acceptance_rate: float) -> None:
        if not 0 <= acceptance_rate <= 1:
            raise UsageError(f"acceptance_rate={acceptance_rate} is not a probability; it must be in [0, 1]")
        self.acceptance_rate = acceptance_rate

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`. Raises `UsageError` for trees."""
        num_accepted = accepted_prefix(draft, uniforms.draw(Purpose.ACCEPT, 0, draft.width) < self.acceptance_rate)
        rows = torch.arange(len(target_probs), device=target_probs.device)
        next_token = sample(target_probs[rows, num_accepted], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return chain_verdict(draft, num_accepted, next_token)
