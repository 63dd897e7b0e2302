"""What every key-value cache can do.

A cache has `num_slots` slots, each at its own length. A forward pass works on a *view* of some slots:
the model appends S entries to every row of the view, then the engine moves lengths back to what was
accepted. Lengths live on the host, so that moving them costs no device synchronisation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class InPlace(NamedTuple):
    """Keys and values per layer, [slots, kv_heads, capacity, head_dim]; row b is slot `slots[b]`, `starts[b]` long."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    slots: Sequence[int]
    starts: Sequence[int]


class CacheView(ABC):
    """The rows of one forward pass. `starts[b]` is row b's length before the pass."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]

    @abstractmethod
    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write S new entries per row and return everything to attend to.

        keys, values: [B, kv_heads, S, head_dim], row b's entries go to starts[b] ... starts[b] + S - 1.
        Returns keys and values [B, kv_heads, L, head_dim], L = max(starts) + S. Entries of row b from
        starts[b] + S on are undefined but finite: the attention mask must hide them.
        """

    def in_place(self, num_tokens: int) -> InPlace | None:
        """Where the model may itself write S = `num_tokens` entries per row instead of calling `append`; or None."""
        return None

    @abstractmethod
    def advance(self, num_tokens: int) -> None:
        """Called once by the model after its last layer: every row of the view grew by `num_tokens`."""


class Cache(ABC):
    """Keys and values of `num_slots` sequences.

    A cache that cannot roll back says so in `can_rollback`, names the layers at fault in `unable`, and the engine
    refuses it when built.
    """

    num_slots: int
    capacity: int  # entries a slot can hold, padding included
    can_rollback: bool = True
    unable: tuple[str, ...] = ()

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Entries held by each slot, [num_slots]."""

    @abstractmethod
    def view(self, slots: Sequence[int]) -> CacheView:
        """The given slots as the rows of one forward pass."""

    @abstractmethod
    def rollback(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten each slot to the given length; moves pointers, copies nothing."""

    @abstractmethod
    def _gather(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Move entries start + path[i] to start + i (path ascending), for every layer."""

    def keep(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """After a forward over a chain or tree: keep only the given entries of what was appended.

        paths[b] lists offsets into row b's appended entries, ascending, e.g. [0, 1, 2] for the root token
        and two accepted tokens of a chain. A chain moves a pointer; a tree gathers its one path.
        """
        for slot, start, path in zip(slots, starts, paths, strict=True):
            if any(offset != index for index, offset in enumerate(path)):
                self._gather(slot, start, path)
        self.rollback(slots, [start + len(path) for start, path in zip(starts, paths, strict=True)])

    @abstractmethod
    def free(self, slot: int) -> None:
        """Forget a slot's sequence."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory the cache holds."""
