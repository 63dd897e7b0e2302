"""Keys and values in one preallocated block per layer: the simplest cache, and the fastest for a few sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.cache.base import Cache, CacheView, InPlace
from specdec.errors import UsageError


class ContiguousCache(Cache):
    """Slot b's entries are `keys[layer][b, :, :lengths[b]]`; what lies beyond is stale, finite, and never attended to.

    Rolling back moves a length. A view of neighbouring slots copies nothing; any other gathers its rows.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self._lengths = [0] * num_slots
        # zeros, because a NaN left in fresh memory survives its mask; normal tensors, to be written from anywhere
        with torch.inference_mode(False):
            shape = (2 * num_layers, num_slots, num_kv_heads, capacity, head_dim)
            self._block = torch.zeros(shape, dtype=dtype, device=device)
            self.keys = self._block[:num_layers].unbind(0)  # [num_slots, kv_heads, capacity, head_dim] per layer
            self.values = self._block[num_layers:].unbind(0)

    @property
    def lengths(self) -> tuple[int, ...]:
        """See `Cache.lengths`."""
        return tuple(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Memory the cache holds, used or not."""
        return self._block.nbytes

    def view(self, slots: Sequence[int]) -> CacheView:
        """See `Cache.view`. The slots must differ."""
        if not slots or len(set(slots)) != len(slots) or not all(0 <= slot < self.num_slots for slot in slots):
            raise UsageError(f"slots {list(slots)} must be different numbers from 0 to {self.num_slots - 1}")
        return _View(self, tuple(slots))

    def rollback(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """See `Cache.rollback`."""
        for slot, length in zip(slots, lengths, strict=True):
            if not 0 <= length <= self._lengths[slot]:
                raise UsageError(f"slot {slot} holds {self._lengths[slot]} entries and cannot roll back to {length}")
            self._lengths[slot] = length

    def free(self, slot: int) -> None:
        """See `Cache.free`."""
        self._lengths[slot] = 0

    def _gather(self, slot: int, start: int, path: Sequence[int]) -> None:
        source = torch.tensor(path, device=self._block.device) + start
        entries = self._block[:, slot]  # [2 * layers, kv_heads, capacity, head_dim]
        entries[:, :, start : start + len(path)] = entries.index_select(2, source)

    def _advance(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self._lengths[slot] = length


class _View(CacheView):
    def __init__(self, cache: ContiguousCache, slots: tuple[int, ...]) -> None:
        self.slots = slots
        self.starts = tuple(cache.lengths[slot] for slot in slots)
        self._cache = cache
        self._place: _Place | None = None  # all layers of a forward write to the same

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        place = self._place or self._find_place(keys.shape[2], keys.device)
        return place.write(layer, keys), place.write(layer + len(self._cache.keys), values)

    def in_place(self, num_tokens: int) -> InPlace:
        self._check_room(num_tokens)
        return InPlace(self._cache.keys, self._cache.values, self.slots, self.starts)

    def advance(self, num_tokens: int) -> None:
        self._cache._advance(self.slots, [start + num_tokens for start in self.starts])
        self.starts = tuple(start + num_tokens for start in self.starts)
        self._place = None

    def _check_room(self, num_tokens: int) -> int:
        """The longest row's length after the pass."""
        end = max(self.starts) + num_tokens
        if end > self._cache.capacity:
            raise UsageError(
                f"the cache holds {self._cache.capacity} entries per sequence and {end} are needed; "
                "make it with a larger capacity"
            )
        return end

    def _find_place(self, num_tokens: int, device: torch.device) -> _Place:
        end = self._check_room(num_tokens)
        first, neighbours = self.slots[0], self.slots == tuple(range(self.slots[0], self.slots[0] + len(self.slots)))
        if neighbours and len(set(self.starts)) == 1:
            self._place = _Slab(self._cache._block[:, first : first + len(self.slots), :, :end], self.starts[0])
        else:
            rows = torch.tensor(self.slots, device=device)
            columns = torch.tensor(self.starts, device=device)[:, None] + torch.arange(num_tokens, device=device)
            read = slice(first, first + len(self.slots)) if neighbours else rows
            self._place = _Scattered(self._cache._block, rows, columns, read, end)
        return self._place


class _Place(Protocol):
    """Where a view's new entries go, and how its rows are read back."""

    def write(self, index: int, new: Tensor) -> Tensor:
        """Put new [B, kv_heads, S, D] into the block's [index]; return all of it to attend to [B, kv_heads, L, D]."""


class _Slab:
    """Neighbouring slots of one length: a rectangle."""

    def __init__(self, visible: Tensor, start: int) -> None:
        self._visible = visible.unbind(0)  # [B, kv_heads, L, D] each, cut out once for all layers
        self._new = visible[:, :, :, start:].unbind(0)

    def write(self, index: int, new: Tensor) -> Tensor:
        self._new[index].copy_(new)
        return self._visible[index]


class _Scattered:
    """Any slots of any lengths."""

    def __init__(self, block: Tensor, rows: Tensor, columns: Tensor, read: slice | Tensor, end: int) -> None:
        self._block = block
        self._rows, self._columns = rows[:, None], columns  # [B, 1], [B, S]
        self._read, self._end = read, end

    def write(self, index: int, new: Tensor) -> Tensor:
        stored = self._block[index]
        stored[self._rows, :, self._columns] = new.transpose(1, 2)  # indexed dimensions come first: [B, S, kv_heads, D]
        return stored[:, :, : self._end][self._read]
