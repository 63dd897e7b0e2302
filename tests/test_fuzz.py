"""The engine under anything a user may ask of it: what holds must hold for every model, prompt, stop, limit and draft.

Models are tiny and have twelve tokens, so that stops, repeats and accepted drafts are common, and compute in float64,
so that no argmax hangs on rounding. Their window is 40 tokens. SPECDEC_FUZZ=5000 pytest tests/test_fuzz.py tries so
many new cases per test, where the suite tries the same few every time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.cache.base import Cache
from specdec.controllers.base import Controller, Observation
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.decoding.stopping import Ending
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter, SuffixTreeDrafter
from specdec.measurement import traces
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel
from specdec.models.native.transformer import Transformer, TransformerConfig
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, FinishReason, Request, SamplingParams, StepRecord, TokenKind, Trace, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.conftest import make_model
from tests.fakes import TreeDrafter

# Half a character, and none at all, are tokens too.
TOKENS = (b"", b"a", b"b", b"ab", b" ", b"\n", b"\xc3", b"\xa9", b"stop", b"st", b"op", b"t\xc3")
VOCABULARY, WINDOW, MAX_NEW_TOKENS = len(TOKENS), 40, 16
KINDS = ("llama", "qwen2", "qwen3", "mistral")
DRAFTS: dict[str, dict[str, int]] = {
    "same": {},
    "padded": {"vocab_size": 16},
    "short-sighted": {"max_position_embeddings": 15},
    "smaller": {"num_hidden_layers": 1},
}
EARNED = ("prompt_lookup", "suffix", *DRAFTS)
"""Drafters whose chains are accepted as far as they deserve; the others are told what the target will say."""

RULES: dict[str, Callable[[], Verifier]] = {
    "rejection": RejectionVerifier,
    "block": BlockVerifier,
    "coupled": CoupledVerifier,
    "traversal": TraversalVerifier,
    "top_k": TopKVerifier,
    "greedy": GreedyVerifier,
    "greedy_tree": GreedyTreeVerifier,
}
CHAIN_RULES = ("rejection", "block", "coupled", "traversal")
TREE_RULES = ("traversal", "top_k")
Pair = tuple[str, str]
"""Who drafts and who verifies."""

SAMPLED: list[Pair] = [
    *((drafting, rule) for drafting in EARNED for rule in CHAIN_RULES),
    *(("suffix_tree", rule) for rule in TREE_RULES),
]
GREEDY: list[Pair] = [
    *SAMPLED,
    *((drafting, "greedy") for drafting in (*EARNED, "oracle")),
    *(("oracle", rule) for rule in CHAIN_RULES),
    *((drafting, rule) for drafting in ("tree", "suffix_tree") for rule in (*TREE_RULES, "greedy_tree")),
]
_ASKED = os.environ.get("SPECDEC_FUZZ")
PROFILE = settings(max_examples=int(_ASKED or 40), derandomize=_ASKED is None)


class Letters(Tokenizer):
    """A tokenizer that is nothing but `TOKENS`."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(TOKENS[index] for index in ids).decode("utf-8", errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {token.hex(): index for index, token in enumerate(TOKENS)}


@cache
def model(kind: str, seed: int, **changes: int) -> LanguageModel:
    settings_ = {"vocab_size": VOCABULARY, "max_position_embeddings": WINDOW, "num_hidden_layers": 2, **changes}
    hf = make_model(kind, seed, bos_token_id=0, eos_token_id=0, **settings_)
    config = TransformerConfig.from_hf(hf.config)
    return Transformer.from_state_dict(config, dict(hf.state_dict()), dtype=torch.float64, name=f"{kind}-{seed}")


def draft_model(target: tuple[str, int], kind: str) -> DraftModelDrafter:
    """The target itself, or one like it that differs in what `kind` says."""
    draft = model(*target, **DRAFTS[kind])
    letters = Letters(None, kind)
    return DraftModelDrafter(LoadedModel(draft, letters, kind, frozenset(), "", VOCABULARY, "native", lambda: draft))


