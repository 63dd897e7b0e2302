"""Hydra's `instantiate`, with what a user can mend said in one sentence."""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue

from specdec.errors import UsageError


def build(config: DictConfig) -> Any:
    """What the configuration's `_target_` makes.

    A `UsageError` comes out unwrapped. A value that is missing or not of the type that is wanted, and a setting that
    does not exist, are `UsageError`s too; HYDRA_FULL_ERROR=1 shows where they were found.
    """
    try:
        return instantiate(config)
    except MissingMandatoryValue as error:
        raise UsageError(f"{error.full_key} is not set, and has no default; add {error.full_key}=...") from error
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UsageError):
            raise cause from None
        if isinstance(cause, TypeError):
            raise UsageError(f"{config._target_} cannot be made of what it was given ({cause}); see conf/") from error
        if isinstance(cause, ImportError):
            raise UsageError(
                f"{config._target_} cannot be imported ({cause}); run from the folder that holds it, or give that "
                "folder with --config-dir or PYTHONPATH"
            ) from error
        raise


def plug_in() -> None:
    """Make modules beside a `--config-dir` importable, as Python makes those beside a script."""
    for source in HydraConfig.get().runtime.config_sources:
        if source.provider == "command-line" and source.path not in sys.path:
            sys.path.append(source.path)
