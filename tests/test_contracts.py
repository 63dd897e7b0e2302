"""The interfaces carry what is built on them later: trees, trained drafts, adaptive length, ragged batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel, load_model
from specdec.types import Request, TokenKind, Trace
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.fakes import HiddenDrafter, SpoilingController, StoppingController, TreeDrafter, make_request

REQUESTS = [make_request("short", 5), make_request("middle", 17, max_new_tokens=9), make_request("long", 40)]


@pytest.fixture(scope="module")
def plain(target: LoadedModel) -> list[Trace]:
    return [decode(target, NoDrafter(), FixedController(0), [request])[0] for request in REQUESTS]


def decode(
    target: LoadedModel, drafter: Drafter, controller: Controller, requests: list[Request], trees: bool = False
) -> list[Trace]:
    verifier = GreedyTreeVerifier() if trees else RejectionVerifier()
    return Engine(target.model, drafter, verifier, controller, tokenizer=target.tokenizer).generate(requests)


def tokens(traces: list[Trace]) -> list[tuple[int, ...]]:
    return [trace.token_ids for trace in traces]


@pytest.mark.parametrize("acceptance_rate", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("together", [True, False])
def test_a_tree_drafter_emits_what_plain_decoding_does(
    target: LoadedModel, plain: list[Trace], acceptance_rate: float, together: bool
) -> None:
    drafter = TreeDrafter(acceptance_rate)
    for trace in plain:
        drafter.reveal(trace.request_id, trace.token_ids)
    groups = [REQUESTS] if together else [[request] for request in REQUESTS]
    traces = [trace for group in groups for trace in decode(target, drafter, FixedController(4), group, trees=True)]
    assert tokens(traces) == tokens(plain)
    accepted = sum(step.num_accepted for trace in traces for step in trace.steps)
    examined = sum(step.num_examined for trace in traces for step in trace.steps)
    drafted = sum(step.num_drafted for trace in traces for step in trace.steps)
    assert examined <= drafted / 2
    if acceptance_rate == 1.0:
        assert accepted == examined > 0
    if acceptance_rate == 0.0:
        assert accepted == 0 < examined


def test_a_drafter_gets_the_hidden_features_of_every_emitted_token(target: LoadedModel, plain: list[Trace]) -> None:
    drafter = HiddenDrafter()
    traces = decode(target, drafter, SpoilingController(), REQUESTS)
    assert tokens(traces) == tokens(plain)
    for request, trace in zip(REQUESTS, traces, strict=True):
        found = torch.cat(drafter.features[request.id])
        # The last token was emitted but never read, unless the step that emitted it was cut.
        sequence = (*request.prompt_ids, *trace.token_ids)[: len(found)]
        ids = torch.tensor(sequence)[None]
        cache = target.model.new_cache(1, len(sequence))
        with torch.inference_mode():
            output = target.model.forward(
                ids, torch.arange(len(sequence))[None], cache.view([0]), hidden_layers=drafter.hidden_layers
            )
        assert len(sequence) >= len(request.prompt_ids) + len(trace.token_ids) - 1
        torch.testing.assert_close(found, output.hidden[0])


def test_a_controller_stops_in_the_middle_of_a_draft(target: LoadedModel, plain: list[Trace]) -> None:
    drafter = DraftModelDrafter(target)
    traces = decode(target, drafter, StoppingController(5), REQUESTS)
    assert tokens(traces) == tokens(plain)
    for trace in traces:
        drafted = [step.num_drafted for step in trace.steps[1:]]
        limits = [min(2 if index % 2 == 0 else 5, left) for index, left in enumerate(room_left(trace))]
        assert drafted == limits
        # The target drafts for itself, so a rejection can only be a padding id, which is never drafted.
        recovered = [record.token_id for record in trace.tokens if record.kind is TokenKind.RECOVERED]
        assert all(token >= target.real_vocab_size for token in recovered)


def room_left(trace: Trace) -> list[int]:
    """Draft tokens that could still be emitted at each decode step: one less than what is missing."""
    emitted, room = 1, []
    for step in trace.steps[1:]:
        room.append(len(trace.token_ids) - emitted - 1)
        emitted += step.num_emitted
    return room


@pytest.mark.parametrize("controller", [FixedController(3), SpoilingController(), StoppingController()])
def test_a_ragged_batch_of_three_gives_what_each_gives_alone(
    target: LoadedModel, plain: list[Trace], tiny_checkpoint: Callable[..., Path], controller: Controller
) -> None:
    drafter = DraftModelDrafter(load_model(str(tiny_checkpoint("llama", seed=1)), implementation="native"))
    batched = decode(target, drafter, controller, REQUESTS)
    reordered = decode(target, drafter, controller, REQUESTS[::-1])
    alone = [decode(target, drafter, controller, [request])[0] for request in REQUESTS]
    assert tokens(batched) == tokens(alone) == tokens(reordered[::-1]) == tokens(plain)
    for one, other in zip(batched, alone, strict=True):
        assert [step.num_accepted for step in one.steps] == [step.num_accepted for step in other.steps]


def test_trees_are_refused_by_a_chain_rule_when_the_engine_is_built(target: LoadedModel) -> None:
    with pytest.raises(UsageError, match="TreeDrafter proposes trees, which GreedyVerifier cannot verify"):
        Engine(target.model, TreeDrafter(), GreedyVerifier(), FixedController(2))
