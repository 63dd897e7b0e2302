"""Suffix decoding: propose what most often followed where the text ended like this before.

Oliaro et al. 2411.04975. Like prompt lookup it copies, out of the request itself and out of a corpus if there is one,
but it weighs: every length of match is a candidate, a longer one may go on for longer, each token counts for the share
of occurrences it followed, and the candidate expected to bring the most accepted tokens is proposed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.corpus import read_corpus
from specdec.drafters.suffix_index import BOUNDARY, CorpusIndex, Match, earlier_matches
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft


@dataclass
class Continuation:
    """A tree of tokens, parents first (a chain where each has one child). score: ΣD, the tokens expected to be kept."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


def expand(match: Match, budget: int, depth: int, min_probability: float, branching: int | None) -> Continuation:
    """The `budget` most probable tokens to follow a match, best first.

    D of a token is D of its parent times the share of the parent's occurrences that it follows, which makes it the
    share of the match's own; below `min_probability` it is pruned. branching: children a token may have; None: any
    number.
    """
    grown, total, kept, order = Continuation(), len(match.following), 0, count()
    heap: list[tuple[int, int, int, tuple[int, ...], np.ndarray]] = []  # -occurrences, age, parent, path, following

    def offer(parent: int, path: tuple[int, ...], following: np.ndarray) -> None:
        for token, places in _children(match.text, following, path, branching):
            if len(places) < min_probability * total:
                break
            heapq.heappush(heap, (-len(places), next(order), parent, (*path, token), places))

    offer(-1, (), match.following)
    while heap and len(grown.tokens) < budget:
        _, _, parent, path, following = heapq.heappop(heap)
        grown.tokens.append(path[-1])
        grown.parents.append(parent)
        kept += len(following)
        if len(path) < depth:
            offer(len(grown.tokens) - 1, path, following)
    grown.score = kept / total
    return grown


def _children(
    text: np.ndarray, following: np.ndarray, path: tuple[int, ...], branching: int | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Tokens that follow, and where their occurrences go on; the most frequent first, ties to the first.

    An occurrence that reaches the end of the text is a cycle: it goes on with the drafted `path`, as in LZ77.
    """
    tokens = text.take(following, mode="clip")
    if following[0] >= len(text):  # only in the request itself, where the latest occurrence comes first
        beyond = following >= len(text)
        tokens[beyond] = np.array(path)[following[beyond] - len(text)]
    counts = Counter(tokens.tolist())
    counts.pop(BOUNDARY, None)
    for token, _ in counts.most_common(branching):
        yield token, following[tokens == token] + 1


class SuffixDrafter(Drafter):
    """The most frequent continuation as a chain, out of the best match.

    A match of m tokens may be continued for `factor` · m + `offset` tokens, as far as each is expected with a
    probability of `min_probability`. Matches have `min_match` to `max_match` tokens. A continuation expected to bring
    fewer than `min_score` accepted tokens, or than may be drafted, is not proposed. corpus: a file, see
    `specdec.drafters.corpus`.

    Drafts are deterministic functions of the request's tokens and the corpus: there is no other state.
    """

    branching: int | None = 1

    def __init__(
        self,
        factor: float = 2.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        min_match: int = 1,
        max_match: int = 32,
        min_score: float = 0.0,
        corpus: str | None = None,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise UsageError(f"need 1 <= min_match <= max_match, not min_match={min_match}, max_match={max_match}")
        if factor < 0:
            raise UsageError(f"factor={factor} would trust a longer match less; use a number of at least 0")
        if not 0 <= min_probability <= 1:
            raise UsageError(f"min_probability={min_probability} is not a probability; use a value in [0, 1]")
        self.factor = factor
        self.offset = offset
        self.min_probability = min_probability
        self.min_match = min_match
        self.max_match = max_match
        self.min_score = min_score
        self.corpus = corpus
        self._index: CorpusIndex | None = None

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Read the corpus and index it, in the target's tokens."""
        if self.corpus is not None:
            self._index = CorpusIndex(read_corpus(self.corpus, tokenizer, target.vocab_size), self.max_match)

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """See `Drafter.propose`; deterministic, so one-hot."""
        found = [self._best(tokens, limit) for tokens, limit in zip(context.tokens, max_tokens, strict=True)]
        return self._draft(found, context.device)

    @property
    def num_bytes(self) -> int:
        """The corpus and its index."""
        return 0 if self._index is None else self._index.num_bytes

    def _best(self, tokens: np.ndarray, depth: int) -> Continuation:
        """The continuation with the highest score, over lengths of match and over the request and the corpus."""
        best, most = Continuation(), self._most_tokens(depth)
        for match in self._matches(tokens):
            budget = int(min(most, self.factor * match.length + self.offset))
            if best.score >= budget:  # no token counts for more than one, and shorter matches have no larger budget
                break
            grown = expand(match, budget, depth, self.min_probability, self.branching)
            best = grown if grown.score > best.score else best
        return best if best.score >= min(self.min_score, depth) else Continuation()

    def _matches(self, tokens: np.ndarray) -> Iterator[Match]:
        """From the longest down; of equally long ones the request's own come first."""
        sources = [earlier_matches(tokens, self.max_match)]
        if self._index is not None:
            sources.append(iter(self._index.matches(tokens)))
        for match in heapq.merge(*sources, key=lambda match: -match.length):
            if match.length < self.min_match:
                return
            yield match

    def _most_tokens(self, depth: int) -> int:
        return depth

    def _draft(self, found: Sequence[Continuation], device: torch.device) -> Draft:
        return Draft.from_chains([continuation.tokens for continuation in found], device)


class SuffixTreeDrafter(SuffixDrafter):
    """The same with every continuation that is frequent enough: a tree of at most `num_nodes` tokens, best first."""

    proposes_trees = True
    branching = None

    def __init__(
        self,
        num_nodes: int = 16,
        factor: float = 2.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        min_match: int = 1,
        max_match: int = 32,
        min_score: float = 0.0,
        corpus: str | None = None,
    ) -> None:
        super().__init__(factor, offset, min_probability, min_match, max_match, min_score, corpus)
        if num_nodes < 1:
            raise UsageError(f"num_nodes={num_nodes} leaves nothing to draft; use at least 1")
        self.num_nodes = num_nodes

    def max_nodes(self, depth: int) -> int:
        """See `Drafter.max_nodes`."""
        return self._most_tokens(depth)

    def _most_tokens(self, depth: int) -> int:
        return self.num_nodes if depth > 0 else 0

    def _draft(self, found: Sequence[Continuation], device: torch.device) -> Draft:
        chains = super()._draft(found, device)
        parents = Draft.from_chains([continuation.parents for continuation in found], device).tokens
        return replace(chains, parents=parents)