class Wandering(Controller):
    """Draft lengths that follow what a request has emitted; holds that the caches are as long as the texts."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.max_draft_tokens = max(lengths)
        self._draft_lengths = lengths
        self._cache: Cache | None = None

    def new_cache(self, target: LanguageModel, num_slots: int, capacity: int) -> Cache:
        self._cache = target.new_cache(num_slots, capacity)
        return self._cache

    def init(self) -> int:
        return 0

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        assert self._cache is not None
        # All but the last token of whoever is still running; ended requests hold nothing.
        assert [held for held in self._cache.lengths if held] == [length - 1 for length in observation.lengths]
        assert all(left > 0 for left in observation.remaining)
        return [self._draft_lengths[state % len(self._draft_lengths)] for state in states]

    def update(self, state: int, step: StepRecord) -> int:
        return state + step.num_emitted


class Watched(Verifier):
    """A rule whose arguments are the same after it as before, and whose verdict stays within the draft."""

    def __init__(self, rule: Verifier) -> None:
        self.rule = rule
        self.greedy_only, self.accepts_trees = rule.greedy_only, rule.accepts_trees

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        before = copy.deepcopy((draft, target_probs))
        verdict = self.rule.verify(draft, target_probs, uniforms)
        for was, is_ in zip((*vars(before[0]).values(), before[1]), (*vars(draft).values(), target_probs), strict=True):
            assert torch.equal(was, is_) if isinstance(was, Tensor) else was == is_
        assert (verdict.num_accepted <= verdict.num_examined).all()
        assert (verdict.num_examined <= draft.lengths).all()
        assert (target_probs.sum(-1) - 1).abs().max() < 1e-5
        return verdict


@dataclass(frozen=True)
class Case:
    """One call of `generate` and who answers it."""

    target: tuple[str, int]
    pair: Pair
    draft_lengths: tuple[int, ...]
    acceptance_rate: float
    stream: bool
    requests: list[Request]


def sampling(greedy: bool) -> st.SearchStrategy[SamplingParams]:
    truncation = {
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 4, 50]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
    }
    penalties = {
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.2]),
        "seed": st.integers(0, 3),
    }
    return st.builds(SamplingParams, **penalties) if greedy else st.builds(SamplingParams, **truncation, **penalties)


def requests(greedy: bool) -> st.SearchStrategy[list[Request]]:
    lengths = st.sampled_from([1, 2, 3, 5, 9, 16, 25, WINDOW - 9, WINDOW - 2, WINDOW - 1])
    token = st.integers(0, VOCABULARY - 1)
    one = st.builds(
        Request,
        id=st.just(""),
        prompt_ids=lengths.flatmap(lambda length: st.lists(token, min_size=length, max_size=length).map(tuple)),
        sampling=sampling(greedy),
        max_new_tokens=st.integers(1, MAX_NEW_TOKENS),
        eos_ids=st.frozensets(token, max_size=1),
        stop=st.lists(st.sampled_from(["stop", "ba", "é", "\n", "bab", " a", "t"]), max_size=2).map(tuple),
    )
    return st.lists(one, min_size=1, max_size=3).map(
        lambda listed: [replace(request, id=str(index)) for index, request in enumerate(listed)]
    )


def cases(pairs: Sequence[Pair], greedy: bool) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        target=st.tuples(st.sampled_from(KINDS), st.integers(0, 5)),
        pair=st.sampled_from(pairs),
        draft_lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, WINDOW - 1]), min_size=1, max_size=3).map(tuple),
        acceptance_rate=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
        stream=st.booleans(),
        requests=requests(greedy),
    )


def decode(engine: Engine, wanted: list[Request], stream: bool) -> list[Trace]:
    """The traces, after everything that must hold of them was held."""
    before, shown = copy.deepcopy(wanted), dict.fromkeys((request.id for request in wanted), "")

    def show(chunk: Any) -> None:
        shown[chunk.request_id] += chunk.text

    found = engine.generate(wanted, show if stream else None)
    assert wanted == before
    assert [trace.request_id for trace in found] == [request.id for request in wanted]
    traces.to_frames(found, "arm")  # every count adds up
    for request, trace in zip(wanted, found, strict=True):
        check_end(request, trace)
        check_steps(trace)
        assert not stream or shown[request.id] == trace.text
    return found


def check_end(request: Request, trace: Trace) -> None:
    """The end is where its reason says, and nothing that should have ended it lies before."""
    tokens, total = trace.token_ids, len(request.prompt_ids) + len(trace.token_ids)
    assert len(tokens) <= request.max_new_tokens
    assert total <= WINDOW
    ended = [index for index, token in enumerate(tokens) if token in request.eos_ids]
    assert ended == ([len(tokens) - 1] if trace.finish_reason is FinishReason.EOS else [])
    assert not any(stop in trace.text for stop in request.stop)
    if trace.finish_reason is FinishReason.LENGTH:
        assert len(tokens) == request.max_new_tokens
    if trace.finish_reason is FinishReason.WINDOW:
        assert total == WINDOW
    whole = Letters(None, "").decode([token for token in tokens if token not in request.eos_ids])
    assert trace.finish_reason is FinishReason.STOP or trace.text == whole


@pytest.mark.parametrize(("limit", "eos_ids"), [(2, frozenset()), (9, frozenset({2}))])
def test_a_stop_string_beside_half_a_character_is_found_at_the_end(limit: int, eos_ids: frozenset[int]) -> None:
    ending = Ending(Request("", (0,), SamplingParams(), limit, eos_ids, ("t",)), WINDOW, Letters(None, "").decode)
    ending.extend([1, 11, 2])
    assert (ending.text, ending.tokens, ending.reason) == ("a", [1], FinishReason.STOP)


def check_steps(trace: Trace) -> None:
    """Contexts grow by what is emitted; the prefill drafts nothing; tokens are tokens."""
    assert trace.steps[0].num_drafted == 0
    length = trace.prompt_length
    for step in trace.steps:
        assert step.context_length == length or step.num_emitted == 0  # a stop string may reach back over steps
        length += step.num_emitted
    assert length == trace.prompt_length + len(trace.token_ids)
    assert [record.token_id for record in trace.tokens if record.emitted] == list(trace.token_ids)
    assert all(0 <= record.token_id < VOCABULARY for record in trace.tokens)
    kinds = [record.kind for record in trace.tokens]
    assert kinds.count(TokenKind.REJECTED) == kinds.count(TokenKind.RECOVERED)


def engine_for(case: Case) -> Engine:
    controller, target, rule = Wandering(case.draft_lengths), model(*case.target), Watched(RULES[case.pair[1]]())
    letters = Letters(None, "letters")
    return Engine(target, drafter_for(case), rule, controller, tokenizer=letters, new_cache=controller.new_cache)


def plain_engine(case: Case) -> Engine:
    target, letters = model(*case.target), Letters(None, "letters")
    return Engine(target, NoDrafter(), RejectionVerifier(), FixedController(0), tokenizer=letters)


def knowing(drafter: OracleDrafter, case: Case) -> OracleDrafter:
    """Shown what the target would say if nothing stopped it."""
    unstopped = [replace(request, eos_ids=frozenset(), stop=()) for request in case.requests]
    for trace in plain_engine(case).generate(unstopped):
        drafter.reveal(trace.request_id, trace.token_ids)
    return drafter


def drafter_for(case: Case) -> Drafter:
    makers: dict[str, Callable[[], Drafter]] = {
        "prompt_lookup": PromptLookupDrafter,
        "suffix": SuffixDrafter,
        "suffix_tree": SuffixTreeDrafter,
        "oracle": lambda: knowing(OracleDrafter(case.acceptance_rate), case),
        "tree": lambda: knowing(TreeDrafter(case.acceptance_rate), case),
        **{kind: lambda kind=kind: draft_model(case.target, kind) for kind in DRAFTS},  # type: ignore[misc]
    }
    return makers[case.pair[0]]()


@PROFILE
@given(cases(GREEDY, greedy=True))
def test_greedy_output_is_plain_decodings_whatever_is_asked(case: Case) -> None:
    expected, engine = decode(plain_engine(case), case.requests, case.stream), engine_for(case)
    found = decode(engine, case.requests, case.stream)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish_reason is other.finish_reason
        event(f"{case.pair}: {other.finish_reason}")
    check_drafts(case, found, engine.drafter)


def check_drafts(case: Case, found: list[Trace], drafter: Drafter) -> None:
    """No draft is longer than asked for, nor than what could still be emitted; in a tree that counts the depth."""
    for request, trace in zip(case.requests, found, strict=True):
        most = min(request.max_new_tokens, WINDOW - len(request.prompt_ids))
        for step in trace.steps[1:]:
            left = most - (step.context_length - trace.prompt_length)
            assert step.num_drafted <= drafter.max_nodes(min(left - 1, max(case.draft_lengths)))
    if case.acceptance_rate == 1.0 and case.pair[0] in ("oracle", "tree"):
        assert not any(record.kind is TokenKind.REJECTED for trace in found for record in trace.tokens)


@pytest.mark.slow
@PROFILE
@given(cases(SAMPLED, greedy=False))
def test_sampled_output_is_the_same_alone_batched_and_again(case: Case) -> None:
    engine = engine_for(case)
    together = decode(engine, case.requests, case.stream)
    again = decode(engine, case.requests[::-1], case.stream)[::-1]
    alone = [decode(engine, [request], case.stream)[0] for request in case.requests]
    for found in (again, alone):
        assert [trace.token_ids for trace in found] == [trace.token_ids for trace in together]
        assert [trace.text for trace in found] == [trace.text for trace in together]
        assert [trace.finish_reason for trace in found] == [trace.finish_reason for trace in together]
    check_drafts(case, together, engine.drafter)
