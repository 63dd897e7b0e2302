from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from specdec.errors import UsageError
from specdec.models.native.config import TransformerConfig
from specdec.models.native.rope import LinearScaling, Llama3Scaling, Rope, unscaled

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def rope_of(**rope_parameters: Any) -> object:
    return TransformerConfig.from_hf(transformers.LlamaConfig(**SIZES, rope_parameters=rope_parameters)).positions


def test_rope_settings_are_read() -> None:
    assert rope_of(rope_type="default", rope_theta=7e4) == Rope(7e4, unscaled)
    assert rope_of(rope_type="linear", rope_theta=1e4, factor=2.0) == Rope(1e4, LinearScaling(2.0))
    scaled = rope_of(**LLAMA3, rope_theta=5e5, original_max_position_embeddings=16)
    assert scaled == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 16))


def test_rope_settings_of_older_configurations_are_read() -> None:
    old = SimpleNamespace(**transformers.LlamaConfig(**SIZES).to_dict(), rope_theta=5e5)
    old.rope_parameters, old.rope_scaling = None, {"type": "linear", "factor": 2.0}
    old.model_type = "llama"
    assert TransformerConfig.from_hf(old).positions == Rope(5e5, LinearScaling(2.0))


def test_a_head_may_be_wider_than_its_share() -> None:
    config = TransformerConfig.from_hf(transformers.Qwen3Config(**SIZES, head_dim=16))
    assert (config.head_dim, config.groups, config.qk_norm, config.qkv_bias) == (16, 2, True, False)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.GPT2Config(), "architecture 'gpt2'"),
        (transformers.LlamaConfig(**SIZES, hidden_act="gelu"), "activation 'gelu'"),
        (transformers.LlamaConfig(**SIZES, rope_parameters=YARN), "type 'yarn'"),
        (transformers.MistralConfig(**SIZES, sliding_window=63), "sliding window of 63"),
        (
            transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=3),
            "sliding window of 8",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, reason: str) -> None:
    assert reason in (TransformerConfig.supports(config) or "")
    with pytest.raises(UsageError, match=f"{reason}.*implementation=hf"):
        TransformerConfig.from_hf(config)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(**SIZES, sliding_window=64),
        transformers.MistralConfig(**SIZES, sliding_window=None),
        transformers.Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=8),
        transformers.Qwen2Config(
            **SIZES, num_hidden_layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=3
        ),
    ],
)
def test_a_window_that_never_bites_is_no_obstacle(config: Any) -> None:
    assert TransformerConfig.supports(config) is None


def test_partial_rotation_and_rope_per_layer_are_refused() -> None:
    hf = transformers.LlamaConfig(**SIZES)
    hf.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert "part of each head" in (TransformerConfig.supports(hf) or "")
    hf.rope_parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert "between layers" in (TransformerConfig.supports(hf) or "")


def test_query_heads_must_share_key_heads_evenly() -> None:
    with pytest.raises(UsageError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        TransformerConfig(10, 8, 16, 1, 4, 3, 2, 64)
