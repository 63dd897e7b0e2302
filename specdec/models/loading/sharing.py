"""Models that are loaded once for several users in turn: `shared_models`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Model = TypeVar("Model")


@dataclass
class _Shelf:
    held: dict[str, Any]
    asked: dict[str, Any] = field(default_factory=dict)


_shelf: ContextVar[_Shelf | None] = ContextVar("shelf", default=None)


@contextmanager
def shared_models(models: dict[str, Any]) -> Iterator[None]:
    """Inside the block, `load_model` hands out what `models` holds, and loads the rest.

    Afterwards `models` holds what was asked for inside, and nothing else. Weights are shared, caches are not.
    """
    shelf = _Shelf(dict(models))
    token = _shelf.set(shelf)
    try:
        yield
    finally:
        _shelf.reset(token)
        models.clear()
        models.update(shelf.asked)


def shareable(load: Callable[Given, Model]) -> Callable[Given, Model]:
    """A loader that looks at what is shared first; outside `shared_models` it is what it was."""

    @wraps(load)
    def shared(*args: Given.args, **kwargs: Given.kwargs) -> Model:
        shelf = _shelf.get()
        if shelf is None:
            return load(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        if key not in shelf.held:
            shelf.held[key] = load(*args, **kwargs)
        shelf.asked[key] = shelf.held[key]
        model: Model = shelf.held[key]
        return model

    return shared
