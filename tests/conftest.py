"""Tiny random models with a tiny tokenizer, saved to disk as a user's checkpoint would be; and the embedded target."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec.models.loading import LoadedModel, load_model

SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
REAL_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PADDED_VOCAB_SIZE = 264
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SMALL = {
    "vocab_size": PADDED_VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "initializer_range": 0.2,  # far from uniform logits, so that argmax is not decided by rounding
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
}
_ATTENTION = {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_UNTIED = {"tie_word_embeddings": False}  # tied, a tiny random model says one token over and over
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _ATTENTION),
    "qwen2": ("Qwen2Config", {**_ATTENTION, "use_sliding_window": False}),
    "qwen3": ("Qwen3Config", {**_ATTENTION, "head_dim": 8, "use_sliding_window": False}),
    "mistral": ("MistralConfig", {**_ATTENTION, "sliding_window": None}),
    "mistral_window": ("MistralConfig", {**_ATTENTION, "sliding_window": 6}),
    "gemma2": ("Gemma2Config", {**_ATTENTION, **_UNTIED, "head_dim": 16, "sliding_window": 6}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_ATTENTION, **_UNTIED, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_ATTENTION, **_EXPERTS, "head_dim": 8, "sliding_window": 6, "rope_parameters": _ROPE},
    ),
    "gpt2": ("GPT2Config", {"num_attention_heads": 4, "max_position_embeddings": 128}),
    "mamba": ("MambaConfig", {**_UNTIED, "state_size": 4}),
    "jamba": (
        "JambaConfig",
        {**_ATTENTION, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    ),
    "lfm2": ("Lfm2Config", {**_ATTENTION, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_ATTENTION,
            **_EXPERTS,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "falcon_h1": (  # attention and recurrent state in one layer
        "FalconH1Config",
        {
            **_ATTENTION,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "recurrent_gemma": (  # keeps its state outside the cache
        "RecurrentGemmaConfig",
        {"intermediate_size": 64, "num_attention_heads": 4, "lru_width": 32, "attention_window_size": 6},
    ),
}


# The same cases in every run, on a slow machine too; SPECDEC_FUZZ looks for new ones.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny matrices; and sums do not depend on how many cores a machine has


def make_tokenizer(special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, then the special tokens, the last of which ends a turn: any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special_tokens[0], eos_token=special_tokens[-1], model_max_length=128
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model of one of `KINDS`, in eval mode, from transformers."""
    config_class, settings = KINDS[kind]
    config = getattr(transformers, config_class)(**{**_SMALL, **settings, **overrides})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(kind, seed=0)` → a checkpoint directory, made once per session. Do not write to it."""

    @cache
    def save(kind: str, seed: int = 0) -> Path:
        directory = tmp_path_factory.mktemp(f"{kind}-{seed}")
        make_model(kind, seed).save_pretrained(directory)
        make_tokenizer().save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="session", autouse=True)
def _hermetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is shared with another worker or suite but the kernels and the embedded model, which are made once.

    Timed runs lock the machine through its temporary folder; costs of tiny models would stay in the user's cache;
    and a command that a test starts has no core to itself.
    """
    costs, temporary = tmp_path_factory.mktemp("costs"), str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.measurement.calibration.cache_root", lambda: costs)
        patch.setattr(tempfile, "tempdir", temporary)
        patch.setenv("TMPDIR", temporary)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def target(tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    """A tiny random Llama, native, in float32. Patch it through `monkeypatch` alone."""
    return load_model(str(tiny_checkpoint("llama")), implementation="native")


@pytest.fixture(scope="session")
def other(tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    """Another of the same shape, for a draft that is seldom right."""
    return load_model(str(tiny_checkpoint("llama", seed=1)), implementation="native")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The embedded target in float32; fetched and converted where that has not been done. For slow tests."""
    return load_model()
