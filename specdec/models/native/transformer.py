"""The native decoder: grouped-query attention, rotary positions, RMSNorm before each block, SwiGLU, a residual stream.

It runs Llama, SmolLM2, Mistral, Qwen2 and Qwen3 checkpoints. For inference only: weights are fused, and packed where
`specdec.models.native.linear` can. B sequences, S new tokens each, H query and K key heads of width D, hidden size d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import kernels
from specdec.cache.base import CacheView
from specdec.cache.contiguous import ContiguousCache
from specdec.errors import UsageError
from specdec.models.base import LanguageModel, Output, Tables
from specdec.models.native.attention import Attention, Visibility, sdpa
from specdec.models.native.config import TransformerConfig
from specdec.models.native.linear import Linear, compute_dtype, linear
from specdec.models.native.rope import Rotation, Turn

__all__ = ["Transformer", "TransformerConfig"]


class Transformer(LanguageModel):
    """A decoder of `config.num_layers` layers. Build it with `from_state_dict`.

    Logits come in the compute dtype. Hidden layer l is the residual stream after layer l, the last one included:
    before the final norm, unlike the last entry of transformers' `output_hidden_states`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        *,
        attention: Attention = sdpa,
        name: str = "transformer",
    ) -> None:
        self.config = config
        self.name = name
        self.vocab_size, self.hidden_size = embedding.shape
        self.num_layers = len(layers)
        self.max_positions = config.max_positions
        self.dtype, self.device = embedding.dtype, embedding.device
        self.compute_dtype = compute_dtype(self.dtype, self.device)
        self.embedding = embedding  # [V, d]
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.attention = attention
        self._positions = config.positions.build(config.hidden_size, config.head_dim, self.device)

    @classmethod
    @torch.no_grad()
    def from_state_dict(
        cls,
        config: TransformerConfig,
        state_dict: MutableMapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shared: Tables | None = None,
        attention: Attention = sdpa,
        name: str = "transformer",
    ) -> Transformer:
        """From weights under Hugging Face's names, which are taken out of `state_dict` as they are used.

        shared: another model's embedding [V, d], and rows of its head [W, d], in place of those in `state_dict`; logits
        are then over these W alone. Raises `UsageError` where a weight is missing, of another shape than `config` says,
        or left over.
        """
        weights = Weights(state_dict, torch.device(device), dtype)
        d, vocab = config.hidden_size, config.vocab_size
        embedding = shared.embedding if shared else weights.take("model.embed_tokens.weight", vocab, d)
        layers = [_layer(config, weights, index) for index in range(config.num_layers)]
        norm = Norm(weights.vector("model.norm.weight", d), config.norm_eps)
        if shared is not None:
            head = linear(shared.head)
        else:
            head = linear(embedding) if config.tied_head else weights.linear({"lm_head": vocab}, d)
        weights.refuse_leftovers(config.tied_head)
        return cls(config, embedding, layers, norm, head, attention=attention, name=name)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights as they are held; a tied head counts twice where it is packed."""
        one_table = self.config.tied_head and not kernels.packs(self.embedding)
        return self.bytes_per_forward + (0 if one_table else self.embedding.nbytes)

    @property
    def bytes_per_forward(self) -> int:
        """See `LanguageModel.bytes_per_forward`: all but the embedding."""
        return self.head.num_bytes + self.norm.num_bytes + sum(layer.num_bytes for layer in self.layers)

    @torch.inference_mode()
    def tables(self) -> Tables:
        """See `LanguageModel.tables`. A packed head is read back through its own product with the identity."""
        if self.config.tied_head:
            return Tables(self.embedding, self.embedding)
        identity = torch.eye(self.hidden_size, dtype=self.compute_dtype, device=self.device)
        return Tables(self.embedding, self.head(identity).T.to(self.dtype).contiguous())

    def truncated(self, num_layers: int) -> Transformer:
        """See `LanguageModel.truncated`. Layers, final norm, embedding and head are this model's own objects."""
        if not 1 <= num_layers < self.num_layers:
            raise UsageError(
                f"num_layers={num_layers} is not possible for a draft out of {self.name}, which has {self.num_layers} "
                f"layers; use 1 to {self.num_layers - 1}"
            )
        return Transformer(
            replace(self.config, num_layers=num_layers),
            self.embedding,
            self.layers[:num_layers],
            self.norm,
            self.head,
            attention=self.attention,
            name=f"{self.name}[:{num_layers}]",
        )

    def new_cache(self, num_slots: int, capacity: int) -> ContiguousCache:
        """See `LanguageModel.new_cache`."""
        config = self.config
        return ContiguousCache(
            self.num_layers,
            num_slots,
            capacity,
            config.num_kv_heads,
            config.head_dim,
            dtype=self.compute_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: CacheView,
        mask: Tensor | None = None,
        *,
        logits_at: Tensor | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """See `LanguageModel.forward`."""
        num_tokens = tokens.shape[1]
        embedded = F.embedding(tokens, self.embedding).to(self.compute_dtype)
        stream = self._positions.embed(embedded, positions)  # [B, S, d]
        rotate = self._positions.rotation(positions, self.compute_dtype)
        visible = Visibility.of(cache.starts, num_tokens, mask, self.config.groups, like=stream)

        step = Step.of(stream, rotate, visible, cache, self.attention)
        kept = {0: stream}
        for number, layer in enumerate(self.layers, start=1):
            stream = layer(stream, step)
            if number in hidden_layers:
                kept[number] = stream
        cache.advance(num_tokens)

        if logits_at is not None:
            stream = stream.gather(1, logits_at[..., None].expand(-1, -1, self.hidden_size))
        hidden = torch.stack([kept[layer] for layer in hidden_layers], dim=2) if hidden_layers else None
        return Output(self.head(self.norm(stream)), hidden)


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share during one forward pass. in_place: the same for `specdec.kernels`, where they serve."""

    rotate: Rotation
    visible: Visibility
    cache: CacheView
    attention: Attention
    in_place: kernels.ForwardPass | None

    @classmethod
    def of(cls, stream: Tensor, rotate: Rotation, visible: Visibility, cache: CacheView, attention: Attention) -> Step:
        """For the new tokens of a stream [B, S, d]."""
        in_place = None
        if attention is sdpa and isinstance(rotate, Turn) and kernels.serves(stream):
            place = cache.in_place(stream.shape[1])
            if place is not None:
                in_place = kernels.ForwardPass(*place, rotate.cos, rotate.signed_sin, visible.tree)
        return cls(rotate, visible, cache, attention, in_place)


class Norm:
    """x / RMS(x) · weight (Zhang & Sennrich 2019), over the last dimension.

    weight: [d], or [heads, D] where every head has its own; in the compute dtype. On CPU torch has no fused kernel and
    takes eight small operations, which between two products of a few hundred microseconds can be felt; |x| and a
    hypotenuse take four: x / RMS = √d x / √(|x|² + d ε).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._scaled = weight * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps), dtype=weight.dtype, device=weight.device)
        self.num_bytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """The shape of `x` stays."""
        if self.weight.dim() == 1 and kernels.serves(x):
            return kernels.rms_norm(x, self.weight, self.eps)
        if x.device.type != "cpu":
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        normed: Tensor = (x / length.hypot_(self._floor)).mul_(self._scaled)
        return normed


