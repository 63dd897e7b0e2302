"""Prompt lookup: which occurrence, how much of it, and never more than can be emitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.base import DraftContext
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import UsageError
from specdec.sampling.uniforms import Uniforms
from specdec.types import SamplingParams


def propose(tokens: list[list[int]], limits: list[int], **options: int) -> list[list[int]]:
    rows = len(tokens)
    context = DraftContext(
        slots=tuple(range(rows)),
        request_ids=tuple(str(row) for row in range(rows)),
        tokens=tuple(np.array(row) for row in tokens),
        num_prompt=(1,) * rows,
        sampling=(SamplingParams(),) * rows,
        vocab_size=100,
        device=torch.device("cpu"),
    )
    draft = PromptLookupDrafter(**options).propose(
        context, limits, lambda *_: torch.zeros(rows), Uniforms([0] * rows, [0] * rows)
    )
    assert draft.probs is None, "deterministic drafts are one-hot"
    return [row[:length] for row, length in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


def reference(tokens: list[int], limit: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The definition, token by token."""
    for n in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                grown = list(tokens)
                for i in range(limit):
                    grown.append(grown[start + n + i])
                return grown[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 12), st.integers(1, 4), st.integers(1, 4))
def test_it_is_the_definition(tokens: list[int], limit: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert propose([tokens], [limit], max_ngram=high, min_ngram=low) == [reference(tokens, limit, high, low)]


def test_the_latest_of_the_longest_matches_is_copied() -> None:
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 5, 2, 3]
    assert propose([tokens], [2]) == [[8, 5]]  # "2 3" occurs twice; "3" alone would match too
    assert propose([[1, 2, 3, 7, 9, 3, 1, 2, 3]], [1]) == [[7]]  # three tokens beat the later single one


def test_a_cycle_is_carried_on_beyond_the_end_of_the_text() -> None:
    assert propose([[5, 1, 2, 1, 2]], [6]) == [[1, 2, 1, 2, 1, 2]]


def test_nothing_found_is_an_empty_row_beside_others() -> None:
    assert propose([[1, 2, 3], [4, 4], [7]], [3, 2, 3]) == [[], [4, 4], []]


def test_ids_that_crashed_another_lookup() -> None:
    assert propose([[5, 6, 7, 8, 9, 10, 11, 7, 8]], [2]) == [[9, 10]]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_impossible_ngrams_are_refused(low: int, high: int) -> None:
    with pytest.raises(UsageError, match=f"min_ngram={low}, max_ngram={high}"):
        PromptLookupDrafter(high, low)
