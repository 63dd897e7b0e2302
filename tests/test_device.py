"""A step runs where the target does: no operator mixes devices, and the host looks once.

Proved without a GPU: `check_device` decodes on torch's meta device and sees every read.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import specdec.controllers
import specdec.verifiers
from specdec.controllers.base import Controller
from specdec.controllers.confidence import ConfidenceController
from specdec.controllers.entropy import AdaEDLController
from specdec.controllers.fixed import FixedController
from specdec.controllers.survival import SurvivalController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.cascade import CascadeDrafter
from specdec.drafters.distilled import DistilledDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_tree import EagleTreeDrafter, JointTree, StaticTree
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter, SuffixTreeDrafter
from specdec.errors import ModelError, UsageError
from specdec.models.base import LanguageModel, Output
from specdec.models.loading import LoadedModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.testing import check_device, tiny_target
from specdec.types import Request, SamplingParams, Trace
from specdec.verifiers.base import SiblingDraws, Verifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.synthetic import SyntheticVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.conftest import make_model
from tests.drafts import write_eagle, write_shallow

VOCABULARY = torch.tensor([0, 2, 3, 4, 6, 8, 9])


def shipped(package: object, kind: type) -> list[type]:
    """Every concrete class of a kind in a package."""
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    found = {
        value: None
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, kind) and not inspect.isabstract(value)
    }
    return sorted(found, key=lambda value: value.__name__)


VERIFIERS = shipped(specdec.verifiers, Verifier)
CONTROLLERS = shipped(specdec.controllers, Controller)
MADE = {"SyntheticVerifier": lambda: SyntheticVerifier(0.5), "FixedController": lambda: FixedController(3)}


CHAINS = ["none", "prompt_lookup", "suffix", "oracle", "draft_model", "distilled", "early_exit", "eagle", "cascade"]
TREES = ["suffix_tree", "eagle_static_tree", "eagle_tree", "tree_cascade"]
SAMPLED = {"check_sampled_steps", "check_sampled_batch"}


def small(**changes: Any) -> LoadedModel:
    return tiny_target(device="meta", num_layers=1, **changes)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Drafter]]:
    folder, target = tmp_path_factory.mktemp("drafts"), tiny_target().model
    head = str(write_eagle(folder / "head", target, VOCABULARY, max_position_embeddings=64).directory)
    hf = make_model("llama", max_position_embeddings=64, vocab_size=target.vocab_size)
    shallow = str(write_shallow(folder / "shallow", target, hf, 1, VOCABULARY).directory)
    return {
        "none": NoDrafter,
        "prompt_lookup": PromptLookupDrafter,
        "suffix": SuffixDrafter,
        "suffix_tree": SuffixTreeDrafter,
        "oracle": lambda: OracleDrafter(0.8),
        "draft_model": lambda: DraftModelDrafter(small(noise=0.3)),
        "distilled": lambda: DistilledDrafter(shallow, check_revision=False),
        "early_exit": lambda: EarlyExitDrafter(2),
        "eagle": lambda: EagleDrafter(head, check_revision=False),
        "eagle_static_tree": lambda: EagleTreeDrafter(head, tree=StaticTree([3, 2, 1]), check_revision=False),
        "eagle_tree": lambda: EagleTreeDrafter(head, tree=JointTree(3, 4, 8), check_revision=False),
        "cascade": lambda: CascadeDrafter(PromptLookupDrafter(9, 9), EagleDrafter(head, check_revision=False)),
        "tree_cascade": lambda: CascadeDrafter(SuffixTreeDrafter(), DraftModelDrafter(small()), min_tokens=4),
    }


def target_for(name: str) -> LoadedModel:
    """One layer where nothing asks for more."""
    whole = name in ("distilled", "early_exit", "cascade") or "eagle" in name
    return tiny_target(device="meta") if whole else small()


@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_every_drafter_leaves_its_tokens_on_the_device(drafters: dict[str, Callable[[], Drafter]], name: str) -> None:
    report = check_device(drafters[name], controller=FixedController(3), target=target_for(name))
    assert set(report.skipped) == (SAMPLED if name == "oracle" else set())


@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_every_drafter_reads_twice_where_it_is_watched(drafters: dict[str, Callable[[], Drafter]], name: str) -> None:
    check = "check_greedy_batch" if name == "oracle" else "check_sampled_batch"
    watching = ConfidenceController(max_draft_tokens=3)
    assert check_device(drafters[name], controller=watching, target=target_for(name), only=[check]).checked == (check,)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda kind: kind.__name__)
def test_every_controller_reads_nothing(
    drafters: dict[str, Callable[[], Drafter]], controller: type[Controller]
) -> None:
    make = MADE.get(controller.__name__, controller)
    assert check_device(drafters["draft_model"], controller=make, target=small(), only=["check_sampled_batch"]).checked
    assert check_device(drafters["eagle_tree"], controller=make, only=["check_greedy_steps"]).checked


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "name",
    ["draft_model", pytest.param("prompt_lookup", marks=pytest.mark.slow), "suffix_tree", "tree_cascade"],
)
def test_every_rule_decides_on_the_device(
    drafters: dict[str, Callable[[], Drafter]], name: str, verifier: type[Verifier]
) -> None:
    rule = MADE.get(verifier.__name__, verifier)()
    check = "check_greedy_batch" if rule.greedy_only else "check_sampled_batch"
    asked = {"verifier": rule, "controller": FixedController(5), "target": small(), "only": [check]}
    if name in TREES and not rule.accepts_trees:
        with pytest.raises(UsageError, match="proposes trees"):
            check_device(drafters[name], **asked)
    else:
        assert check_device(drafters[name], **asked).checked == (check,)


# --- The same numbers -------------------------------------------------------------------------------------------------


class Far(torch.Tensor):
    """On the host, and says it is not: what is made of it takes the way that never looks, with real numbers."""

    is_cpu = False  # type: ignore[assignment]


def far(model: LanguageModel) -> None:
    """Let a model's logits come from far away."""
    near = model.forward

    def forward(*arguments: Any, **options: Any) -> Output:
        output = near(*arguments, **options)
        return replace(output, logits=output.logits.as_subclass(Far))

    model.forward = forward  # type: ignore[method-assign]


