import math

import numpy as np
import pytest
import torch

from specdec.errors import UsageError
from specdec.sampling.uniforms import Uniforms, request_key
from specdec.testing.exact import chi_square_p_value, emission, total_variation
from specdec.testing.languages import constant, joint
from specdec.types import Draft
from specdec.verifiers.synthetic import SyntheticVerifier

BATCH = 20_000


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_rate_is_validated(rate: float) -> None:
    with pytest.raises(UsageError, match="acceptance_rate"):
        SyntheticVerifier(rate)


def test_declares_its_loss() -> None:
    assert not SyntheticVerifier(0.5).lossless


@pytest.mark.parametrize(("rate", "accepted"), [(0.0, 0.0), (0.25, 0.3125), (0.5, 0.75), (1.0, 2.0)])
def test_rate_is_exact_whatever_the_tokens(rate: float, accepted: float) -> None:
    language = constant(1.0, 0.0)
    emitted = emission(SyntheticVerifier(rate), language, constant(0.5, 0.5), 2)
    assert emitted.mean_accepted == pytest.approx(accepted, abs=1e-12)
    assert emitted.mean_examined == pytest.approx(1 + rate, abs=1e-12)


def test_rate_zero_is_the_target() -> None:
    target = constant(0.25, 0.75)
    assert (
        total_variation(emission(SyntheticVerifier(0.0), target, constant(0.5, 0.5), 1).joint, joint(target, 2)) < 1e-12
    )


def test_last_token_comes_from_the_target_at_its_position() -> None:
    target = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.0, 0.5], [0.0, 0.125, 0.875]])
    uniforms = Uniforms([request_key(5, str(i)) for i in range(BATCH)], [3] * BATCH)
    draft = Draft(torch.zeros(BATCH, 2, dtype=torch.long), torch.full((BATCH,), 2))
    verdict = SyntheticVerifier(0.6).verify(draft, target.expand(BATCH, -1, -1), uniforms)
    counts = np.zeros((3, 3))
    np.add.at(counts, (verdict.num_accepted.numpy(), verdict.next_token.numpy()), 1)
    probs = np.array([[0.4], [0.24], [0.36]]) * target.numpy()
    assert chi_square_p_value(counts.ravel(), probs.ravel()) > 1e-6  # the false-failure probability
