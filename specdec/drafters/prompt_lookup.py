"""Prompt lookup: copy what followed the last time the text ended like this.

Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2304.04487. No model, no state, no training: the draft comes out of
the request's own tokens, which is why it shines where output repeats input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.errors import UsageError
from specdec.types import Draft
from specdec.uniforms import Uniforms


class PromptLookupDrafter(Drafter):
    """Drafts the continuation of the latest earlier occurrence of the longest matching suffix.

    The suffix is `max_ngram` tokens long where that occurred before, down to `min_ngram`.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UsageError(f"need 1 <= min_ngram <= max_ngram, not min_ngram={min_ngram}, max_ngram={max_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Chains copied from each request's own tokens; they are deterministic, so one-hot."""
        chains = [self._continuation(tokens, limit) for tokens, limit in zip(context.tokens, max_tokens, strict=True)]
        return Draft.from_chains(chains, context.device)

    def _continuation(self, tokens: np.ndarray, limit: int) -> list[int]:
        start = self._after_match(tokens)
        if start is None or limit < 1:
            return []
        copied: list[int] = tokens[start : start + limit].tolist()
        # A match that reaches the end is a cycle: go on copying from the draft itself, as LZ77 does.
        while len(copied) < limit:
            copied.extend(copied[: limit - len(copied)])
        return copied

    def _after_match(self, tokens: np.ndarray) -> int | None:
        """Index right after the latest earlier occurrence of the longest suffix that has one."""
        # ends: where earlier occurrences of the last n tokens end, for growing n.
        ends, found = np.flatnonzero(tokens[:-1] == tokens[-1]), None
        for n in range(1, self.max_ngram + 1):
            if len(ends) == 0:
                break
            if n >= self.min_ngram:
                found = int(ends[-1]) + 1
            if n < len(tokens):
                ends = ends[ends >= n]
                ends = ends[tokens[ends - n] == tokens[-1 - n]]
        return found
