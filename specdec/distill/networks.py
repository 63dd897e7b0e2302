"""The drafts as they are trained: torch modules whose state dicts are what a draft checkpoint stores.

Inference runs the same weights through `specdec.models.native`'s `eagle` and `transformer`, which are fused and packed;
tests hold both to the same logits. B sequences of T tokens, hidden size d, Vd draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.native.config import TransformerConfig
from specdec.models.native.rope import Rotation


@dataclass(frozen=True)
class Frozen:
    """What a draft shares with its target and does not train.

    embedding: [V, d]. head: [Vd, d], the output projection's rows of the draft vocabulary. norm: [d], the target's
    final norm. draft_vocab: [Vd] int64, target ids by frequency.
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor
    norm_eps: float
    draft_vocab: Tensor

    def draft_logits(self, output: Tensor) -> Tensor:
        """A draft's logits over its vocabulary from its normed output: [..., d] → [..., Vd]."""
        return F.linear(output, self.head)

    def target_logits(self, last_hidden: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary from its residual stream: [..., d] → [..., Vd]."""
        return F.linear(F.rms_norm(last_hidden, self.norm.shape, self.norm, self.norm_eps), self.head)


@dataclass(frozen=True)
class Examples:
    """A padded batch. tokens: [B, T]; features: [B, T, layers, d] those that the draft reads, last: [B, T, d] the last
    layer's, both zero where no forward has seen the token; scored: [B, T] bool, the roots: positions from which
    drafting is practised; lengths: [B]."""

    tokens: Tensor
    features: Tensor
    last: Tensor
    scored: Tensor
    lengths: Tensor

    @property
    def first_root(self) -> int:
        """The first column with a root in any row."""
        return int(self.scored.any(0).nonzero()[0])

    def to(self, device: torch.device) -> Examples:
        """The same on another device."""
        return Examples(*(getattr(self, field.name).to(device) for field in fields(self)))

    def ahead(self, steps: int) -> tuple[Tensor, Tensor]:
        """The last layer's features `steps` tokens after each root, [roots, d], and where there are any, [roots]."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        known = (columns + steps) < (self.lengths[:, None] - 1)
        return self.last.roll(-steps, 1)[self.scored], known[self.scored]


class Norm(nn.Module):
    """RMSNorm whose weight follows its input's dtype, so that autocast keeps the fused kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The shape of `x` stays."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `inputs` may be wider than the model."""

    def __init__(self, config: TransformerConfig, inputs: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm, self.k_norm = (
            Norm(config.head_dim, config.norm_eps) if qk_norm else nn.Identity() for _ in range(2)
        )
        self._head_dim = config.head_dim

    def project(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, K, T, D]."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self._head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = rotate(self.q_norm(queries)), rotate(self.k_norm(keys))
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def mix(self, attended: Tensor) -> Tensor:
        """[B, H, T, D] → [B, T, d]."""
        mixed: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] → [B, T, d]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """One pre-norm layer under Hugging Face's names."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, config.hidden_size, qk_norm=config.qk_norm)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, stream: Tensor, rotate: Rotation) -> Tensor:
        """[B, T, d] → [B, T, d], causal."""
        queries, keys, values = self.self_attn.project(self.input_layernorm(stream), rotate)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        stream = stream + self.self_attn.mix(attended)
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class _Layers(nn.Module):
    """What Hugging Face calls `model`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)


class ShallowNetwork(nn.Module):
    """A few of the target's own layers between its frozen embedding and head."""

    def __init__(self, config: TransformerConfig, frozen: Frozen) -> None:
        super().__init__()
        self.model = _Layers(config)
        self._positions = config.positions.build(config.hidden_size, config.head_dim, frozen.embedding.device)
        self._frozen = frozen

    def unrolled(self, examples: Examples, num_steps: int) -> list[Tensor]:
        """[roots, d], from which the head reads what follows each root's next token. One step, since a draft model
        reads tokens alone: its own outputs never enter it."""
        tokens = examples.tokens
        stream = self._positions.embed(F.embedding(tokens, self._frozen.embedding), tokens)
        rotate = self._positions.rotation(_positions(tokens), stream.dtype)
        for layer in self.model.layers:
            stream = layer(stream, rotate)
        ahead = stream.roll(-1, 1)[examples.scored]  # after the token that follows the root
        return [self.model.norm(ahead)]

    def stored(self) -> dict[str, Tensor]:
        """The weights under the names of a draft checkpoint."""
        return dict(self.state_dict())


