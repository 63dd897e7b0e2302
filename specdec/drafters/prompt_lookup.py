"""Prompt lookup: copy what followed the last time the text ended like this.

Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2304.04487. No model, no state, no training: the draft comes out of
the request's own tokens, which is why it shines where output repeats input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.errors import UsageError
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft


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
        text, width = tokens.tobytes(), tokens.itemsize
        for n in range(min(self.max_ngram, len(tokens) - 1), self.min_ngram - 1, -1):
            end = len(text) - width  # an occurrence may overlap the suffix, and ends before it
            while (start := text.rfind(text[-n * width :], 0, end)) >= 0:
                if start % width == 0:
                    return start // width + n
                end = start + n * width - 1  # between two tokens: look further back
        return None
