"""Languages small enough to be written down whole, and the ways of drawing several drafts from one distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

Tokens = tuple[int, ...]
Language = Callable[[Tokens], np.ndarray]
"""Prefix → distribution of the next token [V]."""
Siblings = Callable[[np.ndarray, Tokens], np.ndarray]
"""(draft distribution at a node [V], siblings drawn before) → distribution of the next sibling [V]."""


def constant(*probs: float) -> Language:
    """The same distribution after every prefix."""
    return lambda prefix: np.array(probs)


def lattice_language(vocab_size: int, seed: int, denominator: int = 4) -> Language:
    """A distribution per prefix, random, in multiples of 1/denominator (zeros included)."""

    def probs(prefix: Tokens) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        found: np.ndarray = rng.multinomial(denominator, rng.dirichlet(np.ones(vocab_size))) / denominator
        return found

    return probs


def random_language(vocab_size: int, seed: int) -> Language:
    """A distribution per prefix, random, nothing about it round."""

    def probs(prefix: Tokens) -> np.ndarray:
        found: np.ndarray = np.random.default_rng([seed, len(prefix), *prefix]).dirichlet(np.ones(vocab_size))
        return found

    return probs


def greedy_language(vocab_size: int, seed: int) -> Language:
    """All mass on one token, another one after every prefix: temperature 0."""

    def probs(prefix: Tokens) -> np.ndarray:
        found: np.ndarray = np.eye(vocab_size)[random_language(vocab_size, seed)(prefix).argmax()]
        return found

    return probs


def joint(language: Language, length: int) -> np.ndarray:
    """Probability of every sequence of the given length: [V] * length."""
    vocab_size = len(language(()))
    out = np.ones((vocab_size,) * length)
    for tokens in itertools.product(range(vocab_size), repeat=length):
        for i, token in enumerate(tokens):
            out[tokens] *= language(tokens[:i])[token]
    return out


def with_replacement(probs: np.ndarray, earlier: Tokens) -> np.ndarray:
    """Every sibling independently, as SpecInfer and SpecTr draft."""
    return probs


def without_replacement(probs: np.ndarray, earlier: Tokens) -> np.ndarray:
    """No token twice, as Sequoia drafts; uniform over what is left once the distribution is exhausted."""
    tried = np.isin(np.arange(len(probs)), earlier)
    rest = np.where(tried, 0.0, probs)
    if rest.sum() == 0:
        rest = (~tried).astype(float)
    found: np.ndarray = rest / rest.sum()
    return found


def top_k(probs: np.ndarray, earlier: Tokens) -> np.ndarray:
    """The most likely tokens in order, as EAGLE drafts: nothing is left to chance."""
    found: np.ndarray = np.eye(len(probs))[np.argsort(-probs, kind="stable")[len(earlier)]]
    return found
