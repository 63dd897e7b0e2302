"""What verification itself costs: every rule on the same made-up steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Uniforms, request_key
from specdec.types import Draft
from specdec.verifiers.base import SiblingDraws, Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.multi_draft_k_seq import KSeqVerifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.multi_draft_without_replacement import WithoutReplacementVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from specdec.verifiers.typical import TypicalVerifier

_WARMUP = 2
_SPREAD, _NOISE = 4.0, 0.8
"""Of the target's logits, and of the draft's around them: an entropy of some 6 bits and an acceptance near 0.7."""


def all_rules() -> dict[str, Verifier]:
    """Every rule that looks at probabilities, by the name of its configuration."""
    return {
        "greedy": GreedyVerifier(),
        "rejection": RejectionVerifier(),
        "block": BlockVerifier(),
        "coupled": CoupledVerifier(),
        "typical": TypicalVerifier(),
        "tree_greedy": GreedyTreeVerifier(),
        "multi_draft": WithReplacementVerifier(),
        "multi_draft_without_replacement": WithoutReplacementVerifier(),
        "multi_draft_top_k": TopKVerifier(),
        "multi_draft_k_seq": KSeqVerifier(),
        "traversal": TraversalVerifier(),
    }


@torch.inference_mode()
def time_rules(
    vocab_size: int, batch: int, gamma: int, repeats: int, rules: Mapping[str, Verifier] | None = None
) -> pd.DataFrame:
    """Seconds of one verification on the CPU, rules interleaved, each repeat with a new step.

    Drafts have gamma nodes: a chain, and for rules that accept trees two children at every depth, of which the first
    goes on. Columns rule, drafts, vocab_size, batch, gamma, repeat, accepted (tokens per row), seconds.
    """
    rows = []
    for repeat in range(-_WARMUP, repeats):
        step = _Step(vocab_size, batch, gamma, seed=_WARMUP + repeat)
        for name, rule in (rules or all_rules()).items():
            draft = step.draft_for(rule)
            start = time.perf_counter()
            verdict = rule.verify(draft, step.target_probs, step.uniforms)
            seconds = time.perf_counter() - start
            shape = "tree" if rule.accepts_trees else "chain"
            accepted = float(verdict.num_accepted.double().mean())
            if repeat >= 0:
                rows.append((name, shape, vocab_size, batch, gamma, repeat, accepted, seconds))
    columns = ["rule", "drafts", "vocab_size", "batch", "gamma", "repeat", "accepted", "seconds"]
    return pd.DataFrame(rows, columns=columns)


class _Step:
    """Target distributions, and drafts from noisy copies of them."""

    def __init__(self, vocab_size: int, batch: int, gamma: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(batch, gamma + 1, vocab_size, generator=generator) * _SPREAD
        self.target_probs = logits.softmax(-1)
        noise = torch.randn(logits.shape, generator=generator)
        self._draft_probs = logits.add_(noise, alpha=_NOISE).softmax(-1)  # by parent, column 0 the root
        self._coins = torch.rand(batch, gamma, generator=generator, dtype=torch.float64)
        keys = [request_key(seed, str(row)) for row in range(batch)]
        self.uniforms = Uniforms(keys, [1] * batch, positions=[100] * batch)
        chain, tree = list(range(-1, gamma - 1)), [max(2 * (node // 2) - 2, -1) for node in range(gamma)]
        self._coupled_chain = replace(self._draft(chain), tokens=self._raced())
        self._chain = self._draft(chain)
        self._trees = {draws: self._draft(tree, distinct=draws is SiblingDraws.DISTINCT) for draws in SiblingDraws}

    def draft_for(self, rule: Verifier) -> Draft:
        """A draft that the rule can judge, drawn as it would have it."""
        if rule.accepts_trees:
            return self._trees[rule.siblings]
        return self._coupled_chain if rule.coupled else self._chain

    def _raced(self) -> Tensor:
        gamma = self._coins.shape[1]
        return torch.stack([self.uniforms.choose(self._draft_probs[:, node], node) for node in range(gamma)], dim=1)

    def _draft(self, parents: Sequence[int], *, distinct: bool = False) -> Draft:
        batch, gamma = self._coins.shape
        tokens = torch.zeros(batch, gamma, dtype=torch.long)
        probs = self._draft_probs[:, [parent + 1 for parent in parents]]  # a copy
        for node, parent in enumerate(parents):
            elder = [other for other in range(node) if parents[other] == parent and distinct]
            if elder:
                _strike(probs[:, node], tokens[:, elder])
            tokens[:, node] = sample(probs[:, node], self._coins[:, node])
        is_chain = list(parents) == list(range(-1, gamma - 1))
        kept = None if is_chain else torch.tensor(parents).expand(batch, -1)
        return Draft(tokens, torch.full((batch,), gamma), probs, kept)


def _strike(probs: Tensor, tokens: Tensor) -> None:
    """Take tokens [B, N] out of probs [B, V] and normalise, in place."""
    probs.scatter_(1, tokens, 0.0).div_(probs.sum(-1, keepdim=True))
