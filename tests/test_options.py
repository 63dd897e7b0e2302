"""Every option a request may carry changes what it says, in plain and speculative decoding alike: a test per option.

Four ways of decoding: plainly, with drafts copied from the text, with drafts of another model, and with the target
drafting for itself, where every token comes out of an accepted draft. What is right is worked out here by hand.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.native import load_pair, to_request
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.models.loading import LoadedModel, load_model
from specdec.types import FinishReason, Prompt, Request, SamplingParams
from specdec.verifiers.rejection import RejectionVerifier
from tests.fakes import make_request

Tokens = tuple[int, ...]


@pytest.fixture(scope="module", params=["plain", "prompt_lookup", "draft_model", "self"])
def engine(request: pytest.FixtureRequest, target: LoadedModel, tiny_checkpoint: Callable[..., Path]) -> Engine:
    drafters: dict[str, Callable[[], Drafter]] = {
        "plain": NoDrafter,
        "prompt_lookup": PromptLookupDrafter,
        "draft_model": lambda: DraftModelDrafter(load_model(str(tiny_checkpoint("llama", seed=1)))),
        "self": lambda: DraftModelDrafter(target),
    }
    controller = FixedController(0 if request.param == "plain" else 5)
    return Engine(target.model, drafters[request.param](), RejectionVerifier(), controller, tokenizer=target.tokenizer)


def decode(engine: Engine, **options: Any) -> Tokens:
    """Tokens of a prompt under some options; at temperature 1 where they say nothing."""
    request = make_request("a", 16, **{"temperature": 1.0, "max_new_tokens": 40, **options})
    return engine.generate([request])[0].token_ids


def prompt_ids() -> Tokens:
    return make_request("a", 16).prompt_ids


def logits_after(target: LoadedModel, output: Tokens) -> Tensor:
    """Logits [len(output), V] that each output token was chosen from, recomputed from nothing."""
    ids = [*prompt_ids(), *output]
    view = target.model.new_cache(1, len(ids)).view([0])
    with torch.inference_mode():
        logits = target.model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], view).logits[0]
    return logits[len(prompt_ids()) - 1 : -1]


def greedily(target: LoadedModel, adjust: Callable[[Tensor, Tokens], None] = lambda *_: None) -> Tokens:
    """40 tokens, each the argmax of the logits as `adjust` leaves them."""
    output: Tokens = ()
    for _ in range(40):
        logits = logits_after(target, (*output, 0))[-1].clone()
        adjust(logits, output)
        output = (*output, int(logits.argmax()))
    return output


@pytest.fixture(scope="module")
def greedy(target: LoadedModel) -> Tokens:
    return greedily(target)


def chosen(values: Tensor, output: Tokens) -> Tensor:
    """[N, V] → [N], each row's value at the output token."""
    return values.gather(1, torch.tensor(output)[:, None])[:, 0]


