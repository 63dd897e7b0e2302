"""What the runs of one sweep, in one process, need not make twice: models, step costs, warm-ups.

Nothing of it was learned from a request, so that a run finds the same whatever ran before it.
"""

from __future__ import annotations

from specdec.costmodel import StepCosts
from specdec.decoding.engine import Engine
from specdec.measurement.calibration import step_costs
from specdec.models.loading import LoadedModel
from specdec.types import SamplingParams


class Shared:
    """drafts: models that drafters loaded, for `shared_models`. A setup is an arm's resolved configuration, as text."""

    def __init__(self) -> None:
        self.drafts: dict[str, LoadedModel] = {}
        self._costs: dict[str, StepCosts] = {}
        self._decoded: set[tuple[str, SamplingParams]] = set()

    def step_costs(self, setup: str, engine: Engine) -> StepCosts:
        """Measured for the first run that asks: the machine is the same, and controllers follow what changes of it."""
        if setup not in self._costs:
            self._costs[setup] = step_costs(engine)
        return self._costs[setup]

    def warm(self, setup: str, sampling: SamplingParams) -> bool:
        """Whether this process has decoded so before: code paths have run, and memory is the process's own."""
        return (setup, sampling) in self._decoded

    def note(self, setup: str, sampling: SamplingParams) -> None:
        """It has now."""
        self._decoded.add((setup, sampling))
