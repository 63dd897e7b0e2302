from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from specdec.decoding.engine import ancestor_mask
from specdec.errors import UsageError
from specdec.models.native.attention import eager, sdpa
from specdec.models.native.config import TransformerConfig
from specdec.models.native.linear import PlainLinear, linear
from specdec.models.native.rope import Sinusoidal
from specdec.models.native.transformer import Transformer
from tests.test_hf_parity import in_pieces, make_pair, tokens_of

VASWANI = TransformerConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    max_positions=64,
    positions=Sinusoidal(),
    tied_head=True,
)


def random_weights(config: TransformerConfig) -> dict[str, torch.Tensor]:
    """Under Hugging Face's names, without biases."""
    d, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, d), "norm": (d,)}
    for index in range(config.num_layers):
        layer = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_proj": (width, d),
            "self_attn.k_proj": (kv_width, d),
            "self_attn.v_proj": (kv_width, d),
            "self_attn.o_proj": (d, width),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
        }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {f"model.{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def by_the_book(config: TransformerConfig, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of one sequence with sinusoids and full attention, head by head, without a cache."""

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"model.{name}.weight"]

    d, length = config.hidden_size, len(tokens)
    rates = 10000 ** (-torch.arange(0, d, 2) / d)
    angles = torch.arange(length)[:, None] * rates
    x = weights["model.embed_tokens.weight"][tokens] * math.sqrt(d)
    x[:, 0::2] += angles.sin()
    x[:, 1::2] += angles.cos()
    for index in range(config.num_layers):
        name = f"model.layers.{index}."
        read = normed(x, f"layers.{index}.input_layernorm")
        q, k, v = (read @ weights[f"{name}self_attn.{part}_proj.weight"].T for part in "qkv")
        mixed = []
        for head in range(config.num_heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            scores = q[:, own] @ k[:, own].T / math.sqrt(config.head_dim)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, own])
        x = x + torch.cat(mixed, dim=-1) @ weights[f"{name}self_attn.o_proj.weight"].T
        read = normed(x, f"layers.{index}.post_attention_layernorm")
        gate, up = (read @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{name}mlp.down_proj.weight"].T
    return normed(x, "norm") @ weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize("attention", [eager, sdpa])
def test_the_form_of_2017_with_sinusoids_and_full_attention(attention: object) -> None:
    weights = random_weights(VASWANI)
    model = Transformer.from_state_dict(VASWANI, dict(weights), attention=attention)  # type: ignore[arg-type]
    tokens = tokens_of(14, VASWANI.vocab_size)
    expected = by_the_book(VASWANI, weights, tokens[0])
    for cuts in [(14,), (8, 1, 5)]:
        torch.testing.assert_close(in_pieces(model, tokens, cuts)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_eager_equals_sdpa(case: str) -> None:
    (_, slow), (_, fast) = make_pair(case, eager), make_pair(case, sdpa)
    tokens = tokens_of(90, fast.vocab_size)
    for cuts in [(90,), (4, 70, 1, 15)]:
        torch.testing.assert_close(in_pieces(slow, tokens, cuts), in_pieces(fast, tokens, cuts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 1], [1, 2]])
def test_rows_of_a_ragged_batch_equal_themselves_alone(slots: list[int]) -> None:
    model = make_pair("qwen2")[1]
    tokens = {slot: tokens_of(12, model.vocab_size, seed=slot)[0] for slot in range(3)}
    lengths = {0: 7, 1: 2, 2: 5}
    cache = model.new_cache(3, 16)
    for slot, length in lengths.items():
        model.forward(tokens[slot][None, :length], torch.arange(length)[None], cache.view([slot]))
    for size in (3, 1):  # drafts, then one token each
        starts = [cache.lengths[slot] for slot in slots]
        new = torch.stack([tokens[slot][start : start + size] for slot, start in zip(slots, starts, strict=True)])
        positions = torch.tensor(starts)[:, None] + torch.arange(size)
        logits = model.forward(new, positions, cache.view(slots)).logits
        for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            alone = in_pieces(model, tokens[slot][None, : start + size], (start + size,))[0, start:]
            torch.testing.assert_close(logits[row], alone, atol=1e-4, rtol=1e-4)


def test_a_tree_equals_each_of_its_paths_as_a_chain() -> None:
    model = make_pair("llama")[1]
    prompts = torch.cat([tokens_of(6, model.vocab_size, seed=seed) for seed in (1, 2)])
    nodes = torch.cat([tokens_of(7, model.vocab_size, seed=seed) for seed in (3, 4)])
    parents = [[-1, -1, 0, 0, 2, 1], [-1, 0, -1, 2, 3, 2]]
    mask = ancestor_mask(torch.tensor(parents))
    cache = model.new_cache(2, 16)
    for row, length in enumerate((6, 4)):
        model.forward(prompts[row : row + 1, :length], torch.arange(length)[None], cache.view([row]))
    positions = torch.tensor([[6], [4]]) + mask.sum(-1) - 1
    logits = model.forward(nodes, positions, cache.view([0, 1]), mask).logits
    for row, length in enumerate((6, 4)):
        for node in range(7):
            chain = torch.cat([prompts[row, :length], nodes[row][mask[row, node]]])[None]
            alone = in_pieces(model, chain, (chain.shape[1],))[0, -1]
            torch.testing.assert_close(logits[row, node], alone, atol=1e-4, rtol=1e-4)


def test_logits_come_from_the_positions_asked_for() -> None:
    model = make_pair("llama")[1]
    tokens = torch.cat([tokens_of(5, model.vocab_size, seed=seed) for seed in (1, 2)])
    positions, at = torch.arange(5).expand(2, -1), torch.tensor([[4, 0], [2, 2]])
    everything = model.forward(tokens, positions, model.new_cache(2, 8).view([0, 1])).logits
    asked = model.forward(tokens, positions, model.new_cache(2, 8).view([0, 1]), logits_at=at, hidden_layers=(1,))
    assert everything.shape == (2, 5, model.vocab_size)
    torch.testing.assert_close(asked.logits, torch.stack([everything[0][at[0]], everything[1][at[1]]]))
    assert asked.hidden is not None
    assert asked.hidden.shape == (2, 5, 1, model.hidden_size)


def test_without_hidden_layers_there_are_none() -> None:
    model = make_pair("llama")[1]
    output = model.forward(torch.tensor([[1]]), torch.tensor([[0]]), model.new_cache(1, 4).view([0]))
    assert output.hidden is None


def test_building_takes_the_weights_out_of_the_state_dict() -> None:
    weights = random_weights(VASWANI) | {"lm_head.weight": torch.zeros(50, 16)}  # a tied head may be saved twice
    Transformer.from_state_dict(VASWANI, weights)
    assert list(weights) == ["lm_head.weight"]


def test_num_bytes_counts_a_packed_head_beside_the_table() -> None:
    weights = random_weights(VASWANI)
    table, plain = 50 * 16, sum(weight.numel() for weight in weights.values())
    model = Transformer.from_state_dict(VASWANI, dict(weights))
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    filled = sum(linear(weight).num_bytes - weight.nbytes for weight in matrices)  # up to whole panels
    packed = not isinstance(model.head, PlainLinear)
    assert 4 * plain < model.num_bytes <= 4 * (plain + table * packed) + filled
    assert Transformer.from_state_dict(VASWANI, dict(weights), dtype=torch.float64).num_bytes == 8 * plain


def test_a_missing_a_misshapen_and_a_superfluous_weight_are_named() -> None:
    weights = random_weights(VASWANI)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UsageError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        Transformer.from_state_dict(VASWANI, weights)
    with pytest.raises(UsageError, match=r"embed_tokens\.weight has shape \[50, 16\].*asks for \[51, 16\]"):
        Transformer.from_state_dict(replace(VASWANI, vocab_size=51), random_weights(VASWANI))
    extra = random_weights(VASWANI) | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(UsageError, match=r"no place for 1 of the weights, model\.layers\.0\.self_attn\.sinks"):
        Transformer.from_state_dict(VASWANI, extra)
