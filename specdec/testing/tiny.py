"""A target small enough to enumerate: random weights, ten token ids, a window of 64, made in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.models.loading import LoadedModel
from specdec.models.native.config import TransformerConfig
from specdec.models.native.transformer import Transformer
from specdec.models.vocabulary.tokenizer import Tokenizer

LETTERS = "abcdef"
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>")
REAL_VOCAB_SIZE = len(LETTERS) + len(SPECIAL_TOKENS)
PADDED_VOCAB_SIZE = REAL_VOCAB_SIZE + 2
"""Two ids are padding, as real models have them: they get logits and mean nothing."""


def tiny_tokenizer(letters: str = LETTERS, special_tokens: tuple[str, ...] = SPECIAL_TOKENS) -> Tokenizer:
    """One token per letter, then the special tokens, the last of which ends a text. Other characters are dropped."""
    import transformers
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special_tokens[0], eos_token=special_tokens[-1]
    )
    return Tokenizer(hf, "tiny")


def tiny_config(**changes: Any) -> TransformerConfig:
    """Three layers, four heads, two key heads, width 32; `changes` replace single sizes."""
    tiny = TransformerConfig(
        vocab_size=PADDED_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=64,
    )
    return replace(tiny, **changes)


def tiny_target(
    seed: int = 0,
    *,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **changes: Any,
) -> LoadedModel:
    """A native transformer with random weights and its tokenizer, as `load_model` would return it.

    The same on every machine. noise: how far each weight is moved from where the seed puts it, relative to its
    spread: a draft model that resembles the target of the same seed. device: "meta" for
    `check_device`. changes: of `tiny_config`, e.g. num_layers=1.
    """
    config, name = tiny_config(**changes), f"tiny-{seed}"

    def build(computing: torch.dtype) -> Transformer:
        weights = {
            key: (weight + noise * other).to(dtype)
            for (key, weight), (_, other) in zip(_weights(config, seed), _weights(config, seed + 1000), strict=True)
        }
        return Transformer.from_state_dict(config, weights, device=device, dtype=computing, name=name)

    return LoadedModel(
        model=build(dtype),
        tokenizer=tiny_tokenizer(),
        name=name,
        eos_ids=frozenset({REAL_VOCAB_SIZE - 1}),
        fingerprint=f"{name}-{noise}",
        real_vocab_size=REAL_VOCAB_SIZE,
        implementation="native",
        in_float64=lambda: build(torch.float64),
    )


def _weights(config: TransformerConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Under Hugging Face's names. So wide that text neither repeats at once nor is uniform: about 2.3 bits a token."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / math.sqrt(columns)

    d, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", random(config.vocab_size, d) * 1.4
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for name, rows, columns in (
            ("self_attn.q_proj", width, d),
            ("self_attn.k_proj", kv_width, d),
            ("self_attn.v_proj", kv_width, d),
            ("self_attn.o_proj", d, width),
            ("mlp.gate_proj", inner, d),
            ("mlp.up_proj", inner, d),
            ("mlp.down_proj", d, inner),
        ):
            yield f"{layer}{name}.weight", random(rows, columns)
        yield f"{layer}input_layernorm.weight", torch.ones(d)
        yield f"{layer}post_attention_layernorm.weight", torch.ones(d)
    yield "model.norm.weight", torch.ones(d)
    if not config.tied_head:
        yield "lm_head.weight", random(config.vocab_size, d)
