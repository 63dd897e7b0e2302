"""Do these tokens come from those distributions? Pearson's test where draws agree in distribution, and where not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.base import LanguageModel
from specdec.sampling.distributions import probabilities
from specdec.types import SamplingParams

FEWEST_EXPECTED = 5.0
"""Outcomes expected less often are pooled, the usual rule for the chi-square approximation (Cochran 1954)."""

Tokens = tuple[int, ...]
Floats = NDArray[np.float64]


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable exceeds the statistic; 1 without degrees of freedom."""
    if degrees < 1:
        return 1.0
    half, value = torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, value))


def joint_p_value(counts: Mapping[Tokens, int], joint: Mapping[Tokens, float]) -> float:
    """Pearson's chi-square test that independent draws, counted, come from `joint`.

    0 where an outcome was seen that cannot be.
    """
    if any(joint.get(outcome, 0.0) <= 0 for outcome in counts):
        return 0.0
    outcomes, total = list(joint), sum(counts.values())
    expected = np.array([joint[outcome] * total for outcome in outcomes])
    observed = np.array([counts.get(outcome, 0) for outcome in outcomes], dtype=float)
    groups = pooled(expected)
    expected, observed = np.bincount(groups, expected), np.bincount(groups, observed)
    return chi_square_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def declared_p_value(tokens: Tensor, probs: Tensor) -> float:
    """Test that token i was drawn from probs[i], where the distributions differ from draw to draw.

    tokens: [N]. probs: [N, V]; row i may depend on earlier draws but not on its own. The counts of each token less
    their expectation have covariance Σ diag(pᵢ) - pᵢ pᵢᵀ; the quadratic form of its pseudo-inverse is asymptotically
    chi-square with its rank (for equal rows this is Pearson's statistic).
    """
    probs = probs.double()
    groups = torch.from_numpy(pooled(probs.sum(0).numpy()))  # [V]
    num_groups = int(groups.max()) + 1
    shares = torch.zeros(len(probs), num_groups, dtype=torch.float64).index_add_(1, groups, probs)
    seen = torch.bincount(groups[tokens], minlength=num_groups).double()
    covariance = shares.sum(0).diag() - shares.T @ shares
    distance = seen - shares.sum(0)
    rank = int(torch.linalg.matrix_rank(covariance, rtol=1e-9))
    inverse = torch.linalg.pinv(covariance, rtol=1e-9, hermitian=True)
    return chi_square_tail(float(distance @ inverse @ distance), rank)


def pooled(expected: Floats) -> NDArray[np.int64]:
    """A group for each outcome: its own where it is expected often enough, the last one for all the others.

    The last group takes in the rarest of the others until it is large enough itself.
    """
    order = np.argsort(-expected, kind="stable")
    own = int((expected >= FEWEST_EXPECTED).sum())
    rest = float(expected[order[own:]].sum())
    while own > 0 and 0 < rest < FEWEST_EXPECTED:
        own -= 1
        rest += float(expected[order[own]])
    groups = np.full(len(expected), own, dtype=np.int64)
    groups[order[:own]] = np.arange(own)
    return groups if rest > 0 or own == 0 else np.minimum(groups, own - 1)


@torch.inference_mode()
def exact_joint(
    model: LanguageModel, prompt: Sequence[int], sampling: SamplingParams, length: int
) -> dict[Tokens, float]:
    """Probability of every possible continuation of `length` tokens, enumerated. Sampling without penalties."""
    level: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        grown: dict[Tokens, float] = {}
        for tokens, probs in zip(level, next_probs(model, [[*prompt, *t] for t in level], sampling), strict=True):
            for token in probs.nonzero()[:, 0].tolist():
                grown[*tokens, token] = level[tokens] * float(probs[token])
        level = grown
    return level


@torch.inference_mode()
def next_probs(model: LanguageModel, rows: Sequence[Sequence[int]], sampling: SamplingParams) -> Tensor:
    """What each of N rows of equal length is continued with: [N, V] float32, on the host. No cache is shared."""
    out, width = [], len(rows[0])
    size = min(model.max_batch or len(rows), 256)
    for start in range(0, len(rows), size):
        ids = torch.tensor(rows[start : start + size], device=model.device)
        positions = torch.arange(width, device=model.device).expand(len(ids), -1)
        last = torch.full((len(ids), 1), width - 1, device=model.device)
        view = model.new_cache(len(ids), width).view(range(len(ids)))
        logits = model.forward(ids, positions, view, logits_at=last).logits
        out.append(probabilities(logits, [sampling] * len(ids))[:, 0].cpu())
    return torch.cat(out)
