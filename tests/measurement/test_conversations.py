"""Conversations: every arm goes on with what it said itself."""

from __future__ import annotations

import pytest

from specdec.backends.native import NativeBackend
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.none import NoDrafter
from specdec.errors import ModelError, UsageError
from specdec.measurement.calibration import RandomDrafter
from specdec.measurement.interleaving import Measured, interleave
from specdec.models.loading import LoadedModel
from specdec.types import Prompt, Request, SamplingParams, Trace, Turn
from specdec.verifiers.rejection import RejectionVerifier


def said(*texts: str) -> tuple[dict[str, str], ...]:
    """User and assistant in turns."""
    return tuple({"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts))


def talk(name: str, *later: str) -> Prompt:
    turns = tuple(Turn(f"{name}/{number}", text) for number, text in enumerate(later, start=2))
    return Prompt(name, messages=said("Hi"), max_new_tokens=8, then=turns)


def backend(target: LoadedModel, drafter: Drafter, gamma: int, batch_size: int = 1) -> NativeBackend:
    return NativeBackend(target, drafter, RejectionVerifier(), FixedController(gamma), batch_size=batch_size)


def measure(target: LoadedModel, prompts: list[Prompt], temperature: float, batch_size: int = 1) -> Measured:
    arms = {"plain": backend(target, NoDrafter(), 0, batch_size), "random": backend(target, RandomDrafter(), 3)}
    sampling = SamplingParams(temperature=temperature)
    batches = arms["plain"].batches(prompts, sampling)
    engines = {name: arm.engine for name, arm in arms.items()}
    return interleave(engines, batches, next_turn=arms["plain"].next_turn)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_arm_is_asked_after_its_own_answers(target: LoadedModel, temperature: float) -> None:
    measured = measure(target, [talk("a", "Go", "on")], temperature)
    for name, traces in measured.traces.items():
        assert [trace.request_id for trace in traces] == ["a", "a/2", "a/3"]
        assert [request.id for request in measured.requests[name]] == ["a", "a/2", "a/3"]
        first, second, _ = (trace.text for trace in traces)
        whole = Prompt("whole", messages=said("Hi", first, "Go", second, "on"))
        assert measured.requests[name][-1].prompt_ids == target.tokenizer.encode_prompt(whole)
    plain, other = measured.requests.values()
    assert (plain == other) == (temperature == 0), "the same answers are followed by the same requests"
    assert not measured.failures


def test_conversations_of_a_batch_end_one_by_one(target: LoadedModel) -> None:
    measured = measure(target, [talk("a"), talk("b", "Go"), talk("c", "Go", "on")], 0.0, batch_size=3)
    assert [trace.request_id for trace in measured.traces["plain"]] == ["a", "b", "c", "b/2", "c/2", "c/3"]
    sizes = [trace.steps[0].batch_size for trace in measured.traces["plain"]]
    assert sizes == [3, 3, 3, 2, 2, 1]


def test_a_turn_that_no_longer_fits_is_a_failure_and_ends_its_conversation(target: LoadedModel) -> None:
    measured = measure(target, [talk("a", "x" * 128, "on"), talk("b", "Go")], 0.0)
    for name, traces in measured.traces.items():
        assert [trace.request_id for trace in traces] == ["a", "b", "b/2"]
        assert list(measured.failures[name]) == ["a/2"]
        assert "window is 128; shorten the prompt to at most 127" in measured.failures[name]["a/2"]


def test_a_turn_that_fails_ends_its_conversation(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def failing(self: Engine, requests: list[Request], on_chunk: object = None) -> list[Trace]:
        if requests[0].id == "a/2":
            raise ModelError("broken")
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", failing)
    measured = measure(target, [talk("a", "Go", "on")], 0.0)
    assert measured.failures == {"plain": {"a/2": "broken"}, "random": {"a/2": "broken"}}
    assert [trace.request_id for trace in measured.traces["random"]] == ["a"]


def test_a_backend_answers_every_turn(target: LoadedModel) -> None:
    found = backend(target, NoDrafter(), 0, batch_size=2).run([talk("a", "Go"), talk("b")], SamplingParams())
    assert [trace.request_id for trace in found] == ["a", "b", "a/2"]


def test_raw_text_cannot_be_followed() -> None:
    with pytest.raises(UsageError, match="prompt 'a' is raw text, which no turn can follow; give it as messages"):
        Prompt("a", text="Once", then=(Turn("a/2", "upon"),))
