"""A trained draft model as a checkpoint of its own: transformers and this toolkit both load it."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from experiments.export import main
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.distilled import DistilledDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.models.loading import load_model
from specdec.models.loading.draft_checkpoint import DraftCheckpoint
from specdec.verifiers.rejection import RejectionVerifier
from tests.conftest import PADDED_VOCAB_SIZE, make_model, make_tokenizer
from tests.drafts import write_shallow
from tests.fakes import make_request

PROMPT = torch.tensor([[72, 101, 108, 108, 111, 32, 72, 101]])


@pytest.fixture(scope="module", params=["llama", "qwen2", "llama-tied"])
def target(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    if request.param != "llama-tied":
        return tiny_checkpoint(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    make_model("llama", tie_word_embeddings=True).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def train(folder: Path, target: Path, **changes: Any) -> DraftCheckpoint:
    """A draft of two layers out of a relative, that speaks of every real token."""
    hf = make_model(target.name.split("-")[0], 5, tie_word_embeddings="tied" in target.name)
    model = load_model(str(target), implementation="native").model
    return write_shallow(folder, model, hf, 2, torch.arange(PADDED_VOCAB_SIZE).flip(0), **changes)


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_transformers_takes_it_as_an_assistant_and_loses_nothing(target: Path, tmp_path: Path) -> None:
    train(tmp_path / "draft", target)
    assert main([str(tmp_path / "draft"), str(tmp_path / "alone")]) == 0
    model, assistant = loaded(target), loaded(tmp_path / "alone")
    assert type(assistant) is type(model)
    assert assistant.config.num_hidden_layers == 2
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about generation settings
        plain = model.generate(PROMPT, **settings)
        assisted = model.generate(PROMPT, assistant_model=assistant, **settings)
    assert assisted.tolist() == plain.tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "alone")
    assert tokenizer.get_vocab() == transformers.AutoTokenizer.from_pretrained(target).get_vocab()


def test_it_drafts_as_the_draft_it_was_made_from(target: Path, tmp_path: Path) -> None:
    train(tmp_path / "draft", target)
    main([str(tmp_path / "draft"), str(tmp_path / "alone")])
    whole = load_model(str(target), implementation="native")
    counts = []
    for drafter in (DistilledDrafter(str(tmp_path / "draft")), DraftModelDrafter.load(str(tmp_path / "alone"))):
        engine = Engine(whole.model, drafter, RejectionVerifier(), FixedController(3))
        (trace,) = engine.generate([make_request("a", max_new_tokens=40)])
        counts.append([record.token_id for record in trace.tokens])
    assert counts[0] == counts[1]


def test_weights_are_stored_as_asked(target: Path, tmp_path: Path) -> None:
    train(tmp_path / "draft", target)
    assert main([str(tmp_path / "draft"), str(tmp_path / "alone"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone").dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "draft"], "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "{tmp}/alone"], "there is no trained draft nowhere"),
        (["{tmp}/eagle", "{tmp}/alone"], "is of kind 'eagle', which reads its target's features"),
        (["{tmp}/draft", "{tmp}/draft"], "is taken; choose a folder that is empty"),
        (["{tmp}/draft", "{tmp}/draft/config.json"], "is taken; choose a folder that is empty"),
        (["{tmp}/draft", "{tmp}/draft/config.json/alone"], "cannot write .* choose another folder"),
        (["{tmp}/draft", "{tmp}/alone", "--target", "{tmp}/other"], "was trained for .* at revision"),
        (["{tmp}/draft", "{tmp}/alone", "--dtype", "int3"], "dtype='int3' is unknown"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_a_way_out(
    arguments: list[str],
    message: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(tmp_path / "draft", tiny_checkpoint("llama"))
    train(tmp_path / "eagle", tiny_checkpoint("llama"), kind="eagle")
    shutil.copytree(tiny_checkpoint("llama", seed=9), tmp_path / "other")
    capsys.readouterr()
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(message, error)
    assert not (tmp_path / "alone").exists()


def test_a_relative_of_the_target_can_be_insisted_on(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    train(tmp_path / "draft", tiny_checkpoint("llama"))
    relative = str(tiny_checkpoint("llama", seed=9))
    arguments = [str(tmp_path / "draft"), str(tmp_path / "alone"), "--target", relative, "--any-revision"]
    assert main(arguments) == 0
    head = loaded(tmp_path / "alone").lm_head.weight
    assert torch.equal(head, loaded(Path(relative)).lm_head.weight)
