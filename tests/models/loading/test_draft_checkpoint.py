"""Trained drafts on disk: written whole, read back as written, and refused where they do not belong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from specdec.drafters.eagle import EagleDrafter
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel, load_model
from specdec.models.loading.draft_checkpoint import DraftCheckpoint, draft_names
from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary
from tests.drafts import HIDDEN_LAYERS, TRANSFORMER, eagle_weights, write_eagle

DRAFT_VOCAB = torch.tensor([5, 200, 3, 77])


def change(directory: Path, **values: Any) -> None:
    """Change entries of a written configuration; None takes one out."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_what_is_written_is_read_back(target: LoadedModel, tmp_path: Path) -> None:
    weights = eagle_weights(target.model, DRAFT_VOCAB)
    written = DraftCheckpoint.write(
        tmp_path / "new" / "head",
        kind="eagle",
        target=target.model,
        transformer=TRANSFORMER,
        weights=weights,
        hidden_layers=HIDDEN_LAYERS,
        training={"tokens": 7},
        card="# A head\n",
    )
    found = DraftCheckpoint.find(str(written.directory), "eagle")
    assert found == written
    assert (found.kind, found.hidden_layers, found.training) == ("eagle", HIDDEN_LAYERS, {"tokens": 7})
    assert found.target.fingerprint == target.fingerprint == target.model.fingerprint
    assert (found.config.num_layers, found.config.hidden_size, found.config.norm_eps) == (1, 32, 1e-5)
    assert (written.directory / "README.md").read_text() == "# A head\n"
    stored = found.weights()
    assert set(stored) == set(weights)
    assert all(torch.equal(stored[name].float(), weights[name].float()) for name in weights)
    assert stored["fc.weight"].dtype == torch.float16
    assert stored["draft_vocab"].dtype == torch.int32
    with safe_open(written.directory / "model.safetensors", "pt") as file:
        assert file.metadata()["kind"] == "eagle"


def test_a_draft_is_replaced_whole_and_leaves_nothing_behind(target: LoadedModel, tmp_path: Path) -> None:
    first = write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB, seed=0).weights()["fc.weight"]
    second = write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB, seed=1).weights()["fc.weight"]
    assert not torch.equal(first, second)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_folder_that_cannot_be_written_is_named(target: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write the draft to .*file.head \(File exists\)"):
        write_eagle(tmp_path / "file" / "head", target.model, DRAFT_VOCAB)


def test_a_write_that_fails_keeps_the_old_draft(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).weights()["fc.weight"]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB, seed=1)
    assert torch.equal(DraftCheckpoint.find(str(tmp_path / "head")).weights()["fc.weight"], old)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_unknown_name_is_answered_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="there is no trained draft nonsense") as caught:
        EagleDrafter("nonsense")
    assert all(name in str(caught.value) for name in draft_names())


@pytest.mark.parametrize("name", draft_names())
def test_what_ships_is_whole(name: str) -> None:
    found = DraftCheckpoint.find(name)
    assert found.target.fingerprint is not None
    assert "draft_vocab" in found.weights()
    assert (found.directory / "README.md").stat().st_size > 500


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": 2}, r"says format=2, and a trained draft has format=1"),
        ({"format": None}, r"says format=None"),
        ({"target": None}, r"is incomplete \('target'\)"),
        ({"target": {"name": "x"}}, r"is incomplete \(.*missing.*'fingerprint'"),
        ({"kind": "draft_model"}, r"is of kind 'draft_model' and 'eagle' was asked for; use drafter=distilled"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(
    target: LoadedModel, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    change(write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).directory, **values)
    with pytest.raises(UsageError, match=message):
        EagleDrafter(str(tmp_path / "head"))


def test_a_configuration_that_is_no_json_is_refused(target: LoadedModel, tmp_path: Path) -> None:
    (write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).directory / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not valid JSON"):
        EagleDrafter(str(tmp_path / "head"))


@pytest.mark.parametrize(
    ("kept", "message"),
    [(None, "has no model.safetensors"), (5, "is not a whole"), (900, "is not a whole"), (-10, "ends before")],
)
def test_missing_and_truncated_weights_are_refused(
    target: LoadedModel, tmp_path: Path, kept: int | None, message: str
) -> None:
    file = write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).directory / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept])
    with pytest.raises(UsageError, match=message):
        EagleDrafter(str(tmp_path / "head")).bind(target.model, None)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 64}, r"with hidden_size=64, and .* has hidden_size=32"),
        ({"vocab_size": 300}, r"with vocab_size=300, and .* has vocab_size=264"),
        ({"num_layers": 30}, r"with num_layers=30, and .* has num_layers=3"),
        ({"fingerprint": "abc"}, r"at revision abc, and .* is at .*; .*drafter\.check_revision=false"),
    ],
)
def test_another_target_is_refused(target: LoadedModel, tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    directory = write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).directory
    recorded = json.loads((directory / "config.json").read_text())["target"]
    change(directory, target=recorded | sizes)
    with pytest.raises(UsageError, match=message):
        EagleDrafter(str(directory)).bind(target.model, None)


def test_a_relative_of_the_target_can_be_allowed(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    relative = load_model(str(tiny_checkpoint("llama", seed=1))).model
    path = str(write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).directory)
    with pytest.raises(UsageError, match="at revision"):
        EagleDrafter(path).bind(relative, None)
    EagleDrafter(path, check_revision=False).bind(relative, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transformer": TRANSFORMER | {"num_hidden_layers": 4}}, "has 4 layers and its target .* only 3"),
        ({"transformer": TRANSFORMER | {"hidden_size": 64}}, "has hidden_size=64 and shares the tables"),
        ({"transformer": TRANSFORMER | {"model_type": "gpt2"}}, "cannot run this model"),
        (
            {"transformer": TRANSFORMER | {"model_type": "unheard"}},
            "of model_type 'unheard' that",
        ),
        ({"hidden_layers": [1, 4]}, "reads layer 4 of .*, which has 3"),
    ],
)
def test_a_draft_that_cannot_belong_to_its_target_is_refused(
    target: LoadedModel, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    directory = write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB).directory
    change(directory, **values)
    with pytest.raises(UsageError, match=message):
        EagleDrafter(str(directory)).bind(target.model, None)


def test_the_fingerprint_is_of_the_weights_and_not_of_how_they_are_run(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = str(tiny_checkpoint("llama"))
    through_transformers = load_model(path, implementation="hf", dtype="bfloat16").model
    assert through_transformers.fingerprint == target.model.fingerprint is not None
    assert load_model(str(tiny_checkpoint("llama", seed=1))).model.fingerprint != target.model.fingerprint


def test_a_reduced_vocabulary_means_target_ids() -> None:
    vocabulary = DraftVocabulary.checked(DRAFT_VOCAB.int(), 264, "d")
    logits = torch.randn(2, 3, 4)
    full = vocabulary.expand(logits, 264)
    assert full.shape == (2, 3, 264)
    assert torch.equal(full[..., DRAFT_VOCAB], logits)
    assert torch.isinf(full).sum() == 2 * 3 * 260
    assert torch.equal(vocabulary.to_target(logits.argmax(-1)), full.argmax(-1))
    assert len(vocabulary) == 4
