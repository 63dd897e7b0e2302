"""The exactness oracle: the joint distribution a verifier emits, integrated instead of sampled.

A *language* gives the next-token distribution after any prefix. With every probability a multiple of 1/4 (or of
1/3), all the thresholds a token-wise rule compares a uniform with are multiples of 1/12 (1/6): ratios of two
probabilities, and cumulative sums of normalised differences. The verifier is then constant between the lattice
points, so that running it once in the middle of every cell integrates it exactly, for all drafts in one batch.

What it emits is completed with the target to gamma + 1 tokens and compared with the target's own joint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.types import PADDING, Draft, Verdict
from specdec.uniforms import Purpose, Uniforms
from specdec.verifiers.base import Verifier

Tokens = tuple[int, ...]
Language = Callable[[Tokens], np.ndarray]
Submit = Callable[[Tokens], int]


def constant(*probs: float) -> Language:
    """The same distribution after every prefix."""
    return lambda prefix: np.array(probs)


def lattice_language(vocab_size: int, seed: int, denominator: int = 4) -> Language:
    """A distribution per prefix, random, in multiples of 1/denominator (zeros included)."""

    def probs(prefix: Tokens) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        return rng.multinomial(denominator, rng.dirichlet(np.ones(vocab_size))) / denominator

    return probs


def joint(language: Language, length: int) -> np.ndarray:
    """Probability of every sequence of the given length: [V] * length."""
    vocab_size = len(language(()))
    out = np.ones((vocab_size,) * length)
    for tokens in itertools.product(range(vocab_size), repeat=length):
        for i, token in enumerate(tokens):
            out[tokens] *= language(tokens[:i])[token]
    return out


class LatticeUniforms(Uniforms):
    """Uniforms that are given: [B, N] per purpose."""

    def __init__(self, values: dict[Purpose, Tensor]) -> None:
        batch = len(next(iter(values.values())))
        super().__init__([0] * batch, [0] * batch)
        self.values = values

    def draw(self, purpose: Purpose, first_node: int, num_nodes: int) -> Tensor:
        return self.values[purpose][:, first_node : first_node + num_nodes]


@dataclass(frozen=True)
class Emission:
    """joint: [V] * (gamma + 1), emitted tokens completed with the target. Means are per step."""

    joint: np.ndarray
    mean_accepted: float
    mean_examined: float


def emission(
    verifier: Verifier,
    target: Language,
    draft: Language,
    gamma: int,
    *,
    resolution: int = 12,
    submit: Submit = len,
    deterministic: Tokens | None = None,
) -> Emission:
    """What one step of the verifier emits, over all drafts and all uniforms.

    submit: how many tokens of a drafted chain are handed to the verifier. deterministic: this chain and no
    probabilities, in place of drafts from `draft`.
    """
    vocab_size = len(target(()))
    chains = [deterministic] if deterministic else list(itertools.product(range(vocab_size), repeat=gamma))
    weights = [1.0 if deterministic else _chance(draft, chain) for chain in chains]
    chains, weights = zip(*[(c, w) for c, w in zip(chains, weights, strict=True) if w > 0], strict=True)
    submitted = [chain[: submit(chain)] for chain in chains]

    cells = torch.cartesian_prod(*[(torch.arange(resolution).double() + 0.5) / resolution] * (gamma + 1))
    uniforms = LatticeUniforms(
        {
            Purpose.ACCEPT: cells[:, :gamma].repeat(len(chains), 1),
            Purpose.TARGET: cells[:, gamma:].repeat(len(chains), 1),
        }
    )
    batch = build_draft(submitted, None if deterministic else draft, vocab_size)
    rows = torch.arange(len(chains)).repeat_interleave(len(cells))
    spread = Draft(batch.tokens[rows], batch.lengths[rows], None if batch.probs is None else batch.probs[rows])
    verdict = verifier.verify(spread, build_target(submitted, target, batch.width)[rows], uniforms)
    return _complete(verdict, spread, np.repeat(weights, len(cells)) / len(cells), target, gamma)


def build_draft(chains: Sequence[Tokens], language: Language | None, vocab_size: int) -> Draft:
    """Ragged chains as a batch, with the distributions they were drawn from."""
    draft = Draft.from_chains(chains)
    if language is None:
        return draft
    probs = torch.full((len(chains), draft.width, vocab_size), float("nan"), dtype=torch.float64)  # padding is poison
    for row, chain in enumerate(chains):
        for i in range(len(chain)):
            probs[row, i] = torch.from_numpy(language(chain[:i]))
    return Draft(draft.tokens, draft.lengths, probs)


def build_target(chains: Sequence[Tokens], language: Language, width: int) -> Tensor:
    """target_probs [B, K + 1, V] float64; past a row's own length it is poison, which must not be looked at."""
    out = torch.full((len(chains), width + 1, len(language(()))), float("nan"), dtype=torch.float64)
    for row, chain in enumerate(chains):
        for i in range(len(chain) + 1):
            out[row, i] = torch.from_numpy(language(chain[:i]))
    return out


def emitted_tokens(draft: Draft, verdict: Verdict) -> list[Tokens]:
    """Accepted tokens along each path, and the one drawn after them."""
    out = []
    columns = (verdict.path, draft.tokens, verdict.num_accepted, verdict.next_token)
    for path, tokens, num_accepted, next_token in zip(*(column.tolist() for column in columns), strict=True):
        kept = [tokens[node] for node in path if node != PADDING]
        assert len(kept) == num_accepted
        out.append((*kept, next_token))
    return out


def _complete(verdict: Verdict, draft: Draft, weights: np.ndarray, target: Language, gamma: int) -> Emission:
    out = np.zeros((len(target(())),) * (gamma + 1))
    totals: dict[Tokens, float] = {}
    for tokens, weight in zip(emitted_tokens(draft, verdict), weights, strict=True):
        totals[tokens] = totals.get(tokens, 0.0) + float(weight)
    for tokens, weight in totals.items():
        rest = joint(lambda suffix, head=tokens: target((*head, *suffix)), gamma + 1 - len(tokens))  # type: ignore[misc]
        out[tokens] += weight * rest
    mean_accepted = float(verdict.num_accepted.numpy() @ weights)
    return Emission(out, mean_accepted, float(verdict.num_examined.numpy() @ weights))


def _chance(language: Language, chain: Tokens) -> float:
    return float(np.prod([language(chain[:i])[token] for i, token in enumerate(chain)]))


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Half the L1 distance of two distributions."""
    return float(np.abs(first - second).sum() / 2)


def chi_square_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's test that counts come from probs; cells of probability 0 must be empty."""
    assert counts[probs == 0].sum() == 0, "an impossible outcome was seen"
    expected = (probs * counts.sum())[probs > 0]
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
