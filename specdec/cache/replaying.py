"""A transformers cache of a recurrent or hybrid model, whose state has no entries that could be dropped.

The layers are copied before tokens are appended. A rollback puts the copy back and leaves the kept tokens to be read
again, at the head of the next forward: there they are a few more rows over weights that are read anyway, where a
forward of their own would double the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.cache.dynamic import DynamicCache
from specdec.errors import UsageError

_RECURRENT = frozenset(
    {
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
_STATES = ("conv_states", "recurrent_states")
_MADE_ANEW = frozenset({"keys", "values"})  # by every append, so that a reference to the old ones is copy enough


class ReplayingCache(DynamicCache):
    """Rolls back as far as to where the last `rollback` or `keep` left it: what was kept then, stays."""

    _rolls_back = DynamicCache._rolls_back | _RECURRENT
    _saved: list[dict[str, Any]] | None  # the layers as they were before `_appended` was read
    _appended: Tensor  # [1, N]; where nothing is saved, still to be read

    def __init__(self, make_past: Callable[[], Any], capacity: int, unable: Sequence[str] = ()) -> None:
        super().__init__(make_past, capacity, unable)
        self.settle()

    @property
    def num_unread(self) -> int:
        """See `DynamicCache.num_unread`."""
        return self._appended.shape[1] if self._saved is None else 0

    def read(self, tokens: Tensor) -> Tensor:
        """See `DynamicCache.read`."""
        self._appended = torch.cat([self._appended.to(tokens.device), tokens], dim=1)
        if self._saved is not None:
            return tokens
        self._saved = [_copy_of(layer) for layer in self.past.layers]
        return self._appended

    def settle(self) -> None:
        """See `DynamicCache.settle`."""
        self._saved = None
        self._appended = torch.empty(1, 0, dtype=torch.long)

    def free(self, slot: int) -> None:
        """See `Cache.free`."""
        super().free(slot)
        self.settle()

    @property
    def num_bytes(self) -> int:
        """See `Cache.num_bytes`; what is saved for a rollback counts, too."""
        layers = [vars(layer) for layer in self.past.layers] + (self._saved or [])
        return sum({id(tensor): tensor.nbytes for layer in layers for tensor in _tensors(layer)}.values())

    def _drop(self, surplus: int) -> None:
        num_appended = self._appended.shape[1]
        if surplus > num_appended:
            raise UsageError(
                f"cannot roll back {surplus} entries: recurrent state goes back to where the last rollback left it, "
                f"{num_appended} entries ago"
            )
        if self._saved is not None and not surplus:
            self.settle()
            return
        if self._saved is not None:
            self._put_back(self._saved)
        self._appended = self._appended[:, : num_appended - surplus]

    def _put_back(self, saved: list[dict[str, Any]]) -> None:
        for layer, state in zip(self.past.layers, saved, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        self._saved = None


def is_recurrent(past: Any) -> bool:
    """Whether some layer of a transformers cache keeps one state for all tokens."""
    return any(type(layer).__name__ in _RECURRENT for layer in past.layers)


def states(past: Any) -> dict[str, list[Tensor]]:
    """What recurrent layers keep beside keys and values, by the attribute that holds it, of all layers together.

    Empty where some layer holds nothing: after a forward that means that the model keeps its state elsewhere.
    """
    held = [
        {name: list(_tensors(getattr(layer, name, None))) for name in _STATES}
        for layer in past.layers
        if type(layer).__name__ in _RECURRENT
    ]
    if not all(any(layer.values()) for layer in held):
        return {}
    together = {name: [tensor for layer in held for tensor in layer[name]] for name in _STATES}
    return {name: tensors for name, tensors in together.items() if tensors}


def _copy_of(layer: Any) -> dict[str, Any]:
    return {name: value if name in _MADE_ANEW else _copied(value) for name, value in vars(layer).items()}


def _copied(value: Any) -> Any:
    """Tensors are written in place, and dicts of them changed; all else that a layer keeps is replaced."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
