"""What every language model can do: one forward pass over a cache view."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.cache.base import Cache, CacheView
from specdec.errors import UsageError


@dataclass(frozen=True)
class Output:
    """logits: [B, N, V], N = S or the positions asked for. hidden: [B, S, len(hidden_layers), d] or None."""

    logits: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True)
class Tables:
    """What a trained draft shares with its target. embedding: [V, d]; head: [V, d], which may be the same tensor."""

    embedding: Tensor
    head: Tensor


class LanguageModel(ABC):
    """A causal decoder. Batch-first; rows of a batch need not agree in length.

    `max_batch` None means any; `supports_trees` says whether `mask` may be anything but None. `fingerprint`: of the
    checkpoint it was loaded from, None where it is on no disk; a draft trained for it records this.
    dtype: what its weights are stored in. compute_dtype: of activations, cache, sums and logits; a native model on a
    CPU computes in float32 whatever narrower its weights are stored in.
    """

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    max_positions: int  # the context window, in tokens
    dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    max_batch: int | None = None
    supports_trees: bool = True
    fingerprint: str | None = None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the weights as they are held."""

    @property
    def bytes_per_forward(self) -> int:
        """What a forward of few tokens must read of the weights: a table that is only looked up does not count."""
        return self.num_bytes

    @abstractmethod
    def tables(self) -> Tables:
        """The embedding table and the output projection, as they are stored, on the model's device.

        Raises `UsageError` where the model has none of this form.
        """

    def truncated(self, num_layers: int) -> LanguageModel:
        """The first `num_layers` layers, then the final norm and the head, all of them shared: nothing is copied.

        Raises `UsageError` for a number that is not between 1 and one less than all, and where layers can't be shared.
        """
        raise UsageError(
            f"{self.name} runs through transformers, and only a native model can share its first layers with a draft; "
            "load it with implementation=native, or choose another drafter"
        )

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
