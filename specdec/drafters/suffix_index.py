"""Where the text has ended like this before: every earlier occurrence of its last tokens, for each length of match.

A suffix tree answers this with one node per match; here a node is the list of places its occurrences go on from, and
a child is the part of them that one token follows. The request's own tokens need no index: one pass over them is
vectorised, so there is nothing to update, to reset, or to leak. A corpus does not change: its positions are sorted by
what precedes them once, and the occurrences of a match are then neighbours (a suffix array, read backwards).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

BOUNDARY = -1
"""Ends every text of a corpus. Never a token id, so that no match and no continuation crosses it."""

_MOST_PLACES = 8192  # of the request's own last token, the latest; bounds the time, in texts of one token too
_MOST_OCCURRENCES = 1024  # counts of a match that is found more often are estimated from as many
_FIRST_LOOK = 4  # tokens compared at every occurrence; few agree in more


@dataclass(frozen=True)
class Match:
    """Occurrences of the last `length` tokens. following: [N >= 1] indices into `text` right after each of them."""

    length: int
    text: np.ndarray
    following: np.ndarray


def earlier_matches(tokens: np.ndarray, longest: int) -> Iterator[Match]:
    """Earlier occurrences of the last tokens within themselves, [n] int64; the longest match, of at most `longest`
    tokens, first. A length whose occurrences are those of the next one is left out.

    `following` is in descending order, so that the latest occurrence comes first.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])[: -_MOST_PLACES - 1 : -1]
    lengths = _match_lengths(tokens, ends, min(longest, _FIRST_LOOK))
    if longest > _FIRST_LOOK:
        agreeing = np.flatnonzero(lengths == _FIRST_LOOK)[:_MOST_OCCURRENCES]
        lengths[agreeing] = _match_lengths(tokens, ends[agreeing], longest)
    for length in np.flatnonzero(np.bincount(lengths, minlength=1))[::-1].tolist():
        yield Match(length, tokens, ends[lengths >= length][:_MOST_OCCURRENCES] + 1)


def _match_lengths(tokens: np.ndarray, ends: np.ndarray, longest: int) -> np.ndarray:
    """How many tokens up to each of `ends` [N] agree with the last ones, at most `longest`: [N] int64."""
    last = tokens[::-1][:longest]
    places = ends[:, None] - np.arange(len(last))  # [N, longest]
    agree = (tokens.take(places, mode="clip") == last) & (places >= 0)
    return np.where(agree.all(1), len(last), agree.argmin(1))


class CorpusIndex:
    """Texts that do not change, sorted once. texts: token ids, each [n]. longest: the longest match looked for.

    Building sorts n positions log2(longest) times; a lookup is one binary search per token of the match.
    """

    def __init__(self, texts: Sequence[np.ndarray], longest: int) -> None:
        self._longest = longest
        self._text = np.concatenate([part for text in texts for part in (text, [BOUNDARY])]).astype(np.int64)
        self._order = _by_context(self._text, longest)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts, boundaries included."""
        return len(self._text)

    @property
    def num_bytes(self) -> int:
        """Memory the index holds."""
        return self._text.nbytes + self._order.nbytes

    def matches(self, tokens: np.ndarray) -> list[Match]:
        """Occurrences of the last of `tokens`, [n]; see `earlier_matches`. They come in no particular order."""
        found: dict[tuple[int, int], int] = {}  # range of `_order` → the longest match that has it
        low, high = 0, len(self._order)
        for length, token in enumerate(tokens[: -self._longest - 1 : -1].tolist(), start=1):
            low, high = self._narrow(token, length - 1, low, high)
            if low == high:
                break
            found[low, high] = length
        return [Match(length, self._text, self._sample(*span)) for span, length in reversed(found.items())]

    def _narrow(self, token: int, back: int, low: int, high: int) -> tuple[int, int]:
        """The part of a range whose positions have `token` so many tokens before them."""

        def found(position: int) -> int:
            return int(self._text[position - back]) if position >= back else BOUNDARY

        low = bisect_left(self._order, token, low, high, key=found)
        return low, bisect_right(self._order, token, low, high, key=found)

    def _sample(self, low: int, high: int) -> np.ndarray:
        """Evenly spaced where there are too many."""
        step = -(-(high - low) // _MOST_OCCURRENCES)
        following: np.ndarray = self._order[low:high:step] + 1
        return following


def _by_context(text: np.ndarray, depth: int) -> np.ndarray:
    """Positions sorted by the token there, then by the one before it, and so on for at least `depth` tokens: [n].

    By doubling (Manber, Myers 1993): the ranks of twice as long contexts are those of pairs of ranks.
    """
    ranks, known = np.unique(text, return_inverse=True)[1], 1
    while known < depth:
        older = np.concatenate([np.full(min(known, len(text)), -1), ranks[:-known]])
        ranks = np.unique(ranks * (len(text) + 1) + older + 1, return_inverse=True)[1]
        known *= 2
    return np.argsort(ranks, kind="stable")
