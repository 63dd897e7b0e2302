"""A cascade: every row goes its own way, the expensive part rests where it can, and nothing is lost or forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.controllers.base import Controller, Observation
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters import cascade
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.cascade import CascadeDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter, SuffixTreeDrafter
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel
from specdec.models.native.transformer import Transformer, TransformerConfig
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Request, SamplingParams, Trace, Verdict
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.conftest import make_model
from tests.drafts import write_eagle
from tests.fakes import HiddenDrafter, SpoilingController, StoppingController, TreeDrafter, make_request
from tests.test_lossless import (
    FALSE_ALARM,
    SAMPLINGS,
    draft_model,
    exact_joint,
    five_token_model,
    p_value,
    sampled_counts,
)

REQUESTS = [
    make_request("repeats", 30, max_new_tokens=50),
    make_request("is new", 4, max_new_tokens=50),
    make_request("ends early", 17, max_new_tokens=9),
]
MakePart = Callable[[], Drafter]


@pytest.fixture(scope="module")
def head(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("drafts") / "head"
    return str(write_eagle(directory, target.model, torch.arange(200)).directory)


@pytest.fixture(scope="module")
def plain(target: LoadedModel) -> list[Trace]:
    return Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0)).generate(REQUESTS)


@pytest.fixture(scope="module")
def parts(target: LoadedModel, other: LoadedModel, head: str) -> dict[str, MakePart]:
    return {
        "lookup": lambda: PromptLookupDrafter(3, 2),
        "suffix": lambda: SuffixDrafter(min_score=1.5),
        "suffix_tree": lambda: SuffixTreeDrafter(6),
        "model": lambda: DraftModelDrafter(other),
        "self": lambda: DraftModelDrafter(target),
        "eagle": lambda: EagleDrafter(head),
        "oracle": lambda: OracleDrafter(0.7),
        "tree": lambda: TreeDrafter(0.6),
        "suffix, then model": lambda: CascadeDrafter(SuffixDrafter(), DraftModelDrafter(other), 3),
    }


def decode(target: LoadedModel, drafter: Drafter, controller: Controller, requests: Sequence[Request]) -> list[Trace]:
    verifier = GreedyTreeVerifier() if drafter.proposes_trees else RejectionVerifier()
    return Engine(target.model, drafter, verifier, controller, tokenizer=target.tokenizer).generate(requests)


def tokens(traces: Sequence[Trace]) -> list[tuple[int, ...]]:
    return [trace.token_ids for trace in traces]


def load_from(hf: Any, like: LoadedModel) -> LoadedModel:
    """A tiny model that is on no disk, with the target's tokenizer."""
    config = TransformerConfig.from_hf(hf.config)
    model = Transformer.from_state_dict(config, dict(hf.state_dict()), device=torch.device("cpu"), dtype=torch.float32)
    return replace(like, model=model, name="small")


# --- Nothing is lost --------------------------------------------------------------------------------------------------

PAIRS = [
    ("lookup", "model"),
    ("suffix", "eagle"),
    ("model", "lookup"),
    ("eagle", "self"),
    ("oracle", "model"),
    ("lookup", "suffix, then model"),
    ("suffix, then model", "eagle"),
    ("lookup", "suffix_tree"),
    ("suffix_tree", "eagle"),
    ("suffix", "tree"),
    ("tree", "model"),
]


@pytest.mark.parametrize("controller", [FixedController(4), SpoilingController(), StoppingController()])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_greedy_output_equals_plain_decoding(
    target: LoadedModel,
    plain: list[Trace],
    parts: dict[str, MakePart],
    first: str,
    second: str,
    controller: Controller,
) -> None:
    drafter = CascadeDrafter(parts[first](), parts[second](), min_tokens=3)
    for trace in plain:
        drafter.reveal(trace.request_id, trace.token_ids)
    assert tokens(decode(target, drafter, controller, REQUESTS)) == tokens(plain)


