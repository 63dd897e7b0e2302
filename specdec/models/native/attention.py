"""Attention, and who may see whom.

An attention function takes queries [B, H, R, D], keys and values [B, K, L, D] (H a multiple of K: grouped heads), and
either an additive mask that broadcasts to [B, H, R, L], or `causal` (then R = L), or neither: everything is visible.
It returns [B, H, R, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_FOLD_UP_TO = 64  # tokens per row; beyond it the repeated mask costs more than the fold saves


class Attention(Protocol):
    """See the module's docstring."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[B, H, R, D]."""


def eager(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """softmax(QKᵀ / √d_k) V with the scores written out (Vaswani et al. 2017, section 3.2.1): the reference."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])  # [B, H, R, L]
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(dim=-1) @ values


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The same through torch's fused kernels, which never hold the scores."""
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


@dataclass(frozen=True)
class Visibility:
    """What one forward pass may attend to; made once and shared by all layers.

    starts: per row, entries cached before the S = `num_tokens` new ones. tree: who sees which new entries, or None:
    a chain, in which every query sees what lies before it. causal: plain causal attention over new entries only.
    fold: query heads that share a key head and are laid out as further rows of it, so that attention sees as many
    query heads as key heads: its kernels then read each key once, and on CPU take their fast path.
    """

    starts: Sequence[int]
    num_tokens: int
    tree: Tensor | None
    causal: bool
    fold: int
    _like: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], num_tokens: int, tree: Tensor | None, groups: int, like: Tensor) -> Visibility:
        """For S = `num_tokens` new entries per row after `starts` cached ones.

        tree: [B, S, S] bool as in `LanguageModel.forward`, or None: a chain. It may be [B, S, N], N > S: then the S
        entries are the last of N that came after `starts`, as where a tree grows by one depth per forward.
        groups: query heads per key head. like: a tensor of the dtype and on the device of the scores.
        """
        causal = tree is None and not any(starts) and num_tokens > 1
        fold = groups if num_tokens <= _FOLD_UP_TO and not causal else 1
        return cls(starts, num_tokens, tree, causal, fold, like)

    @cached_property
    def mask(self) -> Tensor | None:
        """[B, 1, fold * S, L], added to the scores; None where `causal` says it, or everything is visible."""
        everything = self.num_tokens == 1 and (self.tree is None or self.tree.shape[2] == 1)
        if self.causal or (everything and len(set(self.starts)) == 1):
            return None
        visible = _visible(self.starts, self.num_tokens, self.tree, self._like.device)
        mask = self._like.new_zeros(visible.shape).masked_fill(~visible, -math.inf)
        return mask[:, None].repeat(1, 1, self.fold, 1)


def _visible(starts: Sequence[int], num_tokens: int, tree: Tensor | None, device: torch.device) -> Tensor:
    """[B, S, L] bool, L = max(starts) + N (N = S without a tree): what is cached, of the rest what the tree allows."""
    num_new = num_tokens if tree is None else tree.shape[2]
    ends = torch.arange(max(starts) + num_new, device=device)
    offset = (ends - torch.tensor(starts, device=device)[:, None])[:, None]  # [B, 1, L], from the row's first new entry
    if tree is None:
        return offset <= torch.arange(num_tokens, device=device)[:, None]
    index = offset.clamp(0, num_new - 1).expand(-1, num_tokens, -1)
    return (offset < 0) | ((offset < num_new) & tree.gather(2, index))
