import pytest
import torch

from specdec.errors import UsageError
from specdec.sampling.distributions import one_hot
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft
from specdec.verifiers.greedy import GreedyVerifier

NONE = Uniforms([], [])


def test_longest_matching_prefix_then_the_argmax() -> None:
    target = one_hot(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [4, 0, 0, 0]]), 9)
    verdict = GreedyVerifier().verify(Draft.from_chains([[5, 6, 7], [5, 1, 7], [5, 6], []]), target, NONE)
    assert verdict.num_accepted.tolist() == [3, 1, 2, 0]
    assert verdict.num_examined.tolist() == [3, 2, 2, 0]
    assert verdict.next_token.tolist() == [8, 6, 7, 4]
    assert verdict.path.tolist() == [[0, 1, 2], [0, PADDING, PADDING], [0, 1, PADDING], [PADDING] * 3]


def test_width_zero() -> None:
    verdict = GreedyVerifier().verify(Draft.empty(2), one_hot(torch.tensor([[3], [1]]), 4), NONE)
    assert verdict.next_token.tolist() == [3, 1]
    assert verdict.path.shape == (2, 0)


def test_lengths_rule_over_what_fills_the_row() -> None:
    draft = Draft(torch.tensor([[5, 6], [5, 6]]), torch.tensor([2, 1]))
    verdict = GreedyVerifier().verify(draft, one_hot(torch.tensor([[5, 6, 7]] * 2), 9), NONE)
    assert verdict.num_accepted.tolist() == [2, 1]
    assert verdict.next_token.tolist() == [7, 6]


def test_declares_what_it_is() -> None:
    rule = GreedyVerifier()
    assert rule.lossless
    assert rule.greedy_only
    assert not rule.accepts_trees


def test_trees_are_refused() -> None:
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), parents=torch.tensor([[-1]]))
    with pytest.raises(UsageError, match="parents"):
        GreedyVerifier().verify(draft, one_hot(torch.tensor([[0, 0]]), 2), NONE)
