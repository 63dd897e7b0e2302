"""Hydra's `instantiate`, with the toolkit's own complaints passed on as they are."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from specdec.errors import UsageError


def build(config: DictConfig) -> Any:
    """What the configuration's `_target_` makes. A `UsageError` comes out unwrapped."""
    try:
        return instantiate(config)
    except InstantiationException as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise
