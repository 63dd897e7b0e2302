"""The exactness oracle: the joint distribution a verifier emits, integrated instead of sampled.

A *language* gives the next-token distribution after any prefix. On a vocabulary of two to four tokens every draft can
be listed with its probability, and for each of them the verifier is a step function of its uniforms: the unit cube
falls into boxes on which the verdict is constant, see `specdec.testing.boxes`.

What it emits is completed with the target to one token beyond the deepest draft and compared with the target's own
joint. A correct rule agrees to 1e-12; `largest_error` asks that of languages and draft shapes of several kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.testing.boxes import STEPS, Leaves, Outcome, integrate
from specdec.testing.languages import (
    Language,
    Siblings,
    Tokens,
    greedy_language,
    joint,
    lattice_language,
    random_language,
    top_k,
    with_replacement,
    without_replacement,
)
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import SiblingDraws, Verifier

Submit = Callable[[Tokens], int]

_ROWS_AT_ONCE = 1 << 17
TREES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (4, (-1, -1)),
    (3, (-1, -1, -1)),
    (3, (-1, -1, 0)),
    (2, (-1, 0, -1, 2)),
    (2, (-1, -1, 1, 1)),
    (2, (-1, 0, 0, 1)),
)
"""Vocabulary and shape, as each node's parent: two and three drafts at the root; a grandchild of the first child; two
chains; two drafts below the second child, and below the first, there with a grandchild."""
DRAWS: dict[SiblingDraws, list[Siblings]] = {
    SiblingDraws.ANY: [with_replacement, without_replacement, top_k],
    SiblingDraws.INDEPENDENT: [with_replacement, top_k],
    SiblingDraws.DISTINCT: [without_replacement, top_k],
}
"""What a rule is asked to judge, by what it takes for granted."""


# --- Drafts -----------------------------------------------------------------------------------------------------------


class LatticeUniforms(Uniforms):
    """Uniforms that are given: [B, N] per purpose."""

    def __init__(self, values: dict[Purpose, Tensor]) -> None:
        batch = len(next(iter(values.values())))
        super().__init__([0] * batch, [0] * batch)
        self.values = values

    def draw(self, purpose: Purpose, first_node: int, num_nodes: int) -> Tensor:
        """See `Uniforms.draw`."""
        return self.values[purpose][:, first_node : first_node + num_nodes]

    def choose(self, probs: Tensor, node: int) -> Tensor:
        """By the inverse CDF in place of the race, whose outcomes are no boxes: one uniform per position."""
        return sample(probs, self.draw(Purpose.COUPLED, node, 1)[:, 0])

    def select(self, rows: Sequence[int]) -> Uniforms:
        """See `Uniforms.select`."""
        return LatticeUniforms({purpose: values[list(rows)] for purpose, values in self.values.items()})


def build_draft(
    chains: Sequence[Tokens],
    language: Language | None,
    vocab_size: int,
    parents: Sequence[int] | None = None,
    siblings: Siblings = with_replacement,
) -> Draft:
    """Ragged chains, or trees of one shape, as a batch, with the distributions they were drawn from."""
    draft = Draft.from_chains(chains)
    if parents is not None:
        draft = replace(draft, parents=torch.tensor(parents).expand(len(chains), -1))
    if language is None:
        return draft
    probs = torch.full((len(chains), draft.width, vocab_size), float("nan"), dtype=torch.float64)  # padding is poison
    for row, tokens in enumerate(chains):
        for node in range(len(tokens)):
            probs[row, node] = torch.from_numpy(_drawn_from(tokens, node, language, parents, siblings))
    return replace(draft, probs=probs)


def build_target(
    chains: Sequence[Tokens], language: Language, width: int, parents: Sequence[int] | None = None
) -> Tensor:
    """target_probs [B, K + 1, V] float64; past a row's own length it is poison, which must not be looked at."""
    out = torch.full((len(chains), width + 1, len(language(()))), float("nan"), dtype=torch.float64)
    for row, tokens in enumerate(chains):
        for node in range(-1, len(tokens)):
            out[row, node + 1] = torch.from_numpy(language(_path_to(tokens, node, parents)))
    return out


