"""Renaming tokens changes no verdict: what a rule decides over 2K + 1 names it decides over the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.judging import Certain, Judged, judge
from specdec.sampling import one_hot
from specdec.types import PADDING, Draft, SamplingParams
from specdec.uniforms import Uniforms
from specdec.verifiers.base import Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.multi_draft_k_seq import KSeqVerifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.multi_draft_without_replacement import WithoutReplacementVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.synthetic import SyntheticVerifier
from specdec.verifiers.traversal import TraversalVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from specdec.verifiers.typical import TypicalVerifier

VOCABULARY = 1000
NOTHING = (np.array([], dtype=np.int64),) * 2


def seen(row: int, position: int) -> tuple[np.ndarray, np.ndarray]:
    return NOTHING


def random_step(seed: int, *, tree: bool = False) -> tuple[Draft, torch.Tensor]:
    """Drafts that are right about half of the time, ragged, over logits with a clear maximum."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = 4, seed % 5
    logits = torch.randn(batch, width + 1, VOCABULARY, generator=generator)
    choices = logits.argmax(-1)
    parents = torch.arange(-1, width - 1).repeat(batch, 1)
    if tree and width > 1:
        parents[:, 1::2] = parents[:, 0:-1:2][:, : parents[:, 1::2].shape[1]]  # every second node is a sibling
    right = choices.gather(1, parents + 1)
    wrong = torch.randint(0, VOCABULARY, (batch, width), generator=generator)
    tokens = torch.where(torch.rand(batch, width, generator=generator) < 0.6, right, wrong)
    lengths = torch.randint(0, width + 1, (batch,), generator=generator)
    inside = torch.arange(width) < lengths[:, None]
    kept = torch.where(inside, parents, PADDING) if tree else None
    return Draft(torch.where(inside, tokens, PADDING), lengths, None, kept), logits


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        (GreedyVerifier(), False),
        (RejectionVerifier(), False),
        (SyntheticVerifier(0.5), False),
        (GreedyTreeVerifier(), True),
        (GreedyTreeVerifier(), False),
        (BlockVerifier(), False),
        (CoupledVerifier(), False),
        (TypicalVerifier(), False),
        (WithReplacementVerifier(), True),
        (WithoutReplacementVerifier(), True),
        (TopKVerifier(), True),
        (KSeqVerifier(), True),
        (TraversalVerifier(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_renamed_step_is_judged_as_the_written_out_one(seed: int, verifier: Verifier, tree: bool) -> None:
    draft, logits = random_step(seed, tree=tree)
    uniforms = Uniforms(range(4), [seed] * 4, positions=range(4))
    renamed = judge(draft, logits, [SamplingParams()] * 4, seen)
    written = Judged(draft, one_hot(logits.argmax(-1), VOCABULARY), None)
    assert isinstance(renamed, Certain)
    verdicts = [
        judged.translated(verifier.verify(judged.draft, judged.target_probs, uniforms)) for judged in (renamed, written)
    ]
    for field in ("path", "num_accepted", "num_examined", "next_token"):
        assert torch.equal(getattr(verdicts[0], field), getattr(verdicts[1], field)), field
    kept = int(verdicts[0].num_examined.max())
    names = verifier.verify(renamed.draft, renamed.target_probs, uniforms)
    assert _inside(renamed.measured(names, kept), draft) == _inside(written.measured(verdicts[1], kept), draft)


def _inside(measured: tuple[list, list], draft: Draft) -> tuple[list, list]:
    """Without the padding nodes, which nobody records."""
    nodes, granted = measured
    return [row[:length] for row, length in zip(nodes, draft.lengths.tolist(), strict=True)], granted


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.2), SamplingParams(top_k=3, seed=1)]
)
def test_only_certain_steps_are_renamed(params: SamplingParams) -> None:
    draft, logits = random_step(3)
    judged = judge(draft, logits, [params] * 4, seen)
    assert isinstance(judged, Certain) == (params.greedy and not params.penalised)
    torch.testing.assert_close(judged.target_probs.sum(-1), torch.ones(4, draft.width + 1))


def test_arguments_are_left_alone() -> None:
    draft, logits = random_step(4)
    before = (draft.tokens.clone(), draft.lengths.clone(), logits.clone())
    judge(draft, logits, [SamplingParams()] * 4, seen)
    assert all(torch.equal(a, b) for a, b in zip(before, (draft.tokens, draft.lengths, logits), strict=True))
