from __future__ import annotations

import math

import pytest
import torch

from specdec.models.native.attention import Visibility, eager, sdpa

LIKE = torch.zeros(1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shown(starts: list[int], num_tokens: int, tree: torch.Tensor | None = None) -> list[list[str]]:
    """The mask as text, x where a query sees an entry."""
    mask = Visibility.of(starts, num_tokens, tree, 1, LIKE).mask
    assert mask is not None
    return [["".join("x" if entry == 0 else "." for entry in query) for query in row[0]] for row in mask.tolist()]


def test_one_query_by_hand() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.0, 2.0]])[None, None]
    values = torch.tensor([[10.0, 0.0], [0.0, 1.0]])[None, None]
    query = torch.tensor([[[[math.sqrt(2) * math.log(3), 0.0]]]])  # scores log 3 and 0 after the division by √2
    mixed = eager(query, keys, values, None, False)
    torch.testing.assert_close(mixed, torch.tensor([[[[7.5, 0.25]]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_sdpa_equals_eager(dtype: torch.dtype, heads: int, kv_heads: int, kind: str) -> None:
    rows, length = (7, 7) if kind == "causal" else (3, 7)
    queries = draw(2, heads, rows, 8, seed=1).to(dtype)
    keys, values = (draw(2, kv_heads, length, 8, seed=seed).to(dtype) for seed in (2, 3))
    mask = draw(2, 1, rows, length, seed=4).to(dtype).masked_fill(draw(2, 1, rows, length, seed=5) > 1, -math.inf)
    arguments = (queries, keys, values, mask if kind == "mask" else None, kind == "causal")
    torch.testing.assert_close(sdpa(*arguments), eager(*arguments))
    if kind != "all":
        assert not torch.allclose(eager(*arguments), eager(queries, keys, values, None, False))


def test_causal_attention_sees_nothing_later() -> None:
    queries, keys, values = (draw(1, 2, 5, 4, seed=seed) for seed in (1, 2, 3))
    before = eager(queries, keys, values, None, True)
    keys[:, :, 3:], values[:, :, 3:] = 9.0, 9.0
    after = eager(queries, keys, values, None, True)
    torch.testing.assert_close(after[:, :, :3], before[:, :, :3])
    assert not torch.allclose(after[:, :, 3:], before[:, :, 3:])


def test_no_mask_where_none_is_needed() -> None:
    alone, prefill = Visibility.of([5], 1, None, 3, LIKE), Visibility.of([0, 0], 4, None, 3, LIKE)
    assert (alone.mask, alone.causal, alone.fold) == (None, False, 3)
    assert (prefill.mask, prefill.causal, prefill.fold) == (None, True, 1)


def test_draft_tokens_see_the_cache_and_those_before_them() -> None:
    assert shown([2], 3) == [["xxx..", "xxxx.", "xxxxx"]]


def test_ragged_rows_hide_what_is_stale() -> None:
    assert shown([3, 1, 0], 2) == [["xxxx.", "xxxxx"], ["xx...", "xxx.."], ["x....", "xx..."]]
    assert shown([2, 0], 1) == [["xxx"], ["x.."]]


def test_a_tree_sees_its_ancestors_in_every_row() -> None:
    siblings = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    rows = shown([2, 1], 3, torch.stack([siblings, chain]))
    assert rows == [["xxx..", "xxxx.", "xxx.x"], ["xx...", "xxx..", "xxxx."]]
    assert shown([0], 3, siblings[None]) == [["x..", "xx.", "x.x"]]
    strangers = torch.eye(2, dtype=torch.bool)[None]
    assert shown([1], 2, strangers) == [["xx.", "x.x"]]


@pytest.mark.parametrize(("num_tokens", "fold"), [(2, 3), (64, 3), (65, 1)])
def test_heads_are_folded_for_few_tokens_only(num_tokens: int, fold: int) -> None:
    visible = Visibility.of([1], num_tokens, None, 3, LIKE)
    assert visible.fold == fold
    assert visible.mask is not None
    assert visible.mask.shape == (1, 1, fold * num_tokens, 1 + num_tokens)