def _path_to(tokens: Tokens, node: int, parents: Sequence[int] | None) -> Tokens:
    """The tokens from the root's child down to a node; none for the root, -1."""
    if parents is None:
        return tokens[: node + 1]
    return (*_path_to(tokens, parents[node], parents), tokens[node]) if node >= 0 else ()


def _drawn_from(
    tokens: Tokens, node: int, language: Language, parents: Sequence[int] | None, siblings: Siblings
) -> np.ndarray:
    """Distribution of a node's token given everything drafted before it."""
    if parents is None:
        return language(tokens[:node])
    earlier = tuple(tokens[other] for other in range(node) if parents[other] == parents[node])
    return siblings(language(_path_to(tokens, parents[node], parents)), earlier)


def _all_drafts(language: Language, shape: Sequence[int], siblings: Siblings) -> dict[Tokens, float]:
    """Every draft of a shape that has a chance, with it."""
    drafts: dict[Tokens, float] = {(): 1.0}
    for node in range(len(shape)):
        grown: dict[Tokens, float] = {}
        for tokens, chance in drafts.items():
            probs = _drawn_from(tokens, node, language, shape, siblings)
            grown |= {(*tokens, int(token)): chance * probs[token] for token in probs.nonzero()[0]}
        drafts = grown
    return drafts


# --- Integration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emission:
    """What one step emits, over all drafts and all uniforms.

    joint: [V] * (depth + 1), emitted tokens completed with the target. Means are per step. forbidden: for some
    uniforms, be they of measure 2^-53, a token was emitted that the target never does.
    """

    joint: np.ndarray
    mean_accepted: float
    mean_examined: float
    forbidden: bool = False


def emission(
    verifier: Verifier,
    target: Language,
    draft: Language,
    gamma: int,
    *,
    submit: Submit = len,
    deterministic: Tokens | None = None,
    parents: Sequence[int] | None = None,
    siblings: Siblings = with_replacement,
) -> Emission:
    """What one step of the verifier emits, over all drafts and all uniforms.

    gamma: length of chains. submit: how many tokens of a drafted chain are handed to the verifier. deterministic: this
    draft and no probabilities, in place of drafts from `draft`. parents: trees of this shape in place of chains, each
    node's siblings drawn as `siblings` says; with `top_k` they are deterministic too.
    """
    shape = range(-1, gamma - 1) if parents is None else parents
    drafts = {deterministic: 1.0} if deterministic else _all_drafts(draft, shape, siblings)
    one_hot = deterministic is not None or siblings is top_k
    submitted = [tokens[: submit(tokens)] for tokens in drafts]
    vocab_size = len(target(()))
    batch = build_draft(submitted, None if one_hot else draft, vocab_size, parents, siblings)
    probs = build_target(submitted, target, batch.width, parents)
    leaves = integrate(_outcome(verifier, batch, probs), len(drafts), 3 * (batch.width + 1))
    depth = int(batch.node_depths().amax()) if parents is not None else gamma
    return _summed(leaves, batch, list(drafts.values()), target, depth)


def _outcome(verifier: Verifier, draft: Draft, target_probs: Tensor) -> Outcome:
    def judge(case: Tensor, lattice: Tensor) -> Tensor:
        accept, granted, coupled = (lattice.double() / STEPS).chunk(3, dim=1)
        uniforms = LatticeUniforms({Purpose.ACCEPT: accept, Purpose.TARGET: granted, Purpose.COUPLED: coupled})
        probs, parents = (None if part is None else part[case] for part in (draft.probs, draft.parents))
        drafts = Draft(draft.tokens[case], draft.lengths[case], probs, parents)
        verdict = verifier.verify(drafts, target_probs[case], uniforms)
        path = F.pad(verdict.path, (0, draft.width - verdict.path.shape[1]), value=PADDING)
        counts = torch.stack([verdict.num_accepted, verdict.num_examined, verdict.next_token], dim=1)
        return torch.cat([path, counts], dim=1)

    def outcome(case: Tensor, lattice: Tensor) -> Tensor:
        parts = zip(torch.split(case, _ROWS_AT_ONCE), torch.split(lattice, _ROWS_AT_ONCE), strict=True)
        return torch.cat([judge(*part) for part in parts])

    return outcome


