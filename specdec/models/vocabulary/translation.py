"""A draft with another tokenizer than its target's: token-level intersection of the two vocabularies.

Timor et al. 2502.05202 (TLI). Tokens that spell the same bytes are one token under two ids; special tokens are the same
where their name or their role (beginning or end of a text) is. The draft's logits are cut down to the tokens both have
*before* sampling options make a distribution of them. So what is reported is what was sampled from, and nothing is
lost: a token outside the intersection is never proposed, and the verifier recovers what mass the target has there.

What it costs is acceptance. The draft never proposes a token it lacks, and gives the mass of those that only it has to
the tokens both have; and it reads the context in the target's pieces, split as its own tokenizer would not have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary
from specdec.models.vocabulary.lexicon import Lexicon
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.vocab import ReducedIds

_log = logging.getLogger(__name__)

MIN_SHARE = 0.05
"""Of the larger vocabulary that must be in the intersection: with less, hardly anything could be proposed."""

_UNKNOWN = -1


class Translation(ReducedIds):
    """The `TokenMap` of a draft with another tokenizer.

    A target token outside the intersection is read as its text in the draft's tokens, looked up once, so a context may
    be longer for the draft than for the target.

    vocab_size: the target's V. device: where logits are. lead: the id that the draft's tokenizer begins a text with.
    """

    def __init__(
        self, draft: Lexicon, target: Lexicon, vocab_size: int, device: torch.device | str, lead: int | None = None
    ) -> None:
        # By target id, so that of two equal logits the target's first is chosen.
        shared = torch.tensor(sorted(_pairs(draft, target)), dtype=torch.long).reshape(-1, 2)
        target_ids, draft_ids = shared.T.contiguous().unbind()
        super().__init__(DraftVocabulary(target_ids.to(device)), vocab_size)
        self._columns = draft_ids.to(device)
        self._read_as = torch.zeros(vocab_size, dtype=torch.long).index_copy_(0, target_ids, draft_ids).to(device)
        self._draft, self._target, self._lead = draft, target, lead
        # Target id t is read as pieces[starts[t] : starts[t] + widths[t]].
        self._pieces = draft_ids.numpy()
        self._starts, self._widths = np.zeros(vocab_size, dtype=np.int64), np.full(vocab_size, _UNKNOWN)
        self._starts[target_ids.numpy()], self._widths[target_ids.numpy()] = np.arange(len(shared)), 1

    @classmethod
    def between(
        cls, draft: LanguageModel, draft_tokenizer: Tokenizer, target: LanguageModel, target_tokenizer: Tokenizer
    ) -> Translation:
        """For two models. Raises `UsageError`, with numbers, where their vocabularies have too little in common."""
        own, other = Lexicon.of(draft_tokenizer, draft.vocab_size), Lexicon.of(target_tokenizer, target.vocab_size)
        begin = draft_tokenizer.encode("")[:1]
        lead = begin[0] if begin and begin[0] == own.roles.get("bos") else None
        translation = cls(own, other, target.vocab_size, target.device, lead)
        num_shared = len(translation)
        overlap = (
            f"{num_shared} tokens are in both vocabularies, {num_shared / other.size:.1%} of the target's {other.size} "
            f"and {num_shared / own.size:.1%} of the draft's {own.size}"
        )
        if num_shared < MIN_SHARE * max(own.size, other.size):
            raise UsageError(
                f"the tokenizers of the draft {draft_tokenizer.name} and the target {target_tokenizer.name} have too "
                f"little in common: {overlap}, and {MIN_SHARE:.0%} of the larger are needed; choose a draft with the "
                "target's tokenizer, or a drafter without a model such as prompt lookup"
            )
        _log.warning("%s has another tokenizer than %s: %s", draft_tokenizer.name, target_tokenizer.name, overlap)
        return translation

    def __len__(self) -> int:
        """Tokens that both vocabularies have."""
        return len(self._columns)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """See `TokenMap.read`."""
        for index in np.unique(tokens[self._widths[tokens] == _UNKNOWN]).tolist():
            self._learn(index)
        widths = self._widths[tokens]
        ends = widths.cumsum()
        within = np.arange(widths.sum()) - np.repeat(ends - widths, widths)
        ids: np.ndarray = self._pieces[np.repeat(self._starts[tokens], widths) + within]
        if self._lead is None or ids[:1] == self._lead:
            return ids
        return np.concatenate([[self._lead], ids])

    def read_drawn(self, tokens: Tensor) -> Tensor:
        """See `TokenMap.read_drawn`."""
        return self._read_as[tokens]

    def choose(self, logits: Tensor) -> Tensor:
        """See `TokenMap.choose`."""
        return super().choose(logits[..., self._columns])

    def expand(self, logits: Tensor) -> Tensor:
        """See `TokenMap.expand`."""
        return super().expand(logits[..., self._columns])

    def _learn(self, target_id: int) -> None:
        pieces = self._draft.split(self._target.text_of(target_id))
        self._starts[target_id], self._widths[target_id] = len(self._pieces), len(pieces)
        self._pieces = np.concatenate([self._pieces, pieces])


def _pairs(draft: Lexicon, target: Lexicon) -> Iterator[tuple[int, int]]:
    """(target id, draft id) of every token that both have; no id twice."""
    for spelling in target.by_spelling.keys() & draft.by_spelling.keys():
        yield target.by_spelling[spelling], draft.by_spelling[spelling]
    draft_special = {name: index for index, name in draft.names.items()}
    special = {index: draft_special[name] for index, name in target.names.items() if name in draft_special}
    for role, index in target.roles.items():
        own = draft.roles.get(role)
        if own is not None and index not in special and own not in special.values():
            special[index] = own
    yield from special.items()