PROMPT = (1, 2, 3, 1, 2)


def first_three_tokens(drafter: Drafter, controller: Controller, sampling: SamplingParams) -> float:
    """p-value of their joint."""
    target = five_token_model(0)
    counts = sampled_counts(Engine(target, drafter, RejectionVerifier(), controller), PROMPT, sampling)
    return p_value(counts, exact_joint(target, PROMPT, sampling))


@pytest.mark.parametrize(
    ("order", "options"), [("lookup first", "temperature"), ("lookup first", "penalised"), ("model first", "truncated")]
)
def test_sampled_output_has_the_targets_distribution(order: str, options: str) -> None:
    # Rows differ from their first token on: some find it in the prompt, others need the model.
    lookup, model = PromptLookupDrafter(2, 2), draft_model(five_token_model(1))
    drafter = CascadeDrafter(lookup, model, 2) if order == "lookup first" else CascadeDrafter(model, lookup, 2)
    assert first_three_tokens(drafter, FixedController(2), SAMPLINGS[options]) > FALSE_ALARM


class StopsAtEvenTokens(Controller):
    """Looks at what was drawn, which is allowed: only later tokens are withheld."""

    max_draft_tokens = 2

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [2] * len(states)

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return tokens % 2 == 0


def test_a_sampled_draft_is_never_judged_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = CascadeDrafter(draft_model(five_token_model(1)), PromptLookupDrafter(), min_tokens=2)
    assert first_three_tokens(drafter, StopsAtEvenTokens(), SAMPLINGS["temperature"]) > FALSE_ALARM
    monkeypatch.setattr(cascade, "_sampled", lambda draft: (False,) * len(draft.tokens))
    assert first_three_tokens(drafter, StopsAtEvenTokens(), SAMPLINGS["temperature"]) < 1e-9, "the mutant anticipates"


@pytest.mark.parametrize(("first", "second"), [("lookup", "eagle"), ("suffix, then model", "eagle")])
def test_sampled_tokens_are_the_same_alone_batched_and_reordered(
    target: LoadedModel, parts: dict[str, MakePart], first: str, second: str
) -> None:
    temperatures = (1.0, 0.3, 0.0)
    requests = [
        replace(request, sampling=replace(request.sampling, temperature=temperature))
        for request, temperature in zip(REQUESTS, temperatures, strict=True)
    ]
    drafter = CascadeDrafter(parts[first](), parts[second](), min_tokens=2)
    batched = decode(target, drafter, FixedController(4), requests)
    reordered = decode(target, drafter, FixedController(4), requests[::-1])[::-1]
    alone = [decode(target, drafter, FixedController(4), [request])[0] for request in requests]
    assert tokens(batched) == tokens(reordered) == tokens(alone)


# --- Parts keep their state -------------------------------------------------------------------------------------------


