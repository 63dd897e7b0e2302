"""A step runs where the target does: no operator mixes devices, and the host looks once.

Proved without a GPU: `check_device` decodes on torch's meta device and sees every read.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec.controllers
import specdec.verifiers
from specdec.controllers.base import Controller
from specdec.controllers.confidence import ConfidenceController
from specdec.controllers.fixed import FixedController
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
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel
from specdec.testing import check_device, tiny_target
from specdec.verifiers.base import Verifier
from specdec.verifiers.synthetic import SyntheticVerifier
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


@pytest.mark.parametrize("controller", [FixedController(3), ConfidenceController(max_draft_tokens=3)])
@pytest.mark.parametrize("name", [*CHAINS, *TREES])
def test_every_drafter_leaves_its_tokens_on_the_device(
    drafters: dict[str, Callable[[], Drafter]], name: str, controller: Controller
) -> None:
    report = check_device(drafters[name], controller=controller)
    assert set(report.skipped) == (SAMPLED if name == "oracle" else set())


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda kind: kind.__name__)
def test_every_controller_reads_nothing(
    drafters: dict[str, Callable[[], Drafter]], controller: type[Controller]
) -> None:
    make = MADE.get(controller.__name__, controller)
    assert not check_device(drafters["draft_model"], controller=make, target=small()).skipped
    assert check_device(drafters["eagle_tree"], controller=make, only=["check_greedy_batch"]).checked


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup", "suffix_tree", "tree_cascade"])
def test_every_rule_decides_on_the_device(
    drafters: dict[str, Callable[[], Drafter]], name: str, verifier: type[Verifier]
) -> None:
    rule = MADE.get(verifier.__name__, verifier)()
    if name in TREES and not rule.accepts_trees:
        with pytest.raises(UsageError, match="proposes trees"):
            check_device(drafters[name], verifier=rule, target=small())
        return
    report = check_device(drafters[name], verifier=rule, controller=FixedController(5), target=small())
    assert set(report.skipped) == (SAMPLED if rule.greedy_only else set())