class FarTree(EagleTreeDrafter):
    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        super().bind(target, tokenizer)
        near = self._head.logits
        self._head.logits = lambda stream: near(stream).as_subclass(Far)  # type: ignore[method-assign]


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.9, top_k=6, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.2),
]


def decoded(drafting: str, head: str, rule: Verifier, controller: Controller, away: bool) -> list[Trace]:
    target, draft = tiny_target(), tiny_target(noise=0.3)
    tree: Drafter = (FarTree if away else EagleTreeDrafter)(head, tree=JointTree(3, 4, 8))
    model = DraftModelDrafter(draft)
    drafter = {"model": model, "tree": tree, "both": CascadeDrafter(SuffixTreeDrafter(), model, min_tokens=2)}[drafting]
    if away:
        far(target.model)
        far(draft.model)
    engine = Engine(target.model, drafter, rule, controller, tokenizer=target.tokenizer)
    samplings = SAMPLINGS[:1] if rule.greedy_only else SAMPLINGS
    requests = [
        Request(f"{number}", (1, 2, 3, 4, 1, 2, 3, 5, 1, 2)[number:], sampling, max_new_tokens=12)
        for number, sampling in enumerate(samplings)
    ]
    return [trace for batch in (requests, requests[:1]) for trace in engine.generate(batch)]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafts") / "head"
    return str(write_eagle(folder, tiny_target().model, VOCABULARY, max_position_embeddings=64).directory)


def require_equal(near: list[Trace], far: list[Trace]) -> None:
    assert [trace.token_ids for trace in near] == [trace.token_ids for trace in far]
    for one, other in zip(near, far, strict=True):
        counts = [[(s.num_drafted, s.num_examined, s.num_accepted) for s in trace.steps] for trace in (one, other)]
        assert counts[0] == counts[1]
        for mine, theirs in zip(one.tokens, other.tokens, strict=True):
            for name in ("target_prob", "draft_prob", "model_entropy_bits", "expected_acceptance"):
                assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-4)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("drafting", ["model", "both"])
def test_a_rule_that_never_looks_decides_the_same(head: str, verifier: type[Verifier], drafting: str) -> None:
    rule = MADE.get(verifier.__name__, verifier)()
    if not rule.accepts_trees or rule.siblings is SiblingDraws.INDEPENDENT:  # which copied siblings are not
        drafting = "model"
    require_equal(*(decoded(drafting, head, rule, FixedController(3), away) for away in (False, True)))


@pytest.mark.parametrize("drafting", ["model", "tree"])
@pytest.mark.parametrize("controller", [SurvivalController, AdaEDLController, ConfidenceController])
def test_a_draft_that_is_cut_afterwards_is_the_one_that_was_stopped(
    head: str, controller: Callable[[], Controller], drafting: str
) -> None:
    rule = TopKVerifier() if drafting == "tree" else RejectionVerifier()
    near, away = (decoded(drafting, head, rule, controller(), away) for away in (False, True))
    require_equal(near, away)
    assert any(0 < step.num_drafted < 8 for trace in near for step in trace.steps)


@pytest.mark.parametrize("drafting", ["model", "tree"])
def test_broken_logits_are_named_when_the_step_is_read(head: str, drafting: str) -> None:
    class Broken(FarTree):
        def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
            super().bind(target, tokenizer)
            near = self._head.logits
            self._head.logits = lambda stream: near(stream) * math.nan  # type: ignore[method-assign]

    target, draft = tiny_target(), tiny_target()
    drafter: Drafter = Broken(head, tree=StaticTree([2, 1])) if drafting == "tree" else DraftModelDrafter(draft)
    draft.model.norm.weight[:] = math.nan
    far(target.model)
    far(draft.model)
    rule = GreedyTreeVerifier() if drafting == "tree" else RejectionVerifier()
    engine = Engine(target.model, drafter, rule, FixedController(2))
    with pytest.raises(ModelError, match=r"draft .* gave NaN or infinite logits .*'a'"):
        engine.generate([Request("a", (1, 2, 3))])
