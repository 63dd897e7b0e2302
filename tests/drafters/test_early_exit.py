"""The target's first layers as its draft: shared, not copied. What every drafter owes is in test_autoregressive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel, load_model
from specdec.models.native.transformer import Transformer
from specdec.verifiers.rejection import RejectionVerifier
from tests.fakes import make_request


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint("qwen3")), implementation="native")


def engine(target: LoadedModel, num_layers: int) -> Engine:
    return Engine(target.model, EarlyExitDrafter(num_layers), RejectionVerifier(), FixedController(3))


def test_layers_norm_and_tables_are_the_targets_own(target: LoadedModel) -> None:
    full = target.model
    assert isinstance(full, Transformer)
    part = full.truncated(2)
    assert part.num_layers == 2
    assert all(ours is theirs for ours, theirs in zip(part.layers, full.layers, strict=False))
    assert (part.norm, part.head) == (full.norm, full.head)
    assert part.embedding is full.embedding
    assert full.num_layers == 3


@pytest.mark.parametrize("num_layers", [1, 2])
def test_it_drafts_what_the_head_makes_of_the_layers_stream(target: LoadedModel, num_layers: int) -> None:
    full = target.model
    assert isinstance(full, Transformer)
    part = full.truncated(num_layers)
    ids, positions = torch.tensor([[5, 7, 11, 5, 7]]), torch.arange(5)[None]
    with torch.inference_mode():
        hidden = full.forward(ids, positions, full.new_cache(1, 8).view([0]), hidden_layers=(num_layers,)).hidden
        assert hidden is not None
        expected = full.head(full.norm(hidden[:, :, 0]))
        found = part.forward(ids, positions, part.new_cache(1, 8).view([0])).logits
    torch.testing.assert_close(found, expected)


def test_memory_is_its_cache_alone(target: LoadedModel) -> None:
    decoding = engine(target, 2)
    decoding.generate([make_request("a")])
    assert decoding.drafter.num_bytes * 3 == target.model.new_cache(1, 256).num_bytes * 2


@pytest.mark.parametrize("num_layers", [-1, 0, 3, 4])
def test_a_part_is_neither_nothing_nor_the_whole(target: LoadedModel, num_layers: int) -> None:
    with pytest.raises(UsageError, match=rf"num_layers={num_layers} is not possible .* 3 layers; use 1 to 2"):
        engine(target, num_layers)


def test_a_target_that_is_not_native_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    other = load_model(str(tiny_checkpoint("gpt2")))
    with pytest.raises(UsageError, match=r"runs through transformers.*implementation=native"):
        engine(other, 1)
