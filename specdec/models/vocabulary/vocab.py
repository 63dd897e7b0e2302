"""What a draft's token ids mean in its target's: the context it reads, and the logits it gives.

Models are often padded to a rounder vocabulary than their tokenizer has (152064 against 151936): real ids agree,
padding must never get any mass. A trained draft may have a head over the target's most frequent tokens alone. A draft
with another tokenizer is in `specdec.models.vocabulary.translation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary
from specdec.sampling.distributions import argmax


class HasVocabulary(Protocol):
    """A tokenizer, for this purpose."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""


def shared_ids(draft_tokenizer: HasVocabulary, target_tokenizer: HasVocabulary) -> int | None:
    """Number of real ids, counted from 0, that both vocabularies share: ids 0 ... n - 1 mean the same token.

    One vocabulary may go on where the other ends. None where an id or a token means two things: two tokenizers.
    """
    draft, target = draft_tokenizer.get_vocab(), target_tokenizer.get_vocab()
    target_tokens = {index: token for token, index in target.items()}
    for token, index in draft.items():
        if target.get(token, index) != index or target_tokens.get(index, token) != token:
            return None
    return min(max(draft.values()), max(target_tokens)) + 1


class TokenMap(ABC):
    """Between a draft model's ids and its target's. W is the width of the draft's logits, V the target's vocabulary.

    The base class reads ids as they are.
    """

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """A context [n] of target ids as the draft model reads it, [m] int64, m >= n; a longer one begins the same."""
        return tokens

    def read_drawn(self, tokens: Tensor) -> Tensor:
        """Drawn target ids, each as the one id that the draft model reads. The shape stays."""
        return tokens

    @abstractmethod
    def choose(self, logits: Tensor) -> Tensor:
        """The most likely token that both models have: logits [..., W] → target ids [...]."""

    @abstractmethod
    def expand(self, logits: Tensor) -> Tensor:
        """Logits [..., W] over the target's vocabulary [..., V]; what the draft can't mean gets -inf."""


class SameIds(TokenMap):
    """Ids 0 ... num_real - 1 mean the same to both; whatever either has beyond is padding, or unknown to the other."""

    def __init__(self, num_real: int, vocab_size: int) -> None:
        self._num_shared = min(num_real, vocab_size)
        self._vocab_size = vocab_size

    def choose(self, logits: Tensor) -> Tensor:
        """See `TokenMap.choose`."""
        return argmax(logits[..., : self._num_shared])

    def expand(self, logits: Tensor) -> Tensor:
        """See `TokenMap.expand`. Vocabularies that agree throughout are not copied."""
        if logits.shape[-1] == self._vocab_size == self._num_shared:
            return logits
        kept = logits[..., : self._num_shared]
        return F.pad(kept, (0, self._vocab_size - kept.shape[-1]), value=-float("inf"))


class ReducedIds(TokenMap):
    """The draft reads the target's ids, and its logits are over a part of them."""

    def __init__(self, vocabulary: DraftVocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size

    def choose(self, logits: Tensor) -> Tensor:
        """See `TokenMap.choose`. Nothing as wide as the target's vocabulary is made."""
        return self._vocabulary.to_target(argmax(logits))

    def expand(self, logits: Tensor) -> Tensor:
        """See `TokenMap.expand`."""
        return self._vocabulary.expand(logits, self._vocab_size)