class EagleNetwork(nn.Module):
    """EAGLE-3's head (Li et al. 2503.01840): fused features and the next token's embedding through one layer.

    Input t is (features of token t, token t + 1), and the output predicts token t + 2. No projection has a bias.
    """

    def __init__(self, config: TransformerConfig, frozen: Frozen, num_features: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(num_features * d, d, bias=False)
        self.embed_norm, self.feature_norm, self.ffn_norm, self.norm = (Norm(d, eps) for _ in range(4))
        plain = replace(config, qkv_bias=False, output_bias=False, mlp_bias=False)
        self.attention = Attention(plain, 2 * d)
        self.mlp = FeedForward(plain)
        self._eps, self._groups = eps, config.groups
        self._positions = config.positions.build(d, config.head_dim, frozen.embedding.device)
        self._frozen = frozen

    def fuse(self, features: Tensor) -> Tensor:
        """[B, T, layers, d] → [B, T, d]."""
        normed = F.rms_norm(features, features.shape[-1:], None, self._eps)
        fused: Tensor = self.fc(normed.flatten(-2))
        return fused

    def unrolled(self, examples: Examples, num_steps: int) -> list[Tensor]:
        """For each unrolled step j the output [roots, d] from which the head reads the token j + 2 after each root.

        Step 0 reads true features, every later one the output of the step before, as in drafting ("training-time
        test"). Row t stands for the draft that starts at root t: at step j it reads token t + 1 + j, stands at
        position t + j, and sees the true entries up to t and its own of steps 1 to j.
        """
        first = examples.first_root  # prompts only need keys and values
        stream, following = self.fuse(examples.features), examples.tokens.roll(-1, 1)
        positions = _positions(examples.tokens)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for step in range(num_steps):
            rotate = self._positions.rotation(positions + step, stream.dtype)
            embedded = F.embedding(following, self._frozen.embedding)
            joined = torch.cat([self.embed_norm(embedded), self.feature_norm(stream)], dim=-1)
            queries, new_keys, new_values = self.attention.project(joined, rotate)
            keys.append(new_keys.repeat_interleave(self._groups, 1))
            values.append(new_values.repeat_interleave(self._groups, 1))
            if step == 0:
                queries, stream, following, positions = (
                    queries[:, :, first:], stream[:, first:], following[:, first:], positions[:, first:]
                )  # fmt: skip
            stream = stream + self.attention.mix(_attend(queries, keys, values))
            stream = stream + self.mlp(self.ffn_norm(stream))
            outputs.append(self.norm(stream[examples.scored[:, first:]]))
            following = following.roll(-1, 1)
        return outputs

    def stored(self) -> dict[str, Tensor]:
        """The weights under the names of a draft checkpoint."""
        return {
            name.removeprefix("attention.").removeprefix("mlp."): weight for name, weight in self.state_dict().items()
        }


def _attend(queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Queries [B, H, R, D] of the last R positions, causal over the first keys, [B, H, T, D]; of every later ones,
    [B, H, R, D], each sees its own: [B, H, R, D]."""
    rows, columns = queries.shape[2], keys[0].shape[2]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=queries.device).tril(columns - rows)
    if len(keys) == 1:
        return F.scaled_dot_product_attention(queries, keys[0], values[0], attn_mask=visible)
    scale = 1 / math.sqrt(queries.shape[-1])
    true = (queries @ keys[0].transpose(-1, -2)).float() * scale  # [B, H, R, T]
    own = torch.stack([(queries * key).sum(-1) for key in keys[1:]], dim=-1).float() * scale  # [B, H, R, steps]
    weights = torch.cat([true.masked_fill(~visible, -math.inf), own], dim=-1).softmax(-1).to(queries.dtype)
    mixed = weights[..., :columns] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., columns + step, None] * value
    return mixed


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