class Inspected(Drafter):
    """A part that compares each of its drafts with those of a drafter which sees the requests for the first time."""

    def __init__(self, make: MakePart) -> None:
        self._make, self._part = make, make()
        self.hidden_layers = self._part.hidden_layers
        self.lagging = self.calls = 0

    def bind(self, target: LanguageModel, tokenizer: Any) -> None:
        self._target, self._tokenizer = target, tokenizer
        self._part.bind(target, tokenizer)

    def reserve(self, num_slots: int, capacity: int) -> None:
        self._part.reserve(num_slots, capacity)

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        self._seen = dict(zip(context.slots, map(len, context.tokens), strict=True))
        self._part.begin(context, hidden)

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        self.calls += 1
        lengths = list(map(len, context.tokens))
        self.lagging += any(length - self._seen[slot] > 8 for slot, length in zip(context.slots, lengths, strict=True))
        self._seen |= dict(zip(context.slots, lengths, strict=True))
        draft = self._part.propose(context, max_tokens, stop, uniforms)
        expected = self._fresh(context).propose(context, max_tokens, stop, uniforms)
        assert draft.tokens.tolist() == expected.tokens.tolist()
        assert draft.lengths.tolist() == expected.lengths.tolist()
        if draft.probs is not None:
            torch.testing.assert_close(draft.probs, expected.probs, atol=1e-4, rtol=1e-3)
        return draft

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        self._part.observe(context, draft, verdict, hidden)

    def reset(self, slot: int) -> None:
        self._part.reset(slot)

    def _fresh(self, context: DraftContext) -> Drafter:
        fresh = self._make()
        fresh.bind(self._target, self._tokenizer)
        fresh.reserve(max(context.slots) + 1, 256)
        features = [self._features(row) for row in context.tokens] if self.hidden_layers else None
        fresh.begin(replace(context, num_prompt=tuple(len(row) - 1 for row in context.tokens)), features)
        return fresh

    def _features(self, row: Any) -> Tensor:
        positions, cache = torch.arange(len(row) - 1)[None], self._target.new_cache(1, len(row))
        output = self._target.forward(
            torch.tensor(row[:-1])[None], positions, cache.view([0]), hidden_layers=self.hidden_layers
        )
        assert output.hidden is not None
        return output.hidden[0]


