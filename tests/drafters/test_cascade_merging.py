"""One draft out of two parts' drafts: which rows, how wide, one-hot or sampled, chains or trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.cascade import CascadeDrafter
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, SamplingParams


class Says(Drafter):
    """Always the same draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        rows = list(context.slots)
        probs = None if self.draft.probs is None else self.draft.probs[rows]
        parents = None if self.draft.parents is None else self.draft.parents[rows]
        return Draft(self.draft.tokens[rows], self.draft.lengths[rows], probs, parents)


def merged(first: Draft, second: Draft, min_tokens: int = 1, limit: int = 9) -> Draft:
    batch = len(first.tokens)
    context = DraftContext(
        slots=tuple(range(batch)),
        request_ids=tuple("abcd"[:batch]),
        tokens=(np.zeros(3, dtype=np.int64),) * batch,
        num_prompt=(1,) * batch,
        sampling=(SamplingParams(),) * batch,
        vocab_size=6,
        device=torch.device("cpu"),
    )
    drafter = CascadeDrafter(Says(first), Says(second), min_tokens)
    return drafter.propose(
        context, [limit] * batch, lambda *_: torch.zeros(batch).bool(), Uniforms([0] * batch, [0] * batch)
    )


def test_drafts_of_different_widths_are_merged() -> None:
    first, second = Draft.from_chains([[1, 2], [], [3], []]), Draft.from_chains([[5], [4, 5, 5], [4, 4], []])
    assert merged(first, second).tokens.tolist() == [[1, 2, -1], [4, 5, 5], [3, -1, -1], [-1, -1, -1]]
    assert merged(first, second).lengths.tolist() == [2, 3, 1, 0]
    assert merged(first, second, min_tokens=2).tokens.tolist()[2] == [4, 4, -1]
    assert merged(second, first, min_tokens=3).tokens.tolist() == [[1, 2, -1], [4, 5, 5], [3, -1, -1], [-1, -1, -1]]
    assert merged(first, second, min_tokens=2, limit=1).tokens.tolist()[2] == [3, -1, -1], "all that was asked for"


def test_a_short_draft_stands_where_the_other_part_is_silent() -> None:
    draft = merged(Draft.from_chains([[1], [2, 3]]), Draft.from_chains([[], []]), min_tokens=3)
    assert draft.tokens.tolist() == [[1, -1], [2, 3]]


def test_deterministic_rows_are_one_hot_beside_sampled_ones() -> None:
    probs = torch.rand(2, 2, 6)
    draft = merged(Draft.from_chains([[1], []]), replace(Draft.from_chains([[4, 4], [5, 3]]), probs=probs))
    assert draft.probs is not None
    assert draft.probs[0, 0].tolist() == [0, 1, 0, 0, 0, 0]
    torch.testing.assert_close(draft.probs[1], probs[1])


def test_chains_are_trees_beside_trees() -> None:
    tree = replace(Draft.from_chains([[4, 5, 3], [4, 5, 3]]), parents=torch.tensor([[-1, -1, 0]] * 2))
    draft = merged(Draft.from_chains([[1, 2], []]), tree)
    assert draft.parents is not None
    assert draft.parents.tolist() == [[-1, 0, -1], [-1, -1, 0]]
    assert draft.node_depths()[0, :2].tolist() == [1, 2]
