"""Random trained drafts for tiny targets, and the EAGLE head written out once more, plainly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.base import LanguageModel
from specdec.models.loading.draft_checkpoint import DraftCheckpoint

TRANSFORMER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
HIDDEN_LAYERS = (1, 3)


def eagle_weights(target: LanguageModel, draft_vocab: Tensor, seed: int = 0, layers: int = 2) -> dict[str, Tensor]:
    """Random weights, float16 exact so that writing them loses nothing."""
    torch.manual_seed(seed)
    d, heads, kv, inner = target.hidden_size, 32, 16, 48
    shapes = {
        "fc": (d, layers * d),
        "q_proj": (heads, 2 * d),
        "k_proj": (kv, 2 * d),
        "v_proj": (kv, 2 * d),
        "o_proj": (d, heads),
        "gate_proj": (inner, d),
        "up_proj": (inner, d),
        "down_proj": (d, inner),
    }
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    for name in ("embed_norm", "feature_norm", "ffn_norm", "norm"):
        weights[f"{name}.weight"] = 1 + 0.3 * torch.randn(d)
    return {name: weight.half().float() for name, weight in weights.items()} | {"draft_vocab": draft_vocab.int()}


def write_eagle(
    directory: Path, target: LanguageModel, draft_vocab: Tensor, seed: int = 0, **transformer: Any
) -> DraftCheckpoint:
    """A head for a target of 32 dimensions and 3 layers."""
    return DraftCheckpoint.write(
        directory,
        kind="eagle",
        target=target,
        transformer=TRANSFORMER | {"vocab_size": target.vocab_size} | transformer,
        weights=eagle_weights(target, draft_vocab, seed),
        hidden_layers=HIDDEN_LAYERS,
    )


def shallow_weights(hf: Any, num_layers: int, draft_vocab: Tensor) -> dict[str, Tensor]:
    """A draft model's: the first layers and the final norm of a transformers model."""
    kept = ("model.norm.", *(f"model.layers.{index}." for index in range(num_layers)))
    weights = {name: weight for name, weight in hf.state_dict().items() if name.startswith(kept)}
    return weights | {"draft_vocab": draft_vocab.int()}


def write_shallow(
    directory: Path, target: LanguageModel, hf: Any, num_layers: int, draft_vocab: Tensor, **changes: Any
) -> DraftCheckpoint:
    """A draft model of the first layers of `hf`, which has the target's shape, as if trained for the target."""
    transformer = hf.config.to_dict() | {"num_hidden_layers": num_layers}
    transformer.pop("layer_types", None)
    weights = shallow_weights(hf, num_layers, draft_vocab)
    handed_over = {"kind": "draft_model", "target": target, "transformer": transformer, "weights": weights}
    return DraftCheckpoint.write(directory, **handed_over | changes)


def reference_logits(weights: Mapping[str, Tensor], target: LanguageModel, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The head over one sequence from nothing.

    hidden: [T, n, d], the true features of tokens 0 ... T - 1. tokens: [N], N > T. Pair t is (features t, token t + 1);
    from t = T on the head reads its own stream of t - 1. Returns logits [N - 1, Vd].
    """
    w = {name.removesuffix(".weight"): weight.float() for name, weight in weights.items()}
    tables, d = target.tables(), target.hidden_size

    def norm(x: Tensor, name: str | None) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled if name is None else scaled * w[name]

    def turned(x: Tensor, position: int) -> Tensor:  # [heads, 8]
        angles = position / 10000.0 ** (torch.arange(4) / 4)
        a, b = x[:, :4], x[:, 4:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=1)

    fused = F.linear(norm(hidden.float(), None).flatten(1), w["fc"])  # [T, d]
    keys, values, streams = [], [], list[Tensor]()
    for t in range(len(tokens) - 1):
        g = fused[t] if t < len(fused) else streams[-1]
        x = torch.cat((norm(tables.embedding[tokens[t + 1]], "embed_norm"), norm(g, "feature_norm")))
        query = turned((w["q_proj"] @ x).view(4, 8), t)
        keys.append(turned((w["k_proj"] @ x).view(2, 8), t).repeat_interleave(2, dim=0))
        values.append((w["v_proj"] @ x).view(2, 8).repeat_interleave(2, dim=0))
        scores = torch.einsum("hd,lhd->hl", query, torch.stack(keys)) / math.sqrt(8)
        a = g + w["o_proj"] @ torch.einsum("hl,lhd->hd", scores.softmax(-1), torch.stack(values)).flatten()
        n = norm(a, "ffn_norm")
        streams.append(a + w["down_proj"] @ (F.silu(w["gate_proj"] @ n) * (w["up_proj"] @ n)))
    assert streams[0].shape == (d,)
    return norm(torch.stack(streams), "norm") @ tables.head[w["draft_vocab"].long()].T
