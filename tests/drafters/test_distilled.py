"""A trained draft model on its target's tables. What every drafter owes is in test_autoregressive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.distilled import DistilledDrafter
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel, load_model
from specdec.models.native.linear import linear
from specdec.types import Trace
from specdec.verifiers.rejection import RejectionVerifier
from tests.conftest import make_model
from tests.drafts import shallow_weights, write_shallow
from tests.fakes import make_request

VOCABULARY = torch.tensor([3, 250, *range(60, 130), 7])


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def target(tiny_checkpoint: Callable[..., Path], request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param)), implementation="native")


def relative(target: LoadedModel, **changes: Any) -> Any:
    """A transformers model of the target's shape, with other weights."""
    return make_model(Path(target.name).name.split("-")[0], 5, **changes)


def write(folder: Path, target: LoadedModel, **changes: Any) -> str:
    """Two trained layers."""
    write_shallow(folder, target.model, relative(target), 2, VOCABULARY, **changes)
    return str(folder)


def decode(target: LoadedModel, drafter: DistilledDrafter, temperature: float = 0.0) -> list[Trace]:
    requests = [make_request("a", 12, temperature=temperature), make_request("b", 30, temperature=temperature)]
    return Engine(target.model, drafter, RejectionVerifier(), FixedController(4)).generate(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_proposes_what_is_in_its_vocabulary_and_nothing_else(
    target: LoadedModel, tmp_path: Path, temperature: float
) -> None:
    traces = decode(target, DistilledDrafter(write(tmp_path / "draft", target)), temperature)
    drafted = {
        record.token_id for trace in traces for record in trace.tokens if record.kind in ("accepted", "rejected")
    }
    assert len(drafted) > 3
    assert drafted <= set(VOCABULARY.tolist())


def test_its_logits_are_those_of_its_layers_between_the_targets_tables(target: LoadedModel, tmp_path: Path) -> None:
    drafter = DistilledDrafter(write(tmp_path / "draft", target))
    drafter.bind(target.model, None)

    tables, hf = target.model.tables(), relative(target, num_hidden_layers=2)
    weights = shallow_weights(relative(target), 2, VOCABULARY)
    stored = {name: weight.half().float() for name, weight in weights.items() if name != "draft_vocab"}
    hf.load_state_dict(stored | {"model.embed_tokens.weight": tables.embedding, "lm_head.weight": tables.head})
    ids = torch.tensor([[5, 7, 11, 5, 7]])
    with torch.inference_mode():
        view = drafter.model.new_cache(1, 8).view([0])
        found = drafter.model.forward(ids, torch.arange(5)[None], view).logits
        expected: Tensor = hf(ids).logits[..., VOCABULARY]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert drafter.model.embedding is target.model.tables().embedding


def test_memory_is_its_cache_its_layers_and_its_rows_of_the_head(target: LoadedModel, tmp_path: Path) -> None:
    drafter = DistilledDrafter(write(tmp_path / "draft", target))
    decode(target, drafter)
    cache = drafter.model.new_cache(2, 256).num_bytes
    weights = shallow_weights(relative(target), 2, VOCABULARY)
    own = sum(weight.nbytes for name, weight in weights.items() if name != "draft_vocab")
    head = linear(torch.empty(len(VOCABULARY), target.model.hidden_size))
    assert drafter.num_bytes == cache + own + head.num_bytes


def test_a_draft_of_another_target_is_refused(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, kind = write(tmp_path / "draft", target), Path(target.name).name.split("-")[0]
    other = load_model(str(tiny_checkpoint(kind, seed=7)), implementation="native")
    with pytest.raises(UsageError, match=r"was trained for .* at revision .*check_revision=false"):
        decode(other, DistilledDrafter(folder))
    assert decode(other, DistilledDrafter(folder, check_revision=False))


def test_weights_that_are_missing_are_named(target: LoadedModel, tmp_path: Path) -> None:
    for name, message in {
        "draft_vocab": "has no draft_vocab; copy or train it again",
        "model.norm.weight": "lack model.norm.weight",
    }.items():
        weights = shallow_weights(relative(target), 2, VOCABULARY)
        del weights[name]
        with pytest.raises(UsageError, match=message):
            decode(target, DistilledDrafter(write(tmp_path / name, target, weights=weights)))
    with pytest.raises(UsageError, match="there is no trained draft nowhere"):
        DistilledDrafter("nowhere")


def test_a_vocabulary_beyond_the_targets_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    for ids in (torch.tensor([1, 264]), torch.tensor([4, 4])):
        folder = write(tmp_path / "draft", target, weights=shallow_weights(relative(target), 2, ids))
        with pytest.raises(UsageError, match=r"the draft vocabulary of .*; train the draft again"):
            decode(target, DistilledDrafter(folder))


def test_a_head_of_features_is_no_draft_model(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is of kind 'eagle'"):
        DistilledDrafter(write(tmp_path / "draft", target, kind="eagle"))