def _summed(leaves: Leaves, draft: Draft, chances: Sequence[float], target: Language, depth: int) -> Emission:
    weights = (torch.tensor(chances, dtype=torch.float64)[leaves.case] * leaves.volume).numpy()
    *path, accepted, examined, next_token = leaves.outcome.unbind(1)
    kept = torch.stack(path, dim=1) if path else leaves.outcome[:, :0]
    verdict = Verdict(kept, accepted, examined, next_token)
    totals: dict[Tokens, float] = {}
    emitted = emitted_tokens(replace(draft, tokens=draft.tokens[leaves.case]), verdict)
    for tokens, weight in zip(emitted, weights, strict=True):
        totals[tokens] = totals.get(tokens, 0.0) + float(weight)
    out = np.zeros((len(target(())),) * (depth + 1))
    for tokens, weight in totals.items():
        out[tokens] += weight * joint(_after(target, tokens), depth + 1 - len(tokens))
    forbidden = any(_chance(target, tokens) == 0 for tokens in totals)
    return Emission(out, float(accepted.numpy() @ weights), float(examined.numpy() @ weights), forbidden)


def emitted_tokens(draft: Draft, verdict: Verdict) -> list[Tokens]:
    """Accepted tokens along each path, and the one drawn after them."""
    out = []
    columns = (verdict.path, draft.tokens, verdict.num_accepted, verdict.next_token)
    for path, tokens, num_accepted, next_token in zip(*(column.tolist() for column in columns), strict=True):
        kept = [tokens[node] for node in path if node != PADDING]
        if len(kept) != num_accepted:
            raise ValueError(f"the path {path} has {len(kept)} nodes, and num_accepted is {num_accepted}")
        out.append((*kept, next_token))
    return out


def _after(language: Language, head: Tokens) -> Language:
    return lambda suffix: language((*head, *suffix))


def _chance(language: Language, chain: Tokens) -> float:
    return float(np.prod([language(chain[:i])[token] for i, token in enumerate(chain)]))


# --- Verdicts on rules ------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Arguments of `emission` for one question."""

    target: Language
    draft: Language
    gamma: int
    parents: Sequence[int] | None = None
    siblings: Siblings = with_replacement
    deterministic: Tokens | None = None


def cases_for(verifier: Verifier) -> Iterable[Case]:
    """What a rule is asked by `largest_error`, as far as it declares that it can answer."""
    new_target = greedy_language if verifier.greedy_only else random_language
    for vocab_size, gamma in [(2, 1), (2, 3), (3, 2), (4, 1)]:
        for seed, new_draft in [(gamma, random_language), (10 + gamma, lattice_language)]:
            yield Case(new_target(vocab_size, seed), new_draft(vocab_size, 100 + seed), gamma)
    yield Case(new_target(3, 7), new_target(3, 7), 2)
    yield Case(new_target(3, 8), new_target(3, 8), 2, deterministic=(2, 0))
    if not verifier.greedy_only:
        yield Case(lattice_language(3, 9), lattice_language(3, 10), 2)
    for vocab_size, parents in TREES if verifier.accepts_trees else ():
        for siblings in DRAWS[verifier.siblings]:
            yield Case(new_target(vocab_size, 20), random_language(vocab_size, 21), 0, parents, siblings)


def largest_error(verifier: Verifier) -> float:
    """The largest total variation between what a rule emits and the target, over `cases_for` it.

    Below 1e-12 for a lossless rule; infinite where a token the target never emits can be emitted. A lossy rule's
    loss depends on the languages: ask `emission` about your own.
    """
    errors = []
    for case in cases_for(verifier):
        found = emission(verifier, **case._asdict())
        error = total_variation(found.joint, joint(case.target, found.joint.ndim))
        errors.append(math.inf if found.forbidden else error)
    return max(errors)


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Half the L1 distance of two distributions."""
    return float(np.abs(first - second).sum() / 2)


def chi_square_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's test that counts come from probs; cells of probability 0 must be empty."""
    if counts[probs == 0].sum() > 0:
        raise ValueError("an outcome of probability 0 was seen")
    expected = (probs * counts.sum())[probs > 0]
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
