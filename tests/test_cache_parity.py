"""Whatever was appended, kept, rolled back or freed before: logits are those of the same tokens without a cache."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.cache.base import Cache
from specdec.decoding.engine import ancestor_mask
from specdec.models.native.transformer import Transformer
from tests.test_hf_parity import make_pair

NUM_SLOTS, CAPACITY = 3, 24


@cache
def model() -> Transformer:
    return make_pair("qwen3")[1]


def recomputed(tokens: list[int]) -> torch.Tensor:
    """Logits [V] after the last of the tokens, from an empty cache."""
    view = model().new_cache(1, len(tokens)).view([0])
    return model().forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], view).logits[0, -1]


class Machine:
    """A cache, and beside it the tokens that each slot should hold."""

    def __init__(self, data: st.DataObject) -> None:
        self.cache: Cache = model().new_cache(NUM_SLOTS, CAPACITY)
        self.held: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self._data = data

    def _slots(self) -> list[int]:
        return self._data.draw(st.permutations(range(NUM_SLOTS)))[: self._data.draw(st.integers(1, NUM_SLOTS))]

    def _tokens(self, count: int) -> list[int]:
        token = st.integers(0, model().vocab_size - 1)
        return self._data.draw(st.lists(token, min_size=count, max_size=count))

    def _forward(self, slots: list[int], new: list[list[int]], parents: list[list[int]] | None) -> torch.Tensor:
        starts = torch.tensor([len(self.held[slot]) for slot in slots])[:, None]
        if parents is None:
            depths, mask = torch.arange(len(new[0])).expand(len(slots), -1), None
        else:
            mask = ancestor_mask(torch.tensor(parents))
            depths = mask.sum(-1) - 1
        return model().forward(torch.tensor(new), starts + depths, self.cache.view(slots), mask).logits

    def append(self) -> None:
        """A chain on some slots; each row keeps a prefix of it."""
        slots = self._slots()
        room = CAPACITY - max(len(self.held[slot]) for slot in slots)
        if room == 0:
            return
        size = self._data.draw(st.integers(1, min(room, 6)))
        new = [self._tokens(size) for _ in slots]
        logits = self._forward(slots, new, None)
        kept = [self._data.draw(st.integers(1, size)) for _ in slots]
        self.cache.keep(slots, [len(self.held[slot]) for slot in slots], [range(count) for count in kept])
        for row, slot in enumerate(slots):
            self.held[slot] += new[row][: kept[row]]
            torch.testing.assert_close(logits[row, kept[row] - 1], recomputed(self.held[slot]), atol=1e-4, rtol=1e-4)

    def grow_tree(self) -> None:
        """A tree on some slots; each row keeps one path through it."""
        slots = self._slots()
        room = CAPACITY - max(len(self.held[slot]) for slot in slots)
        if room < 2:
            return
        size = self._data.draw(st.integers(1, min(room - 1, 6)))
        new = [self._tokens(size + 1) for _ in slots]
        parents = [[self._data.draw(st.integers(-1, node - 1)) for node in range(size)] for _ in slots]
        logits = self._forward(slots, new, parents)
        paths = []
        for row in range(len(slots)):
            node, path = self._data.draw(st.integers(-1, size - 1)), []
            while node >= 0:
                path.append(node + 1)
                node = parents[row][node]
            paths.append([0, *reversed(path)])
        self.cache.keep(slots, [len(self.held[slot]) for slot in slots], paths)
        for row, slot in enumerate(slots):
            self.held[slot] += [new[row][node] for node in paths[row]]
            torch.testing.assert_close(logits[row, paths[row][-1]], recomputed(self.held[slot]), atol=1e-4, rtol=1e-4)

    def roll_back(self) -> None:
        slots = self._slots()
        lengths = [self._data.draw(st.integers(0, len(self.held[slot]))) for slot in slots]
        self.cache.rollback(slots, lengths)
        for slot, length in zip(slots, lengths, strict=True):
            del self.held[slot][length:]

    def free(self) -> None:
        slot = self._data.draw(st.integers(0, NUM_SLOTS - 1))
        self.cache.free(slot)
        self.held[slot].clear()


@settings(max_examples=150)
@given(st.data())
def test_logits_do_not_depend_on_what_the_cache_went_through(data: st.DataObject) -> None:
    machine = Machine(data)
    actions = [machine.append, machine.append, machine.grow_tree, machine.grow_tree, machine.roll_back, machine.free]
    for _ in range(data.draw(st.integers(2, 8))):
        data.draw(st.sampled_from(actions))()
        assert machine.cache.lengths == tuple(len(tokens) for tokens in machine.held)
    machine.append()
