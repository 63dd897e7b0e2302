"""Every verification rule in the running engine: nothing lost, and coupled output the same whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.models.loading import LoadedModel
from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import PADDING, Draft, SamplingParams, Trace
from specdec.verifiers.base import SiblingDraws, Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.multi_draft_k_seq import KSeqVerifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.multi_draft_without_replacement import WithoutReplacementVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from specdec.verifiers.typical import TypicalVerifier
from tests.fakes import SpoilingController, StoppingController, make_request
from tests.test_lossless import (
    FALSE_ALARM,
    VOCABULARY,
    draft_model,
    exact_joint,
    five_token_model,
    p_value,
    sampled_counts,
)

PROMPT = (1, 2, 3, 1, 2)
SAMPLED = SamplingParams(temperature=1.0)


class SamplingTreeDrafter(Drafter):
    """Two children of the root, and one of the first: drawn from distributions that know nothing of the target."""

    proposes_trees = True

    def __init__(self, draws: SiblingDraws) -> None:
        self.distinct = draws is SiblingDraws.DISTINCT

    def max_nodes(self, depth: int) -> int:
        return 3

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        last = torch.tensor([int(tokens[-1]) for tokens in context.tokens])
        table = torch.rand(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        own = (table / table.sum(-1, keepdim=True))[last]  # [B, V]
        coins = uniforms.draw(Purpose.DRAFT, 0, 3)
        first, second = sample(own, coins[:, 0]), own
        if self.distinct:
            second = own.scatter(1, first[:, None], 0.0)
            second = second / second.sum(-1, keepdim=True)
        tokens = torch.stack([first, sample(second, coins[:, 1]), sample(own, coins[:, 2])], dim=1)
        lengths = torch.tensor([3 if limit > 1 else 0 for limit in max_tokens])
        inside = torch.arange(3) < lengths[:, None]
        parents = torch.tensor([-1, -1, 0]).expand(len(lengths), -1).masked_fill(~inside, PADDING)
        return Draft(tokens.masked_fill(~inside, PADDING), lengths, torch.stack([own, second, own], dim=1), parents)


@pytest.mark.parametrize(
    "rule",
    [
        WithoutReplacementVerifier(),
        TraversalVerifier(),
        *(
            pytest.param(rule, marks=pytest.mark.slow)
            for rule in (WithReplacementVerifier(), TopKVerifier(), KSeqVerifier())
        ),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_sampled_trees_keep_the_targets_distribution(rule: Verifier) -> None:
    model = five_token_model(0)
    engine = Engine(model, SamplingTreeDrafter(rule.siblings), rule, FixedController(2))
    assert p_value(sampled_counts(engine, PROMPT, SAMPLED), exact_joint(model, PROMPT, SAMPLED)) > FALSE_ALARM


@pytest.mark.parametrize(
    "rule", [BlockVerifier(), CoupledVerifier(), TraversalVerifier()], ids=lambda rule: type(rule).__name__
)
def test_sampled_chains_keep_the_targets_distribution(rule: Verifier) -> None:
    model = five_token_model(0)
    engine = Engine(model, draft_model(five_token_model(1)), rule, FixedController(2))
    assert p_value(sampled_counts(engine, PROMPT, SAMPLED), exact_joint(model, PROMPT, SAMPLED)) > FALSE_ALARM


def test_typical_acceptance_does_not_and_is_caught() -> None:
    model = five_token_model(0)
    engine = Engine(model, draft_model(five_token_model(1)), TypicalVerifier(), FixedController(2))
    assert p_value(sampled_counts(engine, PROMPT, SAMPLED), exact_joint(model, PROMPT, SAMPLED)) < 1e-12


@pytest.mark.parametrize("controller", [FixedController(4), StoppingController()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize(
    "rule",
    [BlockVerifier(), CoupledVerifier(), TypicalVerifier(), TopKVerifier(), KSeqVerifier(), TraversalVerifier()],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.parametrize("drafting", ["lookup", "model"])
def test_greedy_output_equals_plain_decoding(
    target: LoadedModel, other: LoadedModel, rule: Verifier, drafting: str, controller: Controller
) -> None:
    requests = [make_request("a", 9), make_request("b", 30, repetition_penalty=1.3)]
    plain = Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0)).generate(requests)
    drafter = PromptLookupDrafter() if drafting == "lookup" else DraftModelDrafter(other)
    found = Engine(target.model, drafter, rule, controller).generate(requests)
    assert [trace.token_ids for trace in found] == [trace.token_ids for trace in plain]


# --- Coupled decoding -------------------------------------------------------------------------------------------------


def coupled_traces(target: LoadedModel, drafter: Drafter, controller: Controller) -> list[Trace]:
    requests = [
        make_request("a", 9, temperature=1.0),
        make_request("b", 30, temperature=0.7, top_p=0.9),
        make_request("c", 3, temperature=1.2, presence_penalty=0.5, max_new_tokens=40),
    ]
    return Engine(target.model, drafter, CoupledVerifier(), controller).generate(requests)


def test_coupled_output_is_the_same_for_every_drafter_and_gamma(target: LoadedModel, other: LoadedModel) -> None:
    plain = coupled_traces(target, NoDrafter(), FixedController(0))
    accepted = {}
    for name, drafter in {
        "lookup": PromptLookupDrafter(),
        "other": DraftModelDrafter(other),
        "self": DraftModelDrafter(target),
    }.items():
        for controller in (FixedController(1), FixedController(5), StoppingController(), SpoilingController()):
            traces = coupled_traces(target, drafter, controller)
            assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in plain]
            assert [trace.finish_reason for trace in traces] == [trace.finish_reason for trace in plain]
        steps = [step for trace in traces for step in trace.steps]
        accepted[name] = sum(step.num_accepted for step in steps) / sum(step.num_drafted for step in steps)
    assert accepted["self"] == 1  # the same distribution runs the same race
    assert accepted["other"] < 1


def test_another_rule_does_not_have_that_property(target: LoadedModel, other: LoadedModel) -> None:
    requests = [make_request("a", 9, temperature=1.0)]
    engines = [Engine(target.model, DraftModelDrafter(other), BlockVerifier(), FixedController(n)) for n in (0, 4)]
    one, other = (engine.generate(requests)[0].token_ids for engine in engines)
    assert one != other


def test_coupled_seeds_and_requests_differ(target: LoadedModel) -> None:
    engine = Engine(target.model, NoDrafter(), CoupledVerifier(), FixedController(0))
    names = [("a", 0), ("a", 1), ("b", 0)]
    texts = []
    for name, seed in names:
        request = make_request("a", temperature=1.0, seed=seed)
        renamed = type(request)(name, request.prompt_ids, request.sampling, request.max_new_tokens)
        texts.append(engine.generate([renamed])[0].token_ids)
    assert len(set(texts)) == 3


def test_positions_do_not_repeat_each_other() -> None:
    """A flat target under one request: successive coupled choices are independent draws."""
    uniforms = [Uniforms([5], [0], positions=[position]) for position in range(4000)]
    flat = torch.full((1, 8), 1 / 8)
    chosen: Tensor = torch.cat([one.choose(flat, 0) for one in uniforms])
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (chosen[:-1].numpy(), chosen[1:].numpy()), 1)
    assert p_value(pairs, np.full((8, 8), 1 / 64)) > FALSE_ALARM
