"""From the target's logits to what stays of a draft, and what is written down about it.

A verifier decides from probabilities. Where nothing is left to chance, that is at temperature 0 with a deterministic
draft, every exact rule comes down to comparing tokens; that is done here, on the host, with the K + 1 choices alone.
Writing one-hot distributions over the vocabulary, only for a rule to find the ones again, would cost more than
everything else a step does outside its forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.distributions import (
    Seen,
    argmax,
    entropy_bits,
    expected_acceptance,
    parent_probs,
    probabilities,
    token_probs,
)
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, SamplingParams, Verdict
from specdec.verifiers.base import Verifier


class Measured(NamedTuple):
    """One token as it was judged. What does not apply to a token drawn from the target is None."""

    token_id: int
    target_prob: float
    draft_prob: float | None = None
    expected_acceptance: float | None = None


class Judged(ABC):
    """A step's verdict, and on the host whatever a record of it needs.

    logits: [B, K + 1, V], the target's.
    """

    logits: Tensor
    sampling: Sequence[SamplingParams]
    draft: Draft

    @property
    @abstractmethod
    def verdict(self) -> Verdict:
        """As the verifier gives it."""

    @property
    @abstractmethod
    def paths(self) -> list[list[int]]:
        """Accepted nodes from the root down, per row."""

    @property
    @abstractmethod
    def num_examined(self) -> list[int]:
        """See `Verdict.num_examined`, per row."""

    @abstractmethod
    def measured(self, width: int) -> tuple[list[list[Measured]], list[Measured]]:
        """The first `width` nodes of each row's draft, and the token each row was granted from the target."""

    @abstractmethod
    def sampling_entropy_bits(self, width: int) -> list[list[float]]:
        """Entropy of what is sampled from, at the root and the first `width` nodes of each row."""

    @cached_property
    def drafted(self) -> list[int]:
        """Nodes proposed, per row."""
        lengths: list[int] = self.draft.lengths.tolist()
        return lengths

    @cached_property
    def parents(self) -> Sequence[Sequence[int]]:
        """[B][K] index of each node's parent, -1 for a child of the root."""
        if self.draft.parents is None:
            return [range(-1, self.draft.width - 1)] * len(self.draft.lengths)
        parents: list[list[int]] = self.draft.parents.tolist()
        return parents


@dataclass(frozen=True)
class ByRule(Judged):
    """Decided by a verifier from target_probs [B, K + 1, V]."""

    logits: Tensor
    sampling: Sequence[SamplingParams]
    draft: Draft
    target_probs: Tensor
    given: Verdict

    @property
    def verdict(self) -> Verdict:
        """See `Judged.verdict`."""
        return self.given

    @cached_property
    def paths(self) -> list[list[int]]:
        """See `Judged.paths`."""
        counts = self.given.num_accepted.tolist()
        return [row[:count] for row, count in zip(self.given.path.tolist(), counts, strict=True)]

    @cached_property
    def num_examined(self) -> list[int]:
        """See `Judged.num_examined`."""
        counts: list[int] = self.given.num_examined.tolist()
        return counts

    def measured(self, width: int) -> tuple[list[list[Measured]], list[Measured]]:
        """See `Judged.measured`."""
        draft, probs, verdict = _first_nodes(self.draft, width), self.target_probs, self.given
        target = token_probs(parent_probs(draft, probs), draft.tokens)
        drafted = torch.ones_like(target) if draft.probs is None else token_probs(draft.probs, draft.tokens)
        expected = target if draft.probs is None else expected_acceptance(draft, probs)
        nodes = torch.stack([draft.tokens.double(), target.double(), drafted.double(), expected.double()], dim=-1)
        path = F.pad(verdict.path, (1, 0), value=-1)  # [B, D + 1], from the root
        last = path.gather(1, verdict.num_accepted[:, None])[:, 0]
        rows = torch.arange(len(probs), device=probs.device)
        granted = torch.stack([verdict.next_token.double(), probs[rows, last + 1, verdict.next_token].double()], dim=-1)
        return (
            [[Measured(int(token), *rest) for token, *rest in row] for row in nodes.tolist()],
            [Measured(int(token), prob) for token, prob in granted.tolist()],
        )

    def sampling_entropy_bits(self, width: int) -> list[list[float]]:
        """See `Judged.sampling_entropy_bits`."""
        bits: list[list[float]] = entropy_bits(self.target_probs[:, : width + 1]).tolist()
        return bits


