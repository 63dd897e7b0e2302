import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.sampling.distributions import one_hot
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.tree import GreedyTreeVerifier

NONE = Uniforms([], [])
Row = tuple[list[int], list[int], list[int]]  # tokens, parents, argmax after the root and after each node


def _walk(tokens: list[int], parents: list[int], choice: list[int]) -> tuple[list[int], int, int]:
    """The rule in plain words: path, examined, next token."""
    node, path, examined = -1, [], 0
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        examined += 1
        chosen = [child for child in children if tokens[child] == choice[node + 1]]
        if not chosen:
            break
        node = chosen[0]
        path.append(node)
    return path, examined, choice[node + 1]


def _batch(rows: list[Row]) -> tuple[Draft, Tensor]:
    width = max(len(tokens) for tokens, _, _ in rows)
    tokens, parents = torch.full((2, len(rows), width), PADDING)
    choice = torch.zeros(len(rows), width + 1, dtype=torch.long)
    for row, (row_tokens, row_parents, row_choice) in enumerate(rows):
        tokens[row, : len(row_tokens)] = torch.tensor(row_tokens, dtype=torch.long)
        parents[row, : len(row_parents)] = torch.tensor(row_parents, dtype=torch.long)
        choice[row, : len(row_choice)] = torch.tensor(row_choice)
    lengths = torch.tensor([len(row_tokens) for row_tokens, _, _ in rows])
    return Draft(tokens, lengths, parents=parents), one_hot(choice, 3)


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    size = draw(st.integers(0, 9))
    parents = [draw(st.integers(max(-1, node - 3), node - 1)) for node in range(size)]
    token = st.integers(0, 1)  # few tokens: long walks, and siblings that say the same
    return draw(st.lists(token, min_size=size, max_size=size)), parents, [draw(token) for _ in range(size + 1)]


@settings(max_examples=150)
@given(st.lists(_rows(), min_size=1, max_size=4))
def test_equals_the_walk_in_plain_words(rows: list[Row]) -> None:
    draft, target = _batch(rows)
    verdict = GreedyTreeVerifier().verify(draft, target, NONE)
    for row, (tokens, parents, choice) in enumerate(rows):
        path, examined, next_token = _walk(tokens, parents, choice)
        assert [node for node in verdict.path[row].tolist() if node != PADDING] == path
        assert verdict.path[row, : len(path)].tolist() == path
        assert verdict.num_accepted[row] == len(path)
        assert verdict.num_examined[row] == examined
        assert verdict.next_token[row] == next_token


def test_takes_the_matching_branch() -> None:
    #        root → {1, 2}, 2 → {0, 1}: nodes 0, 1, 2, 3; the target wants 2, 1, then 0
    draft, target = _batch([([1, 2, 0, 1], [-1, -1, 1, 1], [2, 0, 1, 0, 0])])
    verdict = GreedyTreeVerifier().verify(draft, target, NONE)
    assert verdict.path.tolist() == [[1, 3, PADDING, PADDING]]
    assert (int(verdict.num_accepted), int(verdict.num_examined), int(verdict.next_token)) == (2, 2, 0)


def test_deep_chain_is_followed_to_its_end() -> None:
    draft, target = _batch([([1] * 33, list(range(-1, 32)), [1] * 34)])
    verdict = GreedyTreeVerifier().verify(draft, target, NONE)
    assert int(verdict.num_accepted) == 33


def test_chains_are_judged_as_the_chain_rule_judges_them() -> None:
    generator = torch.Generator().manual_seed(0)
    target = one_hot(torch.randint(0, 2, (100, 6), generator=generator), 2)
    draft = Draft.from_chains(
        [torch.randint(0, 2, (row % 6,), generator=generator).tolist() for row in range(100)],
    )
    tree, chain = (rule.verify(draft, target, NONE) for rule in (GreedyTreeVerifier(), GreedyVerifier()))
    for field in ("path", "num_accepted", "num_examined", "next_token"):
        assert torch.equal(getattr(tree, field), getattr(chain, field))


def test_arguments_are_left_alone() -> None:
    draft, target = _batch([([1, 2, 0, 1], [-1, -1, 1, 1], [2, 0, 1, 0, 0])])
    assert draft.parents is not None
    copies = [tensor.clone() for tensor in (draft.tokens, draft.parents, target)]
    GreedyTreeVerifier().verify(draft, target, NONE)
    for tensor, copy in zip((draft.tokens, draft.parents, target), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_empty_draft() -> None:
    verdict = GreedyTreeVerifier().verify(Draft.empty(2), one_hot(torch.tensor([[1], [0]]), 2), NONE)
    assert verdict.next_token.tolist() == [1, 0]
    assert verdict.num_examined.tolist() == [0, 0]
