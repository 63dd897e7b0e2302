"""From the target's logits to what stays of a draft, and what is written down about it.

A verifier decides from probabilities. Where nothing is left to chance, that is at temperature 0 with a deterministic
draft, every exact rule comes down to comparing tokens; that is done here, on the host, with the K + 1 choices alone.
Writing one-hot distributions over the vocabulary, only for a rule to find the ones again, would cost more than
everything else a step does outside its forward.

What was judged lies where the target computes. `Judged.read` brings it to the host, off a CPU in one copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.decoding.reading import read
from specdec.sampling.distributions import (
    Seen,
    argmax,
    entropy_bits,
    expected_acceptance,
    logits_entropy_nats,
    parent_probs,
    probabilities,
    token_probs,
)
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, DeferredError, Draft, SamplingParams, Verdict
from specdec.verifiers.base import Verifier

Found = Mapping[str, Tensor]
"""Tensors of one step by name, on the host."""


class Measured(NamedTuple):
    """One token as it was judged. What does not apply to a token drawn from the target is None."""

    token_id: int
    target_prob: float
    draft_prob: float | None = None
    expected_acceptance: float | None = None


class Ruling(NamedTuple):
    """What stays of a batch's drafts, on the host, one entry per row.

    tokens: drafted, without padding. parents: index of each node's parent, -1 for a child of the root; longer rows end
    in padding. paths: accepted nodes from the root down. num_examined: see `Verdict`. granted: drawn from the target.
    """

    tokens: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    paths: Sequence[Sequence[int]]
    num_examined: Sequence[int]
    granted: Sequence[int]

    @property
    def ends(self) -> list[int]:
        """The last accepted node, -1 where that is the root."""
        return [path[-1] if path else -1 for path in self.paths]

    @property
    def examined(self) -> list[list[int]]:
        """The accepted nodes, and the one that was refused; in a tree the first child stands for all of a depth."""
        return [
            [*path, parents.index(end)] if count > len(path) else [*path]
            for path, parents, end, count in zip(self.paths, self.parents, self.ends, self.num_examined, strict=True)
        ]

    @property
    def width(self) -> int:
        """Nodes up to the last one examined in any row; nobody asks for what lies behind."""
        return 1 + max((node for nodes in self.examined for node in nodes), default=-1)

    def verdict(self) -> Verdict:
        """As a verifier gives it, on the host."""
        width = max(map(len, self.paths))
        padded = [[*path, *[PADDING] * (width - len(path))] for path in self.paths]
        counts = [len(path) for path in self.paths]
        path = torch.tensor(padded, dtype=torch.long).reshape(len(padded), width)
        return Verdict(path, torch.tensor(counts), torch.tensor(self.num_examined), torch.tensor(self.granted))


class Judged(ABC):
    """A step's decision, where the target computes.

    logits: [B, K + 1, V], the target's.
    """

    logits: Tensor
    sampling: Sequence[SamplingParams]
    draft: Draft

    @abstractmethod
    def decision(self) -> dict[str, Tensor]:
        """What the ruling is made of, besides the draft."""

    @abstractmethod
    def measures(self, width: int) -> dict[str, Tensor]:
        """What is written down about the first `width` nodes, the root before them, and the granted token."""

    @abstractmethod
    def ruling(self, found: Found, tokens: list[list[int]], parents: Sequence[Sequence[int]]) -> Ruling:
        """The ruling, from `decision` on the host and the draft as `Ruling` has it."""

    @abstractmethod
    def measured(self, ruling: Ruling, found: Found) -> tuple[list[list[Measured]], list[Measured]]:
        """Each row's first nodes, and the token it was granted from the target; from what was read."""

    @abstractmethod
    def sampling_bits(self, found: Found, model_bits: list[list[float]]) -> list[list[float]]:
        """Entropy of what is sampled from, at the root and each row's first nodes; from what was read."""

    @property
    def deferred(self) -> tuple[DeferredError, ...]:
        """What may be wrong with the draft."""
        return self.draft.deferred

    def read(self) -> tuple[Ruling, dict[str, Tensor]]:
        """The ruling, and everything it and `measures` are made of, as far as any row was examined.

        Raises what was deferred.

        On a CPU, where looking is free, the ruling comes first and nothing is measured that nobody asks for. Elsewhere
        every node is measured, so as to wait for the device once.
        """
        found = self.decision()
        found["tokens"] = self.draft.tokens
        if self.draft.parents is not None:
            found["parents"] = self.draft.parents
        if self.logits.is_cpu:
            ruling = self._ruling(found)
            found.update(self.measures(ruling.width))
            return ruling, found
        found.update(self.measures(self.draft.width))
        found.update({f"deferred {number}": error.found.any() for number, error in enumerate(self.deferred)})
        found = read(found)
        for number, deferred in enumerate(self.deferred):
            if found[f"deferred {number}"]:
                raise deferred.error
        return self._ruling(found), found

    def _ruling(self, found: Found) -> Ruling:
        lengths = self.draft.lengths.tolist()
        tokens = [row[:length] for row, length in zip(found["tokens"].tolist(), lengths, strict=True)]
        chain = [range(-1, self.draft.width - 1)] * len(lengths)
        return self.ruling(found, tokens, found["parents"].tolist() if "parents" in found else chain)

    def _model_nats(self, width: int) -> dict[str, Tensor]:
        return {"model_nats": logits_entropy_nats(self.logits[:, : width + 1])}


