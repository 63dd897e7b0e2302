"""The target's own first layers draft: LayerSkip's self-speculation (Elhoushi et al. 2404.16710)."""

from __future__ import annotations

from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.vocab import SameIds


class EarlyExitDrafter(AutoregressiveDrafter):
    """The first `num_layers` layers, the final norm and the head, weights shared with the target, its cache its own.

    The honest weak drafter: layers that were not trained to be followed by the head accept next to nothing, and cost
    their share of the target and all of its head. For targets trained with layer dropout and early-exit loss.
    """

    def __init__(self, num_layers: int = 6) -> None:
        self.name = f"early exit after {num_layers} layers"
        self.num_layers = num_layers

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Share the target's layers. Raises `UsageError` for a count it can't give, and for one that isn't native."""
        self.model = target.truncated(self.num_layers)
        self._token_map = SameIds(target.vocab_size, target.vocab_size)
