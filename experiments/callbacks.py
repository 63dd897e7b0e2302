"""Progress over a multirun, and its report at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from tqdm import tqdm

from experiments.report import report
from specdec.errors import UsageError
from specdec.machine.interrupts import wait_for_workers
from specdec.measurement.results import prepare_folder


class SweepCallback(Callback):
    """Shows how many runs of a multirun are done; aggregates the results when the last one is.

    Hydra calls `on_multirun_end` only if no run failed; `python -m experiments.report` does the same at any time.
    """

    def __init__(self) -> None:
        self._bar: Any = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a folder that can't be written to, before Hydra puts its logs there."""
        _prepare_folder(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The same; then count the runs and open the bar."""
        _prepare_folder(config)
        if not str(config.hydra.launcher._target_).endswith(".BasicLauncher"):
            wait_for_workers()
        self._bar = tqdm(total=num_runs(config), desc="runs", unit="run", file=sys.stderr, dynamic_ncols=True)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """One more run is done."""
        if self._bar is not None:
            self._bar.update(1)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Close the bar and write summary and figures."""
        if self._bar is not None:
            self._bar.close()
        report(Path(config.results_dir) / config.name)


def _prepare_folder(config: DictConfig) -> None:
    try:
        prepare_folder(Path(config.results_dir) / config.name)
    except UsageError as error:
        sys.exit(f"error: {error}")


def num_runs(config: DictConfig) -> int:
    """The product of all choices, on the command line and in `hydra.sweeper.params`."""
    params = config.hydra.sweeper.get("params") or {}
    lines = [f"{key}={value}" for key, value in params.items()] + list(config.hydra.overrides.task)
    choices: dict[str, int] = {}
    for override in OverridesParser.create().parse_overrides(lines):
        swept = override.is_sweep_override()
        choices[override.get_key_element()] = len(list(override.sweep_string_iterator())) if swept else 1
    total = 1
    for count in choices.values():
        total *= count
    return total
