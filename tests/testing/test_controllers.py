"""`check_controller` passes every policy that ships, and each of its checks catches a policy made to break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.controllers.base import Controller, Observation
from specdec.controllers.fixed import FixedController
from specdec.testing import ConformanceError, check_controller
from specdec.testing.controllers import CONTROLLER_CHECKS
from specdec.types import StepRecord
from tests.controllers.test_conformance import CONTROLLERS
from tests.fakes import SpoilingController, StoppingController

LOCAL = {"check_states_are_independent", "check_state_is_explicit", "check_batch_invariance"}
OURS: dict[str, Callable[[], Controller]] = CONTROLLERS | {
    "spoiling": SpoilingController,
    "stopping": StoppingController,
}


@pytest.mark.parametrize("name", OURS)
def test_every_controller_that_ships_conforms(name: str) -> None:
    report = check_controller(OURS[name], num_samples=400)
    assert set(report.skipped) == (set() if OURS[name]().request_local else LOCAL)
    assert len(report.checked) + len(report.skipped) == len(CONTROLLER_CHECKS)


def test_plain_decoding_conforms_and_never_drafts() -> None:
    report = check_controller(lambda: FixedController(0), only=["check_limits", "check_non_anticipation"])
    assert report.skipped == {"check_non_anticipation": "it never drafts"}


# --- Mutants ----------------------------------------------------------------------------------------------------------


class Boundless(FixedController):
    def __init__(self) -> None:
        super().__init__(3)


class NamesNoLimit(Boundless):
    max_draft_tokens = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.max_draft_tokens = "many"  # type: ignore[assignment]


class ExceedsItsLimit(Boundless):
    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [4] * len(states)


class AnswersOnce(Boundless):
    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [3]


class AnswersFractions(Boundless):
    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [1.5] * len(states)  # type: ignore[list-item]


class CountsEverybodysSteps(Boundless):
    """Keeps in itself what belongs in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [self.steps % 4] * len(states)

    def update(self, state: Any, step: StepRecord) -> Any:
        self.steps += 1
        return state


@dataclass
class Ticket:
    number: int = 0


class KeepsStatesElsewhere(Boundless):
    """A state is a ticket, and what it stands for is kept in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[int, int] = {}

    def init(self) -> Ticket:
        return Ticket(len(self.table) + 1)

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [self.table.get(state.number, 0) for state in states]

    def update(self, state: Ticket, step: StepRecord) -> Ticket:
        self.table[state.number] = (self.table.get(state.number, 0) + 1) % 4
        return state


class AnswersNumbers(Boundless):
    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return draft_probs.amax(-1)


class StopsTogether(Boundless):
    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        unsure = draft_probs.gather(-1, tokens[:, None])[:, 0] < 0.4
        return unsure.any().expand(len(states))


class TakesTheTokenBack(Boundless):
    """Withdraws the very token it was asked about when that is the second one of the vocabulary: (.85, .15)."""

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        unwanted = tokens == 1
        tokens[unwanted] = -1
        return unwanted


class LooksAtTheBatch(Boundless):
    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [3 if observation.batch_size == 1 else 1] * len(states)


class ChangesDraftProbs(Boundless):
    """Sharpens what the draft is said to be drawn from: at temperature 0 harmless, at temperature 1 a lie."""

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        draft_probs.copy_(draft_probs**2 / (draft_probs**2).sum(-1, keepdim=True))
        return torch.zeros(len(states), dtype=torch.bool)


class ChangesTheRecord(Boundless):
    """Makes a token of the output another one, by the view it was given of the draft."""

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        tokens.fill_(11)
        return torch.zeros(len(states), dtype=torch.bool)


MUTANTS: list[tuple[str, type[Controller], str]] = [
    ("check_declarations", NamesNoLimit, "max_draft_tokens is 'many', not a number of tokens"),
    ("check_limits", ExceedsItsLimit, "decided 4 for row 0, not 0 to 3 tokens"),
    ("check_limits", AnswersFractions, "decided 1.5 for row 0"),
    ("check_limits", AnswersOnce, "decide returned 1 numbers for 3 requests"),
    ("check_states_are_independent", CountsEverybodysSteps, "beside another request"),
    ("check_state_is_explicit", KeepsStatesElsewhere, "from a copy of the same state"),
    ("check_stop", AnswersNumbers, "answered torch.float32"),
    ("check_stop", StopsTogether, "one by one"),
    ("check_stop", TakesTheTokenBack, "a token it has seen cannot be taken back"),
    ("check_non_anticipation", TakesTheTokenBack, r"the first token has \[0.85, 0.15\]"),
    ("check_batch_invariance", LooksAtTheBatch, "draft"),
    ("check_sampled_losslessness", ChangesDraftProbs, "do not have the target's distribution"),
]


@pytest.mark.parametrize(("check", "mutant", "sentence"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_check_catches_what_it_is_for(check: str, mutant: type[Controller], sentence: str) -> None:
    with pytest.raises(ConformanceError, match=sentence):
        check_controller(mutant, only=[check])


def test_greedy_losslessness_is_checked() -> None:
    """Tokens outside the vocabulary cannot even be verified."""
    with pytest.raises((ConformanceError, IndexError, RuntimeError)):
        check_controller(ChangesTheRecord, only=["check_greedy_losslessness"])


def test_every_check_has_a_mutant() -> None:
    checked = {check for check, _, _ in MUTANTS} | {"check_greedy_losslessness"}
    assert checked == {check.__name__ for check in CONTROLLER_CHECKS}
