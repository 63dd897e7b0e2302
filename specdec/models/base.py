"""What every language model can do: one forward pass over a cache view."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache.base import Cache, CacheView


@dataclass(frozen=True)
class Output:
    """logits: [B, N, V], N = S or the positions asked for. hidden: [B, S, len(hidden_layers), d] or None."""

    logits: Tensor
    hidden: Tensor | None = None


class LanguageModel(ABC):
    """A causal decoder. Batch-first; rows of a batch need not agree in length.

    `max_batch` None means any; `supports_trees` says whether `mask` may be anything but None.
    """

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    max_positions: int  # the context window, in tokens
    dtype: torch.dtype
    device: torch.device
    max_batch: int | None = None
    supports_trees: bool = True

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the weights as they are held."""

    @abstractmethod
    def new_cache(self, num_slots: int, capacity: int) -> Cache:
        """An empty cache of the kind this model prefers."""

    @abstractmethod
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
        """Append S tokens per row to the cache and return their next-token logits.

        tokens, positions: [B, S] int64. mask: [B, S, S] bool, True where query i may see appended entry j
        (ancestors and itself, for a tree); None: causal. Everything already cached is always visible.
        logits_at: [B, N] int64, which of the S positions need logits; None: all.
        hidden_layers: which layers' outputs to return, 0 = embeddings, l = after layer l.
        """
