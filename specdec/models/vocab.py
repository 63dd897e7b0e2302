"""Do a draft and its target speak of the same tokens, and on which ids.

Models are often padded to a rounder vocabulary than their tokenizer has (152064 against 151936): real ids agree,
padding must never get any mass. Different tokenizers are refused, by name.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from specdec.errors import UsageError


class HasVocabulary(Protocol):
    """A tokenizer, for this purpose."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""


def align(draft_tokenizer: HasVocabulary, target_tokenizer: HasVocabulary, draft_name: str, target_name: str) -> int:
    """Number of real ids, counted from 0, that both vocabularies share: ids 0 ... n - 1 mean the same token.

    One vocabulary may go on where the other ends. `UsageError` where an id or a token means two things.
    """
    draft, target = draft_tokenizer.get_vocab(), target_tokenizer.get_vocab()
    draft_tokens = {index: token for token, index in draft.items()}
    target_tokens = {index: token for token, index in target.items()}
    both = draft_tokens.keys() & target_tokens.keys()
    num_agreeing = sum(draft_tokens[index] == target_tokens[index] for index in both)
    moved = any(target.get(token, index) != index for token, index in draft.items())
    if moved or num_agreeing < len(both):
        raise UsageError(
            f"the draft {draft_name} and the target {target_name} have different tokenizers "
            f"({num_agreeing} of {max(len(draft), len(target))} ids agree); choose a draft that was trained with the "
            "target's tokenizer, or a drafter without a model such as prompt lookup"
        )
    return min(max(draft_tokens), max(target_tokens)) + 1


def fit_logits(logits: Tensor, num_real: int, target_vocab_size: int) -> Tensor:
    """A draft's logits [..., V_draft] as logits over the target's vocabulary [..., V_target].

    Ids from `num_real` on get -inf, so that no distribution made of them gives padding any mass.
    """
    if logits.shape[-1] == target_vocab_size == num_real:
        return logits
    kept = logits[..., : min(num_real, target_vocab_size)]
    return F.pad(kept, (0, target_vocab_size - kept.shape[-1]), value=-float("inf"))
