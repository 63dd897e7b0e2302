"""A transformers cache behind this project's `Cache`, for models that run through `specdec.models.hf`.

It is rectangular: all rows of a batch share one length, so it holds one sequence. It grows by concatenation; a
rollback slices views and copies nothing. Layers with recurrent state are in `specdec.cache.replaying`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.cache.base import Cache, CacheView
from specdec.errors import UsageError


class DynamicView(CacheView):
    """The one sequence as the one row of a forward pass. `past` is the transformers cache the model writes to."""

    def __init__(self, cache: DynamicCache) -> None:
        self.owner = cache
        self.slots = (0,)
        self.starts = cache.lengths
        self.past = cache.past

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheView.append`."""
        keys, values = self.past.update(keys, values, layer)
        return keys, values

    def advance(self, num_tokens: int) -> None:
        """See `CacheView.advance`."""
        self.owner.grow(num_tokens)


class DynamicCache(Cache):
    """One sequence's keys and values in the transformers cache that `make_past` builds.

    make_past: () → transformers.DynamicCache, empty. capacity: entries the sequence may grow to; nothing is reserved.
    unable: what outside the cache cannot forget its last entries; afterwards, all because of which `can_rollback` is
    False, by name.
    """

    _rolls_back = frozenset({"DynamicLayer", "DynamicIndexedLayer", "DummyLayer"})

    def __init__(self, make_past: Callable[[], Any], capacity: int, unable: Sequence[str] = ()) -> None:
        self._make_past = make_past
        self._length = 0
        self.past = make_past()
        self.num_slots = 1
        self.capacity = capacity
        self.unable = self.layers_without_rollback(self.past) or tuple(unable)
        self.can_rollback = not self.unable

    @classmethod
    def layers_without_rollback(cls, past: Any) -> tuple[str, ...]:
        """Kinds of layers of a transformers cache that cannot forget their last entries, by class name.

        A sliding window has thrown away those it would need again, and a quantised layer cannot be trimmed exactly.
        Anything unknown counts as unable.
        """
        return tuple(sorted({type(layer).__name__ for layer in past.layers} - cls._rolls_back))

    @property
    def lengths(self) -> tuple[int, ...]:
        """See `Cache.lengths`."""
        return (self._length,)

    def grow(self, num_tokens: int) -> None:
        """The model has appended this many entries to every layer."""
        self._length += num_tokens

    @property
    def num_unread(self) -> int:
        """Tokens that a rollback kept and left to be read again."""
        return 0

    def read(self, tokens: Tensor) -> Tensor:
        """What the model is to be fed for `tokens` [1, S] to follow: [1, R + S], first what is to be read again."""
        return tokens

    def settle(self) -> None:
        """All that has been read stays: nothing more is kept for taking it back."""

    def view(self, slots: Sequence[int]) -> DynamicView:
        """See `Cache.view`; the only slot is 0."""
        _check_slots(slots)
        return DynamicView(self)

    def rollback(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """See `Cache.rollback`."""
        _check_slots(slots)
        for length in lengths:
            surplus = self._length - length
            if surplus < 0:
                raise UsageError(f"cannot roll back to {length} entries: the cache holds {self._length}")
            if surplus and self.unable:
                raise UsageError(f"{', '.join(self.unable)} cannot roll back; decode this model without drafts")
            self._drop(surplus)
            self._length = length

    def _drop(self, surplus: int) -> None:
        """Forget the last entries, or none."""
        if surplus:
            self.past.crop(-surplus)  # newer transformers takes negative counts only

    def _gather(self, slot: int, start: int, path: Sequence[int]) -> None:
        _check_slots([slot])
        with torch.inference_mode():  # entries may have been made in inference mode, which forbids writing outside it
            for keys, values in self._entries():
                source = torch.tensor([start + offset for offset in path], device=keys.device)
                keys[..., start : start + len(path), :] = keys.index_select(-2, source)
                values[..., start : start + len(path), :] = values.index_select(-2, source)

    def free(self, slot: int) -> None:
        """See `Cache.free`."""
        _check_slots([slot])
        self.past = self._make_past()
        self._length = 0

    @property
    def num_bytes(self) -> int:
        """See `Cache.num_bytes`."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._entries())

    def _entries(self) -> list[tuple[Tensor, Tensor]]:
        pairs = ((getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in self.past.layers)
        return [(keys, values) for keys, values in pairs if keys is not None and values is not None]


def _check_slots(slots: Sequence[int]) -> None:
    if tuple(slots) != (0,):
        raise UsageError(f"a dynamic cache holds one sequence, slot 0, not slots {tuple(slots)}; use batch size 1")