class SelfAttention:
    """Grouped-query attention (Ainslie et al. 2023) over the cache; queries, keys and values in one product."""

    def __init__(
        self, config: TransformerConfig, index: int, qkv: Linear, output: Linear, qk_norm: Norm | None
    ) -> None:
        self.index, self._qkv, self._output, self._qk_norm = index, qkv, output, qk_norm
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.kernel: kernels.SelfAttention | None = None
        if isinstance(qkv, kernels.Product) and isinstance(output, kernels.Product):
            norms, eps = (qk_norm.weight, qk_norm.eps) if qk_norm else (None, 0.0)
            self.kernel = kernels.SelfAttention(qkv, output, norms, eps, config.num_heads, config.num_kv_heads)

    def __call__(self, x: Tensor, step: Step, stream: Tensor) -> Tensor:
        """[B, S, d] → what it adds up to with the stream [B, S, d]; appends to the cache."""
        if self.kernel is not None and step.in_place is not None:
            return self.kernel(x, step.in_place, self.index, stream)
        (batch, length, _), visible = x.shape, step.visible
        heads = self._qkv(x).view(batch, length, -1, self._head_dim)  # [B, S, H + K + K, D]
        turned, values = heads[:, :, : -self._num_kv_heads], heads[:, :, -self._num_kv_heads :]
        turned = step.rotate(turned if self._qk_norm is None else self._qk_norm(turned))
        queries, keys = turned[:, :, : self._num_heads], turned[:, :, self._num_heads :]
        keys, values = step.cache.append(self.index, keys.transpose(1, 2), values.transpose(1, 2))  # [B, K, L, D]

        queries = queries.view(batch, length, -1, visible.fold, self._head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = step.attention(queries, keys, values, visible.mask, visible.causal)  # [B, H / fold, fold * S, D]
        mixed = mixed.view(batch, -1, visible.fold, length, self._head_dim).permute(0, 3, 1, 2, 4).flatten(2)
        return self._output(mixed, stream)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self._qkv.num_bytes + self._output.num_bytes + (self._qk_norm.num_bytes if self._qk_norm else 0)


class FeedForward:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor, stream: Tensor) -> Tensor:
        """[B, S, d] → what it adds up to with the stream [B, S, d]."""
        if isinstance(self.gate_up, kernels.Product) and isinstance(self.down, kernels.Product):
            return kernels.feed_forward(self.gate_up, self.down, x, stream)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up, stream)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self.gate_up.num_bytes + self.down.num_bytes


