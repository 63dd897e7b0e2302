"""Models that are loaded once for several users in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.drafters.draft_model import DraftModelDrafter
from specdec.models.loading import load_model, shared_models


def test_what_was_loaded_in_one_block_is_there_in_the_next(tiny_checkpoint: Callable[..., Path]) -> None:
    path, models = str(tiny_checkpoint("llama")), dict[str, Any]()
    with shared_models(models):
        first = load_model(path)
        assert load_model(path) is first
        assert load_model(path, dtype="bfloat16") is not first
    with shared_models(models):
        assert DraftModelDrafter.load(path).model is not first.model, "asked for otherwise: a device, a revision, ..."
        assert load_model(path) is first
    assert load_model(path) is not first, "outside, nothing is shared"


def test_what_a_block_did_not_ask_for_is_gone(tiny_checkpoint: Callable[..., Path]) -> None:
    path, models = str(tiny_checkpoint("llama")), dict[str, Any]()
    with shared_models(models):
        first = load_model(path)
    with shared_models(models):
        load_model(str(tiny_checkpoint("llama", seed=1)))
    assert len(models) == 1
    with shared_models(models):
        assert load_model(path) is not first
