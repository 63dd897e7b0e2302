"""How much of everything is measured: what --quick and the full run differ in."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.rounds import Limit

LOOKUP_TOKENS, NGRAM = 8, 3
"""Gamma and the longest n-gram of prompt lookup, on both sides."""


@dataclass(frozen=True)
class Plan:
    """Sizes and limits of every part; limits hold per dtype, those of a context length per length.

    generation, drafters: a round is one prompt. forwards, long_forwards, steps: every number of tokens once.
    long_context: tokens before those of long_forwards. prefills: one prompt of that length. batches: every size once.
    rules: repeats of each verification rule.
    """

    max_new_tokens: int
    generation: Limit
    forwards: Limit
    dtypes: Limit
    long_context: int
    long_forwards: Limit
    contexts: tuple[int, ...]
    prefills: Limit
    steps: Limit
    batch_sizes: tuple[int, ...]
    batch_tokens: int
    batches: Limit
    drafters: Limit
    rules: int


FULL = Plan(
    max_new_tokens=128,
    generation=Limit(16, seconds=420),
    forwards=Limit(40, seconds=45),
    dtypes=Limit(60, seconds=20),
    long_context=4096,
    long_forwards=Limit(12, seconds=60),
    contexts=(64, 256, 512, 1024, 2048, 4096, 8000),
    prefills=Limit(3, seconds=20),
    steps=Limit(15, seconds=20),
    batch_sizes=(1, 2, 4, 8, 16),
    batch_tokens=32,
    batches=Limit(5, seconds=150),
    drafters=Limit(8, seconds=120),
    rules=100,
)
QUICK = Plan(
    max_new_tokens=24,
    generation=Limit(4, seconds=20),
    forwards=Limit(8, seconds=3),
    dtypes=Limit(8, seconds=2),
    long_context=1024,
    long_forwards=Limit(3, seconds=6),
    contexts=(64, 1024),
    prefills=Limit(2, seconds=3),
    steps=Limit(5, seconds=2),
    batch_sizes=(1, 4),
    batch_tokens=16,
    batches=Limit(2, seconds=5),
    drafters=Limit(2, seconds=6),
    rules=10,
)