@dataclass(frozen=True)
class ByComparison(Judged):
    """Decided by comparing a deterministic draft with likely [B, K + 1], the target's choices at temperature 0.

    From the root, the first child that is the target's choice is kept, as `GreedyTreeVerifier` does it.
    """

    logits: Tensor
    sampling: Sequence[SamplingParams]
    draft: Draft
    likely: Tensor

    @cached_property
    def verdict(self) -> Verdict:
        """See `Judged.verdict`."""
        width, device = self.draft.width, self.draft.tokens.device
        padded = [[*path, *[PADDING] * (width - len(path))] for path in self.paths]
        counts, granted = [len(path) for path in self.paths], self._granted
        path = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(padded), width)
        return Verdict(path, *(torch.tensor(row, device=device) for row in (counts, self.num_examined, granted)))

    @property
    def paths(self) -> list[list[int]]:
        """See `Judged.paths`."""
        return [path for path, _ in self._walks]

    @property
    def num_examined(self) -> list[int]:
        """See `Judged.num_examined`."""
        return [len(path) + refused for path, refused in self._walks]

    def measured(self, width: int) -> tuple[list[list[Measured]], list[Measured]]:
        """See `Judged.measured`."""
        nodes = []
        for choices, tokens, parents in zip(self._choices, self._tokens, self.parents, strict=True):
            shown = zip(tokens[:width], parents, strict=False)
            hits = [(token, float(token == choices[above + 1])) for token, above in shown]
            nodes.append([Measured(token, hit, 1.0, hit) for token, hit in hits])
        return nodes, [Measured(token, 1.0) for token in self._granted]

    def sampling_entropy_bits(self, width: int) -> list[list[float]]:
        """See `Judged.sampling_entropy_bits`: each is one token."""
        return [[0.0] * (width + 1)] * len(self._choices)

    @cached_property
    def _choices(self) -> list[list[int]]:
        choices: list[list[int]] = self.likely.tolist()
        return choices

    @cached_property
    def _tokens(self) -> list[list[int]]:
        """Drafted, per row and without padding."""
        return [row[:length] for row, length in zip(self.draft.tokens.tolist(), self.drafted, strict=True)]

    @cached_property
    def _walks(self) -> list[tuple[list[int], bool]]:
        return [_walk(*row) for row in zip(self._choices, self._tokens, self.parents, strict=True)]

    @property
    def _granted(self) -> list[int]:
        ends = (path[-1] if path else -1 for path in self.paths)
        return [choices[end + 1] for choices, end in zip(self._choices, ends, strict=True)]


def _walk(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], bool]:
    """The nodes kept, and whether what follows the last of them was refused. A parent comes before its children."""
    path, last, refused = [], -1, False
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        if parent == last:
            refused = token != choices[last + 1]
            if not refused:
                path.append(node)
                last = node
    return path, refused


def judge(
    verifier: Verifier,
    draft: Draft,
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    seen: Seen,
    uniforms: Uniforms,
) -> Judged:
    """What stays of a draft, given the target's logits [B, K + 1, V] at the root and at every node."""
    certain = draft.probs is None and all(params.greedy and not params.penalised for params in sampling)
    if certain and verifier.greedy_when_certain and (draft.parents is None or verifier.accepts_trees):
        return ByComparison(logits, sampling, draft, argmax(logits.float()))
    probs = probabilities(logits, sampling, seen)
    return ByRule(logits, sampling, draft, probs, verifier.verify(draft, probs, uniforms.on(probs.device)))


def _first_nodes(draft: Draft, width: int) -> Draft:
    """The draft's first `width` nodes; parents come before children, so that is a draft too."""
    probs = None if draft.probs is None else draft.probs[:, :width]
    parents = None if draft.parents is None else draft.parents[:, :width]
    return Draft(draft.tokens[:, :width], draft.lengths, probs, parents)
