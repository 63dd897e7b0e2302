from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from specdec.errors import UsageError
from specdec.machine import hub
from specdec.models.loading.checkpoint import Checkpoint, StateDict, find
from specdec.models.loading.model import LoadedModel, load_model, resolve_device, resolve_dtype
from specdec.types import Prompt
from tests.conftest import PADDED_VOCAB_SIZE, REAL_VOCAB_SIZE, make_model, make_tokenizer

TinyCheckpoint = Callable[..., Path]
TOKENS = torch.arange(1, 13)[None] * 5 % PADDED_VOCAB_SIZE


@pytest.fixture
def copy_of(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may spoil."""
    return lambda kind: Path(shutil.copytree(tiny_checkpoint(kind), tmp_path / kind))


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    view = loaded.model.new_cache(1, TOKENS.shape[1]).view([0])
    with torch.inference_mode():
        return loaded.model.forward(TOKENS, torch.arange(TOKENS.shape[1])[None], view).logits


def expected_logits(kind: str) -> torch.Tensor:
    with torch.no_grad():
        return make_model(kind)(TOKENS).logits


# What is loaded, and how


@pytest.mark.parametrize("implementation", ["auto", "native", "hf"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_directory_gives_the_models_own_logits(
    tiny_checkpoint: TinyCheckpoint, kind: str, implementation: str
) -> None:
    loaded = load_model(str(tiny_checkpoint(kind)), implementation=implementation)
    assert loaded.implementation == ("hf" if implementation == "hf" else "native")
    torch.testing.assert_close(logits_of(loaded), expected_logits(kind), atol=1e-4, rtol=0)


def test_padding_is_told_from_real_ids(tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(str(tiny_checkpoint("llama")), implementation="hf")
    assert (loaded.real_vocab_size, loaded.model.vocab_size) == (REAL_VOCAB_SIZE, PADDED_VOCAB_SIZE)


@pytest.mark.parametrize("implementation", ["native", "hf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_are_what_was_asked_for(tiny_checkpoint: TinyCheckpoint, dtype: str, implementation: str) -> None:
    loaded = load_model(str(tiny_checkpoint("llama")), dtype=dtype, implementation=implementation)
    assert loaded.model.dtype is getattr(torch, dtype)
    close = 2.0 if dtype == "bfloat16" else 1e-4
    torch.testing.assert_close(logits_of(loaded).float(), expected_logits("llama"), atol=close, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "mistral_window"])
def test_what_is_not_native_runs_through_transformers_and_says_why(
    tiny_checkpoint: TinyCheckpoint, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(tiny_checkpoint(kind))
    loaded = load_model(directory)
    assert loaded.implementation == "hf"
    assert loaded.note
    assert loaded.note in caplog.text
    torch.testing.assert_close(logits_of(loaded), expected_logits(kind), atol=1e-4, rtol=0)
    with pytest.raises(UsageError, match="cannot run natively"):
        load_model(directory, implementation="native")


def test_a_device_map_goes_to_accelerate(tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(str(tiny_checkpoint("llama")), device_map="cpu")
    assert (loaded.implementation, loaded.note) == ("hf", "a device_map needs accelerate")
    torch.testing.assert_close(logits_of(loaded), expected_logits("llama"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_sharded_weights(tmp_path: Path, implementation: str) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    make_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_model(str(tmp_path), implementation=implementation)
    torch.testing.assert_close(logits_of(loaded), expected_logits("llama"), atol=1e-4, rtol=0)


# What ends a sequence


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [257, 258]}, {"eos_token_id": 1}, {257, 258}),
        ({"eos_token_id": 257}, {"eos_token_id": 1}, {257}),
        ({}, {"eos_token_id": [1, 2]}, {1, 2}),
        ({}, {}, {258}),  # the tokenizer's own
    ],
)
def test_eos_comes_from_the_generation_config_first(
    copy_of: Callable[[str], Path], generation: dict[str, Any], config: dict[str, Any], expected: set[int]
) -> None:
    directory = copy_of("gpt2")
    (directory / "generation_config.json").write_text(json.dumps(generation))
    stored = json.loads((directory / "config.json").read_text())
    stored.pop("eos_token_id", None)
    (directory / "config.json").write_text(json.dumps(stored | config))
    assert load_model(str(directory), implementation="hf").eos_ids == expected


# What is refused


def test_a_pickle_is_refused_with_the_way_out(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    for implementation in ("native", "hf"):
        with pytest.raises(UsageError, match=r"only pytorch_model.bin, a pickle.*save_pretrained"):
            load_model(str(directory), implementation=implementation)


def test_no_weights_at_all(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no model.safetensors"):
        load_model(str(directory))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UsageError, match=f"lacks its shard {shard.name}"):
        _ = Checkpoint(tmp_path, "sharded").weight_files


def test_a_truncated_file_is_noticed(copy_of: Callable[[str], Path]) -> None:
    weights = copy_of("llama") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UsageError, match="ends before its tensor"):
        load_model(str(weights.parent), implementation="native")
    weights.write_bytes(weights.read_bytes()[:5])
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        load_model(str(weights.parent), implementation="native")


def test_a_missing_tokenizer_is_one_sentence(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    for file in directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match=r"has no tokenizer; save one there"):
        load_model(str(directory))


def test_an_unknown_model_type_is_named(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("llama")
    (directory / "config.json").write_text('{"model_type": "llama99"}')
    with pytest.raises(UsageError, match=r"model_type 'llama99'.*trust_remote_code"):
        load_model(str(directory))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is unknown; choose from float32, bfloat16, float16, float64"),
        ({"implementation": "jax"}, "implementation='jax' is unknown; choose from auto, native, hf"),
        ({"device": "abacus"}, "device='abacus' is not on this machine"),
        ({"device": "cuda:63"}, "device='cuda:63' is not on this machine"),
        ({"device": "cpu", "device_map": "auto"}, "contradict each other"),
        ({"revision": "main"}, "revision='main' is for hub ids"),
    ],
)
def test_impossible_settings(tiny_checkpoint: TinyCheckpoint, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_model(str(tiny_checkpoint("llama")), **options)


def test_a_dtype_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.loading.model._computes", lambda device, dtype: False)
    with pytest.raises(UsageError, match="device='cpu' has no bfloat16"):
        resolve_device("cpu", resolve_dtype("bfloat16"))


def test_a_hub_id_without_a_network_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def absent(*_: object, local_files_only: bool, **__: object) -> str:
        asked.append(local_files_only)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(hub, "in_reach", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(UsageError) as caught:
        load_model("someone/some-model")
    message = str(caught.value)
    assert asked == [True], "a hub that is not there was asked"
    assert "\n" not in message
    for words in ("someone/some-model", "smollm2-135m", "local checkpoint directory", "hub id with a network"):
        assert words in message


def test_a_hub_id_is_fetched_without_pickles(tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tiny_checkpoint("llama"))

    monkeypatch.setattr(hub, "in_reach", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = find("someone/some-model", "v2")
    assert (asked["name"], asked["revision"]) == ("someone/some-model", "v2")
    assert not any("bin" in pattern or pattern.endswith(".pt") for pattern in asked["allow_patterns"])
    assert found.fingerprint == found.directory.name  # the hub's layout ends in the commit


@pytest.mark.parametrize("name", ["./nowhere", "/no/where/at/all", "a/b/c", "no such model"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=r"there is no checkpoint directory .*smollm2-135m"):
        find(name)


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config.json"):
        find(str(tmp_path))


# Weights, tensor by tensor


def test_state_dict_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.arange(-3, 3).reshape(2, 3).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    } | {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    state = StateDict((tmp_path / "model.safetensors",))
    assert set(state) == set(tensors)
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        read = state.pop(name)
        assert read.dtype is expected.dtype
        assert torch.equal(read, expected)
    assert not state


def test_a_fingerprint_follows_the_weights(copy_of: Callable[[str], Path], tiny_checkpoint: TinyCheckpoint) -> None:
    copy, original = copy_of("llama"), tiny_checkpoint("llama")
    assert Checkpoint(copy, "copy").fingerprint == Checkpoint(original, "original").fingerprint
    tensors = {name: tensor * 1.01 for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint(copy, "copy").fingerprint != Checkpoint(original, "original").fingerprint


# The embedded target itself


@pytest.mark.slow
def test_smollm2_is_native_and_ends_its_turns(smollm2: LoadedModel) -> None:
    assert smollm2.implementation == "native"
    assert smollm2.eos_ids == {2}
    assert smollm2.real_vocab_size == smollm2.model.vocab_size == 49152
    assert smollm2.model.max_positions == 8192


@pytest.mark.slow
def test_smollm2s_tokenizer_survived(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    for text in ("  Hello  world.\n 12345 é 你好 can't , . don't\t\tx", "def f(x):\n    return x  # 3.14\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.hf.tokenize("a  42") == ["a", "ĠĠ", "4", "2"]  # digits stand alone before anything else
    prompt = Prompt("chat", messages=({"role": "user", "content": "Hi"},))
    ids = tokenizer.encode_prompt(prompt)
    assert tokenizer.hf.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[:2] == (1, 9690)  # one beginning, not two


@pytest.mark.slow
def test_smollm2_answers(smollm2: LoadedModel) -> None:
    prompt = Prompt("chat", messages=({"role": "user", "content": "What is the capital of France?"},))
    ids = list(smollm2.tokenizer.encode_prompt(prompt))
    cache, new = smollm2.model.new_cache(1, 128), list(ids)
    written: list[int] = []
    while len(written) < 32 and not smollm2.eos_ids & set(written):
        start = cache.lengths[0]
        positions = torch.arange(start, start + len(new))[None]
        with torch.inference_mode():
            logits = smollm2.model.forward(torch.tensor([new]), positions, cache.view([0])).logits
        new = [int(logits[0, -1].argmax())]
        written += new
    assert "Paris" in smollm2.tokenizer.decode(written)
    assert written[-1] == 2
