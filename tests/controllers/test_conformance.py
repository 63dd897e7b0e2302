"""Every controller that ships, as `tests/testing` puts it through the kit, and what only these owe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.controllers.bandit import ThompsonController, UCBController
from specdec.controllers.base import Controller, Observation
from specdec.controllers.confidence import ConfidenceController
from specdec.controllers.cost_aware import CostAwareController
from specdec.controllers.entropy import AdaEDLController
from specdec.controllers.fixed import FixedController
from specdec.controllers.heuristic import HeuristicController
from specdec.controllers.survival import SurvivalController
from specdec.testing import ConformanceError, check_controller
from tests.controllers.simulation import costs

CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "fixed": lambda: FixedController(4),
    "heuristic": HeuristicController,
    "confidence": ConfidenceController,
    "adaedl": lambda: AdaEDLController(threshold=0.6),
    "survival": SurvivalController,
    "ucb": UCBController,
    "thompson": ThompsonController,
    "cost_aware": lambda: CostAwareController(costs=costs(0.1)),
}


class Anticipating(ConfidenceController):
    """A mutant: it withdraws the very token that was unlikely."""

    def stop(self, states: object, draft_probs: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        unlikely = draft_probs.gather(-1, tokens[:, None])[:, 0] < self.threshold
        tokens[unlikely] = 1 - tokens[unlikely]
        return unlikely


def test_the_kit_catches_a_controller_that_takes_back_a_token_it_has_seen() -> None:
    with pytest.raises(ConformanceError, match="a token it has seen cannot be taken back"):
        check_controller(Anticipating, only=["check_stop"])


@pytest.mark.parametrize("name", CONTROLLERS)
def test_more_than_a_request_may_emit_is_nothing_the_controller_must_know(name: str) -> None:
    controller = CONTROLLERS[name]()
    states = [controller.init() for _ in range(8)]
    decided = controller.decide(states, Observation((10,) * 8, (2,) * 8, 8))
    assert all(0 <= count <= controller.max_draft_tokens for count in decided)