class Layer:
    """Attention, then the feed-forward; each reads a normalised stream and adds to it."""

    def __init__(
        self, attention_norm: Norm, attention: SelfAttention, feed_forward_norm: Norm, feed_forward: FeedForward
    ) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.feed_forward_norm, self.feed_forward = feed_forward_norm, feed_forward
        self._kernel: kernels.Layer | None = None
        gate_up, down = feed_forward.gate_up, feed_forward.down
        if attention.kernel and isinstance(gate_up, kernels.Product) and isinstance(down, kernels.Product):
            first, second = ((norm.weight, norm.eps) for norm in (attention_norm, feed_forward_norm))
            self._kernel = kernels.Layer(first, attention.kernel, second, gate_up, down)

    def __call__(self, stream: Tensor, step: Step) -> Tensor:
        """[B, S, d] → [B, S, d]."""
        if self._kernel is not None and step.in_place is not None:
            return self._kernel(stream, step.in_place, self.attention.index)
        stream = self.attention(self.attention_norm(stream), step, stream)
        return self.feed_forward(self.feed_forward_norm(stream), stream)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        norms = self.attention_norm.num_bytes + self.feed_forward_norm.num_bytes
        return norms + self.attention.num_bytes + self.feed_forward.num_bytes


def _layer(config: TransformerConfig, weights: Weights, index: int) -> Layer:
    d, width, inner = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    name, kv_width, eps = f"model.layers.{index}.", config.num_kv_heads * config.head_dim, config.norm_eps
    own, mlp = name + "self_attn.", name + "mlp."
    qkv = {own + "q_proj": width, own + "k_proj": kv_width, own + "v_proj": kv_width}
    attention = SelfAttention(
        config,
        index,
        weights.linear(qkv, d, bias=config.qkv_bias),
        weights.linear({own + "o_proj": d}, width, bias=config.output_bias),
        _qk_norm(config, weights, own) if config.qk_norm else None,
    )
    feed_forward = FeedForward(
        weights.linear({mlp + "gate_proj": inner, mlp + "up_proj": inner}, d, bias=config.mlp_bias),
        weights.linear({mlp + "down_proj": d}, inner, bias=config.mlp_bias),
    )
    return Layer(
        Norm(weights.vector(name + "input_layernorm.weight", d), eps),
        attention,
        Norm(weights.vector(name + "post_attention_layernorm.weight", d), eps),
        feed_forward,
    )


def _qk_norm(config: TransformerConfig, weights: Weights, prefix: str) -> Norm:
    """One norm for query and key heads together: [H + K, D]."""
    queries, keys = (weights.vector(f"{prefix}{name}_norm.weight", config.head_dim) for name in "qk")
    per_head = torch.cat((queries.expand(config.num_heads, -1), keys.expand(config.num_kv_heads, -1)))
    return Norm(per_head, config.norm_eps)


class Weights:
    """A state dict that is emptied while a model is built, so that no weight is held twice for long."""

    def __init__(self, state_dict: MutableMapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._state_dict, self._device, self._dtype = state_dict, device, dtype

    def take(self, name: str, *shape: int) -> Tensor:
        """The named weight, on its device, as it is stored."""
        if name not in self._state_dict:
            raise UsageError(f"the weights lack {name}; check that the checkpoint fits its configuration")
        weight = self._state_dict.pop(name)
        if weight.shape != shape:
            raise UsageError(
                f"{name} has shape {list(weight.shape)} and its configuration asks for {list(shape)}; "
                "check that the checkpoint fits its configuration"
            )
        return weight.to(self._device, self._dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        """A norm's weight: rounded as it is stored, held as it is computed with, for it is small."""
        return self.take(name, *shape).to(compute_dtype(self._dtype, self._device))

    def linear(self, outputs: Mapping[str, int], inputs: int, bias: bool = False) -> Linear:
        """One product for the named projections, stacked: name → width of its output."""
        weight = _stack([self.take(f"{name}.weight", width, inputs) for name, width in outputs.items()])
        if not bias:
            return linear(weight)
        return linear(weight, _stack([self.take(f"{name}.bias", width) for name, width in outputs.items()]))

    def refuse_leftovers(self, tied_head: bool) -> None:
        """A weight nobody asked for means that the model would compute something else than it was trained to."""
        ignored = ("rotary_emb.inv_freq", "lm_head.weight") if tied_head else ("rotary_emb.inv_freq",)
        left = [name for name in self._state_dict if not name.endswith(ignored)]
        if left:
            raise UsageError(
                f"the native transformer has no place for {len(left)} of the weights, {left[0]} among them; "
                "load the model with implementation=hf"
            )


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
