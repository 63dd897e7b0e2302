"""Comparing tokens decides what the rule would have decided from one-hot distributions over the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.decoding.judging import ByComparison, ByRule, judge
from specdec.errors import UsageError
from specdec.sampling.distributions import in_bits, one_hot
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, SamplingParams
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
def test_comparing_tokens_is_what_the_rule_would_decide(seed: int, verifier: Verifier, tree: bool) -> None:
    draft, logits = random_step(seed, tree=tree)
    uniforms = Uniforms(range(4), [seed] * 4, positions=range(4))
    compared = judge(verifier, draft, logits, [SamplingParams()] * 4, seen, uniforms)
    probs = one_hot(logits.argmax(-1), VOCABULARY)
    ruled = ByRule(logits, [SamplingParams()] * 4, draft, probs, verifier.verify(draft, probs, uniforms))
    assert isinstance(compared, ByComparison)
    (by_comparison, one), (by_rule, other) = compared.read(), ruled.read()
    assert by_comparison == by_rule
    assert compared.measured(by_comparison, one) == ruled.measured(by_rule, other)
    bits = in_bits(one["model_nats"])
    assert compared.sampling_bits(one, bits) == ruled.sampling_bits(other, bits)


def test_a_ruling_tells_the_verdict_it_was_made_of() -> None:
    draft, logits = random_step(9)
    verdict = GreedyVerifier().verify(draft, one_hot(logits.argmax(-1), VOCABULARY), Uniforms(range(4), [0] * 4))
    ruling, _ = ByRule(logits, [SamplingParams()] * 4, draft, logits.softmax(-1), verdict).read()
    told = ruling.verdict()
    for field in ("num_accepted", "num_examined", "next_token"):
        assert torch.equal(getattr(told, field), getattr(verdict, field)), field
    assert torch.equal(told.path, verdict.path[:, : told.path.shape[1]])
    assert (verdict.path[:, told.path.shape[1] :] == PADDING).all()


def test_a_rule_that_does_not_decide_greedily_is_asked() -> None:
    draft, logits = random_step(3)
    uniforms = Uniforms(range(4), [0] * 4, positions=range(4))
    nothing = judge(SyntheticVerifier(0.0), draft, logits, [SamplingParams()] * 4, seen, uniforms)
    strictest = judge(TypicalVerifier(1.0, 1.0), draft, logits, [SamplingParams()] * 4, seen, uniforms)
    assert nothing.read()[0].paths == strictest.read()[0].paths == [[]] * 4


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.2), SamplingParams(top_k=3, seed=1)]
)
def test_only_certain_steps_are_compared(params: SamplingParams) -> None:
    draft, logits = random_step(3)
    uniforms = Uniforms(range(4), [0] * 4, positions=range(4))
    judged = judge(RejectionVerifier(), draft, logits, [params] * 4, seen, uniforms)
    assert isinstance(judged, ByComparison) == (params.greedy and not params.penalised)


def test_a_tree_is_not_compared_for_a_rule_of_chains() -> None:
    draft, logits = random_step(4, tree=True)
    with pytest.raises(UsageError, match="accepts trees"):
        judge(RejectionVerifier(), draft, logits, [SamplingParams()] * 4, seen, Uniforms(range(4), [0] * 4))


def test_arguments_are_left_alone() -> None:
    draft, logits = random_step(4)
    before = (draft.tokens.clone(), draft.lengths.clone(), logits.clone())
    judge(RejectionVerifier(), draft, logits, [SamplingParams()] * 4, seen, Uniforms(range(4), [0] * 4))
    assert all(torch.equal(a, b) for a, b in zip(before, (draft.tokens, draft.lengths, logits), strict=True))