class Spotty(Drafter):
    """Knows what to say in three quarters of the text, and is silent in every fourth."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._continuations = {trace.request_id: trace.token_ids for trace in traces}

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        chains = []
        for name, row, prompt, limit in zip(
            context.request_ids, context.tokens, context.num_prompt, max_tokens, strict=True
        ):
            start = len(row) - prompt
            chains.append(self._continuations[name][start : start + limit] if len(row) % 16 < 12 else ())
        return Draft.from_chains(chains)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("second", ["model", "self", "eagle"])
def test_a_part_that_rested_drafts_as_if_it_had_never(
    target: LoadedModel, parts: dict[str, MakePart], second: str, temperature: float
) -> None:
    lengths = {"a": 30, "b": 4, "c": 17}
    requests = [
        make_request(name, length, max_new_tokens=60, temperature=temperature) for name, length in lengths.items()
    ]
    known = decode(target, NoDrafter(), FixedController(0), requests)
    part = Inspected(parts[second])
    traces = decode(target, CascadeDrafter(Spotty(known), part), FixedController(4), requests)
    assert part.calls > part.lagging > 0
    assert temperature > 0 or tokens(traces) == tokens(known)


@pytest.mark.parametrize("first", ["model", "self", "eagle"])
def test_a_part_whose_short_draft_did_not_stand_forgets_it(
    target: LoadedModel, parts: dict[str, MakePart], first: str
) -> None:
    part = Inspected(parts[first])
    decode(target, CascadeDrafter(part, parts["self"](), min_tokens=3), StoppingController(), REQUESTS)
    assert part.calls > 0


def test_a_part_that_was_silent_beside_others_does_not_take_their_tokens_for_its_own(target: LoadedModel) -> None:
    # A draft model with a short window falls silent in the long row while it still drafts for the short one.
    small = load_from(make_model("llama", 1, max_position_embeddings=40), target)
    part = Inspected(lambda: DraftModelDrafter(small))
    requests = [make_request("long", 34, max_new_tokens=40), make_request("short", 3, max_new_tokens=40)]
    plain = decode(target, NoDrafter(), FixedController(0), requests)
    traces = decode(target, CascadeDrafter(PromptLookupDrafter(), part, min_tokens=5), StoppingController(), requests)
    assert tokens(traces) == tokens(plain)
    assert part.calls > 0


def test_there_is_room_to_catch_up_beside_a_long_row(target: LoadedModel, tmp_path: Path) -> None:
    roomy = load_from(make_model("llama", max_position_embeddings=512), target)
    head = write_eagle(tmp_path / "head", roomy.model, torch.arange(200), max_position_embeddings=512).directory
    requests = [make_request("long", 215, max_new_tokens=30), make_request("rests", 4, max_new_tokens=90)]
    plain, oracle = decode(roomy, NoDrafter(), FixedController(0), requests), OracleDrafter(1.0)
    for trace, known in zip(plain, (0, 60), strict=True):
        oracle.reveal(trace.request_id, trace.token_ids[:known])
    traces = decode(roomy, CascadeDrafter(oracle, EagleDrafter(str(head))), FixedController(4), requests)
    assert tokens(traces) == tokens(plain)


def test_every_part_gets_the_features_it_asked_for(target: LoadedModel, plain: list[Trace], head: str) -> None:
    watcher, eagle = HiddenDrafter(), EagleDrafter(head)
    watcher.hidden_layers = (3, 0)
    drafter = CascadeDrafter(CascadeDrafter(PromptLookupDrafter(), eagle), watcher)
    assert drafter.hidden_layers == (0, 1, 3)
    assert tokens(decode(target, drafter, SpoilingController(), REQUESTS)) == tokens(plain)
    for request, trace in zip(REQUESTS, plain, strict=True):
        found = torch.cat(watcher.features[request.id])
        ids = torch.tensor([*request.prompt_ids, *trace.token_ids])[None, : len(found)]
        cache = target.model.new_cache(1, len(found))
        with torch.inference_mode():
            positions = torch.arange(len(found))[None]
            output = target.model.forward(ids, positions, cache.view([0]), hidden_layers=(3, 0))
        assert output.hidden is not None
        torch.testing.assert_close(found, output.hidden[0])


# --- The expensive part rests -----------------------------------------------------------------------------------------


class Counted(DraftModelDrafter):
    """Writes down who it was asked about."""

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        self.asked.append(context.request_ids)
        return super().propose(context, max_tokens, stop, uniforms)

    asked: list[tuple[str, ...]]


def test_a_step_in_which_the_first_part_serves_every_row_does_not_run_the_second(
    target: LoadedModel, plain: list[Trace]
) -> None:
    second = Counted(target)
    second.asked = []
    oracle = OracleDrafter(1.0)
    for trace in plain:
        oracle.reveal(trace.request_id, trace.token_ids)
    traces = decode(target, CascadeDrafter(oracle, second, min_tokens=4), FixedController(4), REQUESTS)
    assert tokens(traces) == tokens(plain)
    assert second.asked == []


def test_only_the_rows_in_need_are_read(target: LoadedModel, plain: list[Trace]) -> None:
    second = Counted(target)
    second.asked = []
    oracle = OracleDrafter(1.0)
    for trace in plain:
        known = trace.token_ids if trace.request_id == "repeats" else trace.token_ids[:5]
        oracle.reveal(trace.request_id, known)
    traces = decode(target, CascadeDrafter(oracle, second), FixedController(4), REQUESTS)
    assert tokens(traces) == tokens(plain)
    assert {name for asked in second.asked for name in asked} == {"is new", "ends early"}


# --- What it declares -------------------------------------------------------------------------------------------------


def test_a_cascade_declares_what_its_parts_do(target: LoadedModel, parts: dict[str, MakePart]) -> None:
    drafter = CascadeDrafter(parts["tree"](), parts["model"]())
    assert drafter.proposes_trees
    assert drafter.greedy_only
    assert drafter.synthetic
    assert drafter.max_nodes(4) == 8
    plain = CascadeDrafter(parts["lookup"](), parts["model"]())
    assert [plain.proposes_trees, plain.greedy_only, plain.synthetic, plain.hidden_layers] == [False, False, False, ()]
    assert plain.max_nodes(4) == 4
    Engine(target.model, plain, RejectionVerifier(), FixedController(4), tokenizer=target.tokenizer)
    assert plain.num_bytes == plain.second.num_bytes > 0


def test_an_empty_draft_cannot_stand() -> None:
    with pytest.raises(UsageError, match="min_tokens=0"):
        CascadeDrafter(NoDrafter(), NoDrafter(), min_tokens=0)