@dataclass(frozen=True)
class ByRule(Judged):
    """Decided by a verifier from target_probs [B, K + 1, V]."""

    logits: Tensor
    sampling: Sequence[SamplingParams]
    draft: Draft
    target_probs: Tensor
    verdict: Verdict

    @property
    def deferred(self) -> tuple[DeferredError, ...]:
        """See `Judged.deferred`."""
        return self.draft.deferred + self.verdict.deferred

    def decision(self) -> dict[str, Tensor]:
        """See `Judged.decision`."""
        fields = ("path", "num_accepted", "num_examined", "next_token")
        return {name: getattr(self.verdict, name) for name in fields}

    def ruling(self, found: Found, tokens: list[list[int]], parents: Sequence[Sequence[int]]) -> Ruling:
        """See `Judged.ruling`."""
        kept = zip(found["path"].tolist(), found["num_accepted"].tolist(), strict=True)
        paths = [row[:count] for row, count in kept]
        return Ruling(tokens, parents, paths, found["num_examined"].tolist(), found["next_token"].tolist())

    def measures(self, width: int) -> dict[str, Tensor]:
        """See `Judged.measures`. Where no option changes it, what is sampled from is the model's own distribution."""
        draft, probs = _first_nodes(self.draft, width), self.target_probs
        found = {"target": token_probs(parent_probs(draft, probs), draft.tokens), "granted": self._granted_probs()}
        if draft.probs is not None:
            found["drafted"] = token_probs(draft.probs, draft.tokens)
            found["expected"] = expected_acceptance(draft, probs)
        if not all(params.untouched for params in self.sampling):
            found["sampling_bits"] = entropy_bits(probs[:, : width + 1])
        return found | self._model_nats(width)

    def _granted_probs(self) -> Tensor:
        """What the target had for the token it granted: [B]."""
        verdict, probs = self.verdict, self.target_probs
        path = F.pad(verdict.path, (1, 0), value=-1)  # [B, D + 1], from the root
        last = path.gather(1, verdict.num_accepted[:, None])[:, 0]
        return probs[torch.arange(len(probs), device=probs.device), last + 1, verdict.next_token]

    def measured(self, ruling: Ruling, found: Found) -> tuple[list[list[Measured]], list[Measured]]:
        """See `Judged.measured`."""
        target = found["target"]
        drafted, expected = found.get("drafted", torch.ones_like(target)), found.get("expected", target)
        columns = zip(ruling.tokens, target.tolist(), drafted.tolist(), expected.tolist(), strict=True)
        nodes = [[Measured(*node) for node in zip(*row, strict=False)] for row in columns]
        granted = zip(ruling.granted, found["granted"].tolist(), strict=True)
        return nodes, [Measured(token, prob) for token, prob in granted]

    def sampling_bits(self, found: Found, model_bits: list[list[float]]) -> list[list[float]]:
        """See `Judged.sampling_bits`."""
        return found["sampling_bits"].tolist() if "sampling_bits" in found else model_bits


@dataclass(frozen=True)
class ByComparison(Judged):
    """Decided by comparing a deterministic draft with likely [B, K + 1], the target's choices at temperature 0.

    From the root, the first child that is the target's choice is kept, as `GreedyTreeVerifier` does it.
    """

    logits: Tensor
    sampling: Sequence[SamplingParams]
    draft: Draft
    likely: Tensor

    def decision(self) -> dict[str, Tensor]:
        """See `Judged.decision`."""
        return {"likely": self.likely}

    def ruling(self, found: Found, tokens: list[list[int]], parents: Sequence[Sequence[int]]) -> Ruling:
        """See `Judged.ruling`."""
        choices = found["likely"].tolist()
        walks = [_walk(*row) for row in zip(choices, tokens, parents, strict=True)]
        paths = [path for path, _ in walks]
        granted = [row[path[-1] + 1 if path else 0] for row, path in zip(choices, paths, strict=True)]
        return Ruling(tokens, parents, paths, [len(path) + refused for path, refused in walks], granted)

    def measures(self, width: int) -> dict[str, Tensor]:
        """See `Judged.measures`."""
        return self._model_nats(width)

    def measured(self, ruling: Ruling, found: Found) -> tuple[list[list[Measured]], list[Measured]]:
        """See `Judged.measured`."""
        nodes = []
        for choices, tokens, parents in zip(found["likely"].tolist(), ruling.tokens, ruling.parents, strict=True):
            pairs = zip(tokens[: ruling.width], parents, strict=False)
            hits = [(token, float(token == choices[above + 1])) for token, above in pairs]
            nodes.append([Measured(token, hit, 1.0, hit) for token, hit in hits])
        return nodes, [Measured(token, 1.0) for token in ruling.granted]

    def sampling_bits(self, found: Found, model_bits: list[list[float]]) -> list[list[float]]:
        """See `Judged.sampling_bits`: each is one token."""
        return [[0.0] * len(row) for row in model_bits]


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
