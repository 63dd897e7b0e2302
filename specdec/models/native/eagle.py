"""The EAGLE-style head at inference: one decoder layer that reads the target's features (EAGLE-3, 2503.01840).

At position t it sees the target's fused features g_t and the token that came after, t + 1, and predicts token t + 2:

    g = fc(cat over the target's layers l of rms_norm(h_l))
    a = g + attention(cat(embed_norm(embedding(token)), feature_norm(g)))
    a = a + feed_forward(ffn_norm(a))
    logits = head rows of the draft vocabulary · norm(a)

Where the target's features are not known yet, the head goes on with its own `a` of the position before in place of g.
Embedding and head rows are the target's own. B sequences, S positions each, hidden size d, n fused layers.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.cache.base import CacheView
from specdec.cache.contiguous import ContiguousCache
from specdec.errors import UsageError
from specdec.models.base import Tables
from specdec.models.native.attention import Attention, Visibility, sdpa
from specdec.models.native.config import TransformerConfig
from specdec.models.native.linear import Linear, compute_dtype, linear
from specdec.models.native.transformer import FeedForward, Norm, SelfAttention, Step, Weights
from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary


@dataclass(frozen=True)
class _Parts:
    """What `from_state_dict` puts together."""

    fuse: Linear
    embed_norm: Norm
    feature_norm: Norm
    attention: SelfAttention
    ffn_norm: Norm
    feed_forward: FeedForward
    norm: Norm
    head: Linear

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in vars(self).values())


class EagleHead:
    """Build it with `from_state_dict`. num_features: n, how many of the target's layers it reads."""

    def __init__(
        self,
        config: TransformerConfig,
        parts: _Parts,
        vocabulary: DraftVocabulary,
        embedding: Tensor,
        num_features: int,
        attention: Attention = sdpa,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.num_features = num_features
        self.dtype, self.device = embedding.dtype, embedding.device
        self.compute_dtype = compute_dtype(self.dtype, self.device)
        self._parts = parts
        self._embedding = embedding  # [V, d]
        self._attention = attention
        ones = embedding.new_ones(config.hidden_size, dtype=self.compute_dtype)
        self._unweighted = Norm(ones, config.norm_eps)
        self._positions = config.positions.build(config.hidden_size, config.head_dim, self.device)

    @classmethod
    @torch.no_grad()
    def from_state_dict(
        cls,
        config: TransformerConfig,
        weights: MutableMapping[str, Tensor],
        tables: Tables,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> EagleHead:
        """From trained weights, which are taken out of `weights`, and the target's tables [V, d].

        Raises `UsageError` where a weight is missing, of another shape than `config` says, or left over.
        """
        for name in ("fc.weight", "draft_vocab"):
            if name not in weights:
                raise UsageError(f"the weights lack {name}, so they are not those of an EAGLE head; train it again")
        d, device = config.hidden_size, torch.device(device)
        vocabulary = DraftVocabulary.checked(weights.pop("draft_vocab"), len(tables.embedding), "the head").on(device)
        num_features = max(1, weights["fc.weight"].shape[-1] // d)
        embedding, head = (table.to(device, dtype) for table in (tables.embedding, tables.head))
        parts = _parts(config, Weights(weights, device, dtype), num_features, head[vocabulary.ids])
        if weights:
            raise UsageError(f"an EAGLE head has no place for the weight {next(iter(weights))}; train it again")
        return cls(config, parts, vocabulary, embedding, num_features)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights it holds for itself, its copy of the head's rows among them."""
        return self._parts.num_bytes

    def new_cache(self, num_slots: int, capacity: int) -> ContiguousCache:
        """An empty cache of its one layer; entry t is position t."""
        heads, width = self.config.num_kv_heads, self.config.head_dim
        return ContiguousCache(1, num_slots, capacity, heads, width, dtype=self.compute_dtype, device=self.device)

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's features [..., n, d] → g [..., d]. The norm has no weight: fc has one per input already."""
        return self._parts.fuse(self._unweighted(hidden).flatten(-2))

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        cache: CacheView,
        tree: Tensor | None = None,
        since: Sequence[int] | None = None,
    ) -> Tensor:
        """One pass of the layer; appends S entries per row.

        tokens: [B, S], token t + 1. features: [B, S, d], g_t or the head's own stream. positions: [B, S], t.
        tree: [B, S, N] bool, which of the N entries after `since` (per row; None: all that is cached) each position
        sees, the S new ones the last of them; None: causal. Returns the stream a [B, S, d].
        """
        parts = self._parts
        rotate = self._positions.rotation(positions, self.compute_dtype)
        starts = cache.starts if since is None else since
        visible = Visibility.of(starts, tokens.shape[1], tree, self.config.groups, like=features)
        said = parts.embed_norm(F.embedding(tokens, self._embedding).to(self.compute_dtype))
        inputs = torch.cat((said, parts.feature_norm(features)), dim=-1)  # [B, S, 2d]
        step = Step.of(features, rotate, visible, cache, self._attention)
        stream = parts.attention(inputs, step, features)
        cache.advance(tokens.shape[1])
        return parts.feed_forward(parts.ffn_norm(stream), stream)

    def logits(self, stream: Tensor) -> Tensor:
        """The stream [..., d] → logits over the draft vocabulary [..., Vd]."""
        return self._parts.head(self._parts.norm(stream))


def _parts(config: TransformerConfig, weights: Weights, num_features: int, head_rows: Tensor) -> _Parts:
    d, width, inner = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    kv_width = config.num_kv_heads * config.head_dim

    def norm(name: str) -> Norm:
        return Norm(weights.vector(f"{name}.weight", d), config.norm_eps)

    return _Parts(
        fuse=weights.linear({"fc": d}, num_features * d),
        embed_norm=norm("embed_norm"),
        feature_norm=norm("feature_norm"),
        attention=SelfAttention(
            config,
            0,
            weights.linear({"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}, 2 * d),
            weights.linear({"o_proj": d}, width),
            None,
        ),
        ffn_norm=norm("ffn_norm"),
        feed_forward=FeedForward(
            weights.linear({"gate_proj": inner, "up_proj": inner}, d), weights.linear({"down_proj": d}, inner)
        ),
        norm=norm("norm"),
        head=linear(head_rows),
    )
