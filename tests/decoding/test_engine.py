"""The engine's edges: limits, stops, streaming, broken models, and what a trace says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import ModelError, UsageError
from specdec.measurement import traces
from specdec.measurement.interleaving import interleave
from specdec.models.loading import LoadedModel, load_model
from specdec.types import Chunk, FinishReason, Request, TokenKind, Trace
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier
from tests.fakes import SpoilingController, make_request


def lookup(target: LoadedModel, controller: Controller | None = None) -> Engine:
    controller = FixedController(6) if controller is None else controller
    return Engine(target.model, PromptLookupDrafter(), RejectionVerifier(), controller, tokenizer=target.tokenizer)


def plain(target: LoadedModel) -> Engine:
    return Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0), tokenizer=target.tokenizer)


def knowing(target: LoadedModel, request: Request, acceptance_rate: float = 1.0) -> Engine:
    """An engine whose drafts are right, so that every limit falls inside an accepted block."""
    oracle = OracleDrafter(acceptance_rate)
    oracle.reveal(request.id, plain(target).generate([replace(request, eos_ids=frozenset(), stop=())])[0].token_ids)
    return Engine(target.model, oracle, RejectionVerifier(), FixedController(7), tokenizer=target.tokenizer)


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 20])
def test_max_new_tokens_is_met_and_never_exceeded(target: LoadedModel, limit: int) -> None:
    request = make_request("a", max_new_tokens=limit)
    (trace,) = knowing(target, request).generate([request])
    assert len(trace.token_ids) == limit
    assert trace.finish_reason is FinishReason.LENGTH
    assert trace.token_ids == plain(target).generate([request])[0].token_ids


def test_eos_inside_an_accepted_block_ends_it_there(target: LoadedModel) -> None:
    request = make_request("a")
    tokens = plain(target).generate([request])[0].token_ids
    eos = next(token for token in tokens[3:] if token not in tokens[:3])
    ending = replace(request, eos_ids=frozenset({eos, 999}))
    (trace,) = knowing(target, request).generate([ending])
    assert trace.token_ids == tokens[: tokens.index(eos) + 1] == plain(target).generate([ending])[0].token_ids
    assert trace.finish_reason is FinishReason.EOS
    # What lies behind the cut is in no count and no record.
    assert sum(step.num_emitted for step in trace.steps) == len(trace.token_ids)
    last = trace.steps[-1]
    assert last.cut
    assert last.num_examined == last.num_accepted == last.num_emitted
    assert [record.token_id for record in trace.tokens if record.emitted] == list(trace.token_ids)


def test_a_stop_string_is_cut_from_text_tokens_and_records_alike(target: LoadedModel) -> None:
    request = make_request("a", max_new_tokens=20)
    text = plain(target).generate([request])[0].text
    stop = text[5:8]
    assert text.find(stop) == 5
    ending = replace(request, stop=(stop,))
    one, block = plain(target).generate([ending])[0], knowing(target, request).generate([ending])[0]
    assert one.text == block.text == text[:5]
    assert one.token_ids == block.token_ids
    assert one.finish_reason is block.finish_reason is FinishReason.STOP
    for trace in (one, block):
        assert sum(step.num_emitted for step in trace.steps) == len(trace.token_ids)
        traces.to_frames([trace], "arm")  # checks every identity


def test_a_request_that_ends_with_its_first_token_never_reaches_the_drafter(target: LoadedModel) -> None:
    """Cut at a stop string it has no token at all, and a draft model would read an empty text."""
    prompts = [Request(str(token), (token,), max_new_tokens=8) for token in range(64)]
    spoken = plain(target).generate(prompts)
    chosen = next(index for index, trace in enumerate(spoken) if trace.text[:1].isascii() and trace.text)
    ended = replace(prompts[chosen], stop=(spoken[chosen].text[0],))
    engine = Engine(
        target.model, DraftModelDrafter(target), RejectionVerifier(), FixedController(4), tokenizer=target.tokenizer
    )
    alone, (cut, other) = engine.generate([ended]), engine.generate([ended, prompts[chosen - 1]])
    assert alone[0].token_ids == cut.token_ids == ()
    assert cut.finish_reason is FinishReason.STOP
    assert other.token_ids == spoken[chosen - 1].token_ids


def test_the_context_window_ends_a_sequence(target: LoadedModel) -> None:
    window = target.model.max_positions
    request = make_request("a", window - 6, max_new_tokens=50)
    (trace,) = lookup(target).generate([request])
    assert len(trace.token_ids) == 6
    assert trace.finish_reason is FinishReason.WINDOW
    assert trace.token_ids == plain(target).generate([request])[0].token_ids


def test_streamed_chunks_are_the_trace(target: LoadedModel) -> None:
    requests = [make_request("a"), make_request("b", 30, stop=("zzz",))]
    chunks: dict[str, list[Chunk]] = {"a": [], "b": []}
    found = lookup(target).generate(requests, lambda chunk: chunks[chunk.request_id].append(chunk))
    for trace in found:
        own = chunks[trace.request_id]
        assert tuple(token for chunk in own for token in chunk.token_ids) == trace.token_ids
        assert "".join(chunk.text for chunk in own) == trace.text
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [trace.finish_reason]
        assert len(own) == len(trace.steps)


def test_the_verify_pass_is_as_long_as_the_longest_draft_and_no_longer(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    forward = target.model.forward

    def watched(tokens: torch.Tensor, *rest: object, **named: object) -> object:
        widths.append(tokens.shape[1])
        return forward(tokens, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(target.model, "forward", watched)
    found = lookup(target).generate([make_request("a", 11), make_request("b", 21)])
    steps = max(len(trace.steps) for trace in found)
    longest = [
        max(trace.steps[index].num_drafted for trace in found if index < len(trace.steps)) for index in range(1, steps)
    ]
    assert widths[1:] == [1 + width for width in longest]
    assert min(widths[1:]) < max(widths[1:])


def test_every_second_of_a_request_is_in_one_of_its_steps(target: LoadedModel) -> None:
    (trace,) = lookup(target).generate([make_request("a", max_new_tokens=60)])
    assert all(step.forward_seconds > 0 for step in trace.steps)
    assert sum(step.seconds for step in trace.steps) == pytest.approx(trace.steps[-1].end_seconds, rel=0.1)


def test_counts_and_kinds_of_a_trace_agree(target: LoadedModel) -> None:
    found = lookup(target, SpoilingController()).generate([make_request("a"), make_request("b", 30)])
    for trace in found:
        assert trace.tokens[0].kind is TokenKind.PREFILL
        kinds = [record.kind for record in trace.tokens]
        assert kinds.count(TokenKind.ACCEPTED) == sum(step.num_accepted for step in trace.steps)
        assert kinds.count(TokenKind.REJECTED) == kinds.count(TokenKind.RECOVERED)
        for record in trace.tokens:
            assert record.sampling_entropy_bits == 0.0
            assert record.target_prob == (0.0 if record.kind is TokenKind.REJECTED else 1.0)
            assert record.model_entropy_bits is not None
            assert 0 < record.model_entropy_bits < 8.1
    traces.to_frames(found, "arm")


def test_broken_logits_name_model_request_and_step(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = target.model.forward, []

    def breaking(*given: object, **named: object) -> object:
        output = forward(*given, **named)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 3:
            output.logits[:, 0, 5] = float("nan")
        return output

    monkeypatch.setattr(target.model, "forward", breaking)
    with pytest.raises(ModelError, match=r"llama-0\d* gave NaN or infinite logits at step 2 of request 'a'"):
        plain(target).generate([make_request("a")])


def test_a_failed_request_is_a_failure_and_not_a_row(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"plain": plain(target), "lookup": lookup(target)}
    generate = Engine.generate

    def failing(self: Engine, requests: list[Request], on_chunk: object = None) -> list[Trace]:
        if requests[0].id == "b" and self is arms["lookup"]:
            raise ModelError("broken")
        return generate(self, requests)

    monkeypatch.setattr(Engine, "generate", failing)
    measured = interleave(arms, [[make_request(name)] for name in "abc"])
    assert [trace.request_id for trace in measured.traces["plain"]] == ["a", "b", "c"]
    assert [trace.request_id for trace in measured.traces["lookup"]] == ["a", "c"]
    assert measured.failures == {"lookup": {"b": "broken"}}


def test_arms_are_interleaved_request_by_request_plain_first(target: LoadedModel) -> None:
    arms = {"plain": plain(target), "one": lookup(target), "two": lookup(target)}
    order: list[tuple[str, str]] = []
    interleave(
        arms, [[make_request(name)] for name in "abc"], lambda arm, done: order.append((done[0].request_id, arm))
    )
    assert order == [
        *[("a", "plain"), ("a", "one"), ("a", "two")],
        *[("b", "plain"), ("b", "two"), ("b", "one")],
        *[("c", "plain"), ("c", "one"), ("c", "two")],
    ]


def test_measuring_ends_before_the_batch_that_would_take_it_past_its_time(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 2.0, 3.0])  # the start; then 1 s a batch so far
    monkeypatch.setattr("specdec.measurement.interleaving.perf_counter", lambda: next(seconds))
    measured = interleave({"plain": plain(target)}, [[make_request(name)] for name in "abcde"], time_limit=3.5)
    assert [trace.request_id for trace in measured.traces["plain"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", 128), "has 128 prompt tokens, and .* window is 128; shorten the prompt to at most 127"),
        (Request("a", (1, 264)), "token ids outside .* vocabulary of 264"),
        (make_request("a", temperature=0.5), "GreedyVerifier works at temperature 0 only"),
    ],
)
def test_requests_that_cannot_be_decoded_are_refused_before_any_work(
    target: LoadedModel, request_: Request, message: str
) -> None:
    engine = Engine(target.model, NoDrafter(), GreedyVerifier(), FixedController(0), tokenizer=target.tokenizer)
    with pytest.raises(UsageError, match=message):
        engine.generate([request_])


def test_stop_strings_need_a_tokenizer(target: LoadedModel) -> None:
    engine = Engine(target.model, NoDrafter(), GreedyVerifier(), FixedController(0))
    with pytest.raises(UsageError, match="stop strings, which need a tokenizer"):
        engine.generate([make_request("a", stop=("x",))])


def test_equal_ids_in_one_batch_are_refused(target: LoadedModel) -> None:
    with pytest.raises(UsageError, match="request ids must differ"):
        plain(target).generate([make_request("a"), make_request("a")])


@pytest.mark.parametrize(
    ("tokens", "options", "message"), [((), {}, "empty prompt"), ((1,), {"max_new_tokens": 0}, "=0")]
)
def test_requests_that_make_no_sense_are_refused_when_made(
    tokens: tuple[int, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Request("a", tokens, **options)  # type: ignore[arg-type]


def test_a_model_that_cannot_roll_back_is_refused_when_the_engine_is_built(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    stateful = load_model(str(tiny_checkpoint("recurrent_gemma")))
    with pytest.raises(UsageError, match=r"cannot roll back rejected tokens \(RecurrentGemmaForCausalLM's recurrent"):
        Engine(stateful.model, PromptLookupDrafter(), RejectionVerifier(), FixedController(2))
    engine = Engine(stateful.model, NoDrafter(), RejectionVerifier(), FixedController(0))
    assert len(engine.generate([make_request("a", max_new_tokens=4)])[0].token_ids) == 4


def test_an_hf_model_decodes_as_the_native_one_does(target: LoadedModel, tiny_checkpoint: Callable[..., Path]) -> None:
    hf = load_model(str(tiny_checkpoint("llama")), implementation="hf")
    request = make_request("a")
    expected = plain(target).generate([request])[0].token_ids
    engine = Engine(hf.model, DraftModelDrafter(target), RejectionVerifier(), FixedController(4))
    assert engine.generate([request])[0].token_ids == expected
    with pytest.raises(UsageError, match="takes at most 1 sequences at once, not 2"):
        engine.generate([request, make_request("b")])