def test_every_option_has_its_test() -> None:
    fields = [*dataclasses.fields(SamplingParams), *dataclasses.fields(Request)]
    options = {field.name for field in fields} - {"id", "prompt", "prompt_ids", "sampling"}
    assert not {f"test_{option}" for option in options} - globals().keys()


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_temperature(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    assert decode(engine, temperature=0.0) == decode(engine, temperature=1e-5) == greedy
    warm, hot = decode(engine), decode(engine, temperature=4.0)
    assert len({greedy, warm, hot}) == 3
    # The hotter, the less likely what is drawn; over 40 tokens chance has no say.
    surprise = [-chosen(logits_after(target, output).log_softmax(-1), output).mean() for output in (greedy, warm, hot)]
    assert surprise[0] + 0.5 < surprise[1] < surprise[2] - 0.5


def test_top_k(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    assert decode(engine, top_k=1) == greedy

    def ranks(output: Tokens) -> Tensor:
        logits = logits_after(target, output)
        return (logits > chosen(logits, output)[:, None] + 1e-5).sum(-1)

    assert ranks(decode(engine, top_k=3)).max() == 2
    assert ranks(decode(engine)).max() > 2


def test_top_p(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    assert decode(engine, top_p=0.01) == greedy

    def mass_above(output: Tokens) -> Tensor:
        probs = logits_after(target, output).softmax(-1)
        return probs.masked_fill(probs <= chosen(probs, output)[:, None] + 1e-6, 0).sum(-1)

    assert 0 < mass_above(decode(engine, top_p=0.5)).max() < 0.5
    assert mass_above(decode(engine)).max() > 0.5


def test_min_p(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    assert decode(engine, min_p=0.999) == greedy

    def shares(output: Tokens) -> Tensor:
        probs = logits_after(target, output).softmax(-1)
        return chosen(probs, output) / probs.amax(-1)

    assert 0.3 - 1e-5 < shares(decode(engine, min_p=0.3)).min() < 1
    assert shares(decode(engine)).min() < 0.3


def test_repetition_penalty(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    def adjust(logits: Tensor, output: Tokens) -> None:
        for token in {*prompt_ids(), *output}:
            logits[token] = logits[token] * 1.5 if logits[token] < 0 else logits[token] / 1.5

    found = decode(engine, temperature=0.0, repetition_penalty=1.5)
    assert found == greedily(target, adjust) != greedy
    assert decode(engine, repetition_penalty=1.5) != decode(engine)


def test_presence_penalty(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    def adjust(logits: Tensor, output: Tokens) -> None:
        for token in set(output):
            logits[token] -= 1.25

    found = decode(engine, temperature=0.0, presence_penalty=1.25)
    assert found == greedily(target, adjust) != greedy
    assert decode(engine, presence_penalty=1.25) != decode(engine)


def test_frequency_penalty(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    def adjust(logits: Tensor, output: Tokens) -> None:
        for token in output:
            logits[token] -= 0.75

    found = decode(engine, temperature=0.0, frequency_penalty=0.75)
    assert found == greedily(target, adjust) != greedy
    assert decode(engine, frequency_penalty=0.75) != decode(engine)


def test_seed(engine: Engine) -> None:
    assert decode(engine, seed=1) == decode(engine, seed=1) != decode(engine, seed=2)
    assert decode(engine, seed=1, temperature=0.0) == decode(engine, seed=2, temperature=0.0)


# --- Stops and limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_new_tokens(engine: Engine, greedy: Tokens, limit: int) -> None:
    request = make_request("a", 16, max_new_tokens=limit)
    (trace,) = engine.generate([request])
    assert trace.token_ids == greedy[:limit]
    assert trace.finish_reason is FinishReason.LENGTH


def test_eos_ids(engine: Engine, greedy: Tokens) -> None:
    first = greedy.index(greedy[6])
    (trace,) = engine.generate([make_request("a", 16, max_new_tokens=40, eos_ids=frozenset({greedy[6], 9999}))])
    assert trace.token_ids == greedy[: first + 1]
    assert trace.finish_reason is FinishReason.EOS


def test_stop(engine: Engine, target: LoadedModel, greedy: Tokens) -> None:
    whole = target.tokenizer.decode(greedy)
    stop = whole[9:11]
    (trace,) = engine.generate([make_request("a", 16, max_new_tokens=40, stop=("never there", stop))])
    assert trace.text == whole[: whole.index(stop)]
    assert trace.token_ids == greedy[: len(trace.token_ids)]
    assert target.tokenizer.decode(trace.token_ids).startswith(trace.text)
    assert trace.finish_reason is FinishReason.STOP


def test_the_context_window_is_a_limit_too(engine: Engine) -> None:
    window = engine.target.max_positions
    (trace,) = engine.generate([make_request("a", window - 9, max_new_tokens=40, temperature=1.0)])
    assert (len(trace.token_ids), trace.finish_reason) == (9, FinishReason.WINDOW)


# --- Whose options ----------------------------------------------------------------------------------------------------


def test_requests_of_one_batch_keep_their_own_options(engine: Engine) -> None:
    prompt = make_request("a", 16)
    tokens = engine.generate([replace(prompt, max_new_tokens=40)])[0].token_ids
    changes: list[dict[str, Any]] = [
        {},
        {"sampling": SamplingParams(temperature=1.0)},
        {"sampling": SamplingParams(temperature=1.0, seed=1)},
        {"sampling": SamplingParams(temperature=1.0, top_k=2)},
        {"sampling": SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02)},
        {"sampling": SamplingParams(repetition_penalty=1.8)},
        {"sampling": SamplingParams(presence_penalty=0.6, frequency_penalty=0.1)},
        {"max_new_tokens": 5},
        {"eos_ids": frozenset({tokens[3]})},
    ]
    requests = [
        replace(prompt, **{"id": str(index), "max_new_tokens": 24, **change}) for index, change in enumerate(changes)
    ]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    assert [trace.token_ids for trace in together] == [trace.token_ids for trace in alone]
    assert [trace.finish_reason for trace in together] == [trace.finish_reason for trace in alone]
    assert len({trace.token_ids for trace in together}) == len(requests)
    assert together[0].token_ids == tokens[:24]


def test_a_prompts_own_stops_and_limit_reach_its_request(target: LoadedModel) -> None:
    sampling = SamplingParams(temperature=0.5, seed=3)
    own = to_request(Prompt("own", text="text", max_new_tokens=7, stop=("x", "\n")), sampling, target)
    default = to_request(Prompt("default", text="text"), sampling, target)
    assert (own.max_new_tokens, own.stop, own.sampling) == (7, ("x", "\n"), sampling)
    assert (default.max_new_tokens, default.stop) == (128, ())
    assert own.eos_ids == default.eos_ids == target.eos_ids == {258}


@pytest.mark.parametrize("gamma", [0, 5])
def test_eos_defaults_to_the_models_generation_config(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path], tmp_path: Path, gamma: int
) -> None:
    """The quick start ends where the model's own generation config says, although nobody mentioned an EOS."""
    directory = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    text = Prompt("prompt", text="once upon a time, once upon")
    endless = replace(to_request(text, SamplingParams(), target), eos_ids=frozenset())
    tokens = load_pair(str(directory)).engine.generate([endless])[0].token_ids
    at = next(index for index in range(4, 80) if tokens[index] not in tokens[:index])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [263, tokens[at]]}))
    trace = load_pair(str(directory), num_draft_tokens=gamma).generate(text)
    assert trace.finish_reason is FinishReason.EOS
    assert 263 not in tokens[:at]
    assert trace.token_ids == tokens[: at + 1]
