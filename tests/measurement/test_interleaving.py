"""What is decoded untimed before a run: all of the warm-up once, little by arms that are warm."""

from __future__ import annotations

import pytest

from specdec.controllers.bandit import UCBController
from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.measurement.interleaving import interleave
from specdec.models.loading import LoadedModel
from specdec.types import Request, Trace
from specdec.verifiers.rejection import RejectionVerifier
from tests.fakes import make_request

FULL, BRIEF, TIMED = (40, 16), (8, 8), (40, 30)
"""Prompt tokens read, and tokens asked for."""


def engine(target: LoadedModel, controller: Controller) -> Engine:
    drafter = PromptLookupDrafter() if controller.max_draft_tokens else NoDrafter()
    return Engine(target.model, drafter, RejectionVerifier(), controller, tokenizer=target.tokenizer)


@pytest.mark.parametrize(
    ("warm", "untimed"),
    [
        ([], {"plain": [FULL], "fixed": [FULL], "learning": [FULL]}),
        (["plain", "fixed", "learning"], {"plain": [FULL, BRIEF], "fixed": [BRIEF], "learning": [FULL]}),
        (["plain"], {"plain": [FULL, BRIEF], "fixed": [FULL], "learning": [FULL]}),
    ],
)
def test_warm_arms_decode_little_but_those_that_learn(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, warm: list[str], untimed: dict[str, list[tuple[int, int]]]
) -> None:
    controllers = {"plain": FixedController(0), "fixed": FixedController(3), "learning": UCBController()}
    arms = {name: engine(target, controller) for name, controller in controllers.items()}
    generate, decoded = Engine.generate, {name: [] for name in arms}

    def noted(self: Engine, requests: list[Request], on_chunk: object = None) -> list[Trace]:
        name = next(name for name, arm in arms.items() if arm is self)
        decoded[name].append((len(requests[0].prompt_ids), requests[0].max_new_tokens))
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", noted)
    measured = interleave(arms, [[make_request("a", 40, max_new_tokens=30)]], warm=warm)
    assert decoded == {name: [*before, TIMED] for name, before in untimed.items()}
    assert len({traces[0].token_ids for traces in measured.traces.values()}) == 1
