"""The native transformer computes what transformers computes, for every architecture it claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel
from specdec.models.native.attention import Attention, eager, sdpa
from specdec.models.native.transformer import Transformer, TransformerConfig
from tests.conftest import make_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that some of the four waves are fast, some slow, one between
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_many_heads": ("llama", {"num_key_value_heads": 4}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama_wide_heads": ("llama", {"head_dim": 32, "attention_bias": True}),
    "qwen3_wide_heads": ("qwen3", {"head_dim": 64}),
    "qwen3_biased": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}


def make_pair(case: str, attention: Attention = sdpa, dtype: torch.dtype = torch.float32) -> tuple[Any, Transformer]:
    """A random model in transformers with every weight moved off its initial value, and the same natively."""
    kind, overrides = CASES[case]
    reference = make_model(kind, **overrides)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "norm" in name or name.endswith("bias"):  # they start as ones and zeros, which hide mistakes
                weight.add_(torch.randn_like(weight) * 0.3)
    reference = reference.to(dtype)
    config = TransformerConfig.from_hf(reference.config)
    native = Transformer.from_state_dict(config, dict(reference.state_dict()), attention=attention, dtype=dtype)
    return reference, native


def tokens_of(length: int, vocab_size: int, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(model: LanguageModel, tokens: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """Logits [1, S, V] of tokens fed in pieces of the given sizes."""
    cache, parts, start = model.new_cache(1, tokens.shape[1]), [], 0
    for size in cuts:
        piece = slice(start, start + size)
        positions = torch.arange(start, start + size)[None]
        parts.append(model.forward(tokens[:, piece], positions, cache.view([0])).logits)
        start += size
    return torch.cat(parts, dim=1)


def greedy(model: LanguageModel, prompt: Tensor, count: int) -> list[int]:
    cache, tokens, start, out = model.new_cache(1, 256), prompt, 0, []
    for _ in range(count):
        positions = torch.arange(start, start + tokens.shape[1])[None]
        logits = model.forward(tokens, positions, cache.view([0])).logits
        start += tokens.shape[1]
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        out.append(int(tokens))
    return out


def greedy_reference(model: Any, prompt: Tensor, count: int) -> list[int]:
    tokens = prompt
    for _ in range(count):
        with torch.inference_mode():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("attention", [eager, sdpa])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, attention: Attention) -> None:
    reference, native = make_pair(case, attention)
    tokens = tokens_of(90, native.vocab_size)
    with torch.inference_mode():
        expected = reference(tokens).logits
    assert expected.std() > 0.1  # otherwise a tolerance of 1e-4 says nothing
    for cuts in [(90,), (70, 1, 1, 8, 9, 1), (2, 66, 22)]:  # prefill, decoding and drafts, a long second piece
        assert (in_pieces(native, tokens, cuts) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str) -> None:
    reference, native = make_pair(case)
    prompt = tokens_of(7, native.vocab_size)
    assert greedy(native, prompt, 12) == greedy_reference(reference, prompt, 12)


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_hidden_layers_are_the_stream_after_each_layer_before_the_final_norm(case: str) -> None:
    reference, native = make_pair(case)
    tokens, depth = tokens_of(9, native.vocab_size), native.num_layers
    with torch.inference_mode():
        expected = reference(tokens, output_hidden_states=True).hidden_states
    wanted = (depth, 0, 1, depth - 1)
    output = native.forward(tokens, torch.arange(9)[None], native.new_cache(1, 9).view([0]), hidden_layers=wanted)
    assert output.hidden is not None
    assert output.hidden.shape == (1, 9, 4, native.hidden_size)
    for place, layer in enumerate(wanted[1:], start=1):
        torch.testing.assert_close(output.hidden[:, :, place], expected[layer], atol=1e-5, rtol=1e-5)
    # transformers normalises the last one; ours becomes that one through the final norm, and is not it
    torch.testing.assert_close(native.norm(output.hidden[:, :, 0]), expected[depth], atol=1e-5, rtol=1e-5)
    assert (output.hidden[:, :, 0] - expected[depth]).abs().max() > 0.1


def test_bfloat16_rounds_weights_alone() -> None:
    reference, native = make_pair("qwen3", dtype=torch.bfloat16)
    exact = Transformer.from_state_dict(native.config, dict(reference.state_dict()), dtype=torch.float64)
    tokens = tokens_of(40, native.vocab_size)
    with torch.inference_mode():
        theirs = reference(tokens).logits
    ours, truth = in_pieces(native, tokens, (30, 1, 9)), in_pieces(exact, tokens, (40,))
    assert ours.dtype == torch.float32
    assert 0 < (theirs - truth).norm() < 0.1 * truth.norm()
    assert (ours - truth).norm() <= 1e-4 * truth.norm()


def test_float64_is_exact_where_float32_rounds() -> None:
    (_, single), (_, double) = make_pair("llama"), make_pair("llama", dtype=torch.float64)
    tokens = tokens_of(40, single.vocab_size)
    whole = in_pieces(double, tokens, (40,))
    assert whole.dtype == torch.float64
    assert (in_pieces(double, tokens, (30, 1, 9)) - whole).abs().max() <= 1e-12
    assert 1e-9 < (in_pieces(single, tokens, (40,)) - whole).abs().max() <= 1e-4


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    from specdec.models.loading.embedded import SMOLLM2, ensure

    reference = AutoModelForCausalLM.from_pretrained(ensure(SMOLLM2), dtype=torch.float32).eval()
    prompt = torch.tensor([smollm2.tokenizer.encode("The three primary colours are red, yellow and")])
    length = prompt.shape[1]
    with torch.inference_mode():
        expected = reference(prompt).logits
    assert (in_pieces(smollm2.model, prompt, (length - 3, 1, 2)) - expected).abs().max() <= 1e-3
    assert greedy(smollm2.model, prompt, 24) == greedy_reference(reference, prompt, 24)
