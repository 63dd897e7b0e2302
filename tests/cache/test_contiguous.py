from __future__ import annotations

import pytest
import torch

from specdec.cache.contiguous import ContiguousCache
from specdec.errors import UsageError

LAYERS, HEADS, WIDTH = 2, 2, 3


def make(num_slots: int = 3, capacity: int = 8) -> ContiguousCache:
    return ContiguousCache(LAYERS, num_slots, capacity, HEADS, WIDTH)


def entries(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, HEADS, count, WIDTH, generator=torch.Generator().manual_seed(seed))


def fill(cache: ContiguousCache, slots: list[int], count: int, seed: int = 0) -> torch.Tensor:
    """Append the same random entries to every layer, negated as values; returns them."""
    view, new = cache.view(slots), entries(len(slots), count, seed)
    for layer in range(LAYERS):
        view.append(layer, new + layer, -new - layer)
    view.advance(count)
    return new


@pytest.mark.parametrize("slots", [[0], [2], [0, 1], [1, 2], [2, 0], [1, 0, 2]])
def test_append_returns_everything_held_of_the_slots_asked_for(slots: list[int]) -> None:
    cache = make()
    first = fill(cache, [0, 1, 2], 3, seed=1)
    new = entries(len(slots), 2, seed=2)
    keys, values = cache.view(slots).append(1, new, -new)
    torch.testing.assert_close(keys, torch.cat([first[slots] + 1, new], dim=2))
    torch.testing.assert_close(values, torch.cat([-first[slots] - 1, -new], dim=2))


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 1], [2, 0]])
def test_ragged_rows_write_after_their_own_ends(slots: list[int]) -> None:
    cache = make()
    first = fill(cache, [0, 1, 2], 4, seed=1)
    lengths = {0: 1, 1: 4, 2: 2}
    cache.rollback(list(lengths), list(lengths.values()))
    view, new = cache.view(slots), entries(len(slots), 2, seed=2)
    keys, _ = view.append(0, new, -new)
    assert view.starts == tuple(lengths[slot] for slot in slots)
    assert keys.shape[2] == max(view.starts) + 2
    assert keys.isfinite().all()
    for row, slot in enumerate(slots):
        expected = torch.cat([first[slot, :, : lengths[slot]], new[row]], dim=1)
        torch.testing.assert_close(keys[row, :, : lengths[slot] + 2], expected)


@pytest.mark.parametrize(("slots", "copied"), [([1], False), ([0, 1, 2], False), ([1, 2], False), ([0, 2], True)])
def test_neighbouring_slots_are_read_without_a_copy(slots: list[int], copied: bool) -> None:
    cache = make()
    new = entries(len(slots), 1)
    keys, values = cache.view(slots).append(0, new, new)
    assert (keys.untyped_storage().data_ptr() != cache.keys[0].untyped_storage().data_ptr()) == copied
    assert (values.untyped_storage().data_ptr() != cache.values[0].untyped_storage().data_ptr()) == copied


def test_advance_and_rollback_move_lengths_and_nothing_else() -> None:
    cache = make()
    fill(cache, [0, 2], 5)
    assert cache.lengths == (5, 0, 5)
    before = cache.keys[0].clone()
    cache.rollback([0, 2], [4, 1])
    assert cache.lengths == (4, 0, 1)
    cache.free(0)
    assert cache.lengths == (0, 0, 1)
    torch.testing.assert_close(cache.keys[0], before)


def test_keep_gathers_the_path_of_a_tree_in_every_layer() -> None:
    cache = make()
    first, tree = fill(cache, [0, 1], 2, seed=1), fill(cache, [0, 1], 5, seed=2)
    cache.keep([0, 1], [2, 2], [[0, 2, 3], [0, 1]])
    assert cache.lengths == (5, 4, 0)
    for layer in range(LAYERS):
        expected = torch.cat([first[0], tree[0][:, [0, 2, 3]]], dim=1) + layer
        torch.testing.assert_close(cache.keys[layer][0, :, :5], expected)
        torch.testing.assert_close(cache.values[layer][0, :, :5], -expected)
        torch.testing.assert_close(cache.keys[layer][1, :, 2:4], tree[1][:, :2] + layer)


def test_a_view_can_be_used_again_after_it_advanced() -> None:
    cache = make(num_slots=1)
    view, new = cache.view([0]), entries(1, 3)
    for start in range(3):
        piece = new[:, :, start : start + 1]
        keys, _ = view.append(0, piece, piece)
        view.advance(1)
    torch.testing.assert_close(keys, new)


def test_a_cache_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        cache = make()
        fill(cache, [0], 4)
    cache.keep([0], [0], [[0, 3]])
    fill(cache, [0], 1)
    assert cache.lengths == (3, 0, 0)


def test_num_bytes_counts_keys_and_values_of_all_slots() -> None:
    assert make().num_bytes == 2 * LAYERS * 3 * HEADS * 8 * WIDTH * 4


def test_appending_beyond_the_capacity_names_it() -> None:
    cache = make(capacity=4)
    fill(cache, [1], 3)
    with pytest.raises(UsageError, match="holds 4 entries per sequence and 5 are needed"):
        cache.view([0, 1]).append(0, entries(2, 2), entries(2, 2))
    assert cache.lengths == (0, 3, 0)


@pytest.mark.parametrize("length", [-1, 3])
def test_rolling_back_to_what_is_not_there_is_refused(length: int) -> None:
    cache = make()
    fill(cache, [0], 2)
    with pytest.raises(UsageError, match="slot 0 holds 2 entries"):
        cache.rollback([0], [length])


@pytest.mark.parametrize("slots", [[], [3], [-1], [0, 0]])
def test_slots_that_do_not_exist_or_repeat_are_refused(slots: list[int]) -> None:
    with pytest.raises(UsageError, match="different numbers from 0 to 2"):
        make().view(slots)
