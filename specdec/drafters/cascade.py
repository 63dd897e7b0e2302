"""Two drafters in order: the second one where the first has nothing to say.

Lookup or suffix decoding is free and unbeatable where output repeats, and silent elsewhere; a trained drafter always
has an answer, and always costs a forward. Each row of a batch goes its own way, and in a step where no row needs the
second drafter it does not run at all. A cascade of three is a cascade whose second part is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.distributions import one_hot
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, Verdict


class CascadeDrafter(Drafter):
    """`first` drafts where it has `min_tokens` tokens to propose, or all that are asked for; `second` elsewhere.

    A shorter draft of the first is used where the second is silent. Whether a draft is used must not depend on what was
    drawn, so `min_tokens` weighs deterministic drafts alone; one that was sampled stands, however short.
    """

    def __init__(self, first: Drafter, second: Drafter, min_tokens: int = 1) -> None:
        if min_tokens < 1:
            raise UsageError(f"min_tokens={min_tokens} would let an empty draft stand; use at least 1")
        self.first, self.second, self.min_tokens = first, second, min_tokens
        self._parts = (first, second)
        self._of_second: set[int] = set()  # slots whose last draft was the second part's
        self.proposes_trees = first.proposes_trees or second.proposes_trees
        self.greedy_only = first.greedy_only or second.greedy_only
        self.synthetic = first.synthetic or second.synthetic
        self._declare_layers()

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Both parts must fit the target."""
        for part in self._parts:
            part.bind(target, tokenizer)
        self._declare_layers()

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Room for both parts; for the second, also to catch up.

        A row that the first part served for long makes the others' inputs as long as its own when the second reads it.
        """
        self.first.reserve(num_slots, capacity)
        self.second.reserve(num_slots, capacity if num_slots == 1 else 2 * capacity)

    def max_nodes(self, depth: int) -> int:
        """See `Drafter.max_nodes`."""
        return max(part.max_nodes(depth) for part in self._parts)

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """Both parts begin, each with the features it asked for."""
        for part in self._parts:
            layers = self._layers_of(part)
            part.begin(context, [row[:, layers] for row in hidden] if hidden is not None and layers else None)

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """The first part's drafts, and the second's in rows where those are too short."""
        self._of_second -= set(context.slots)
        draft = self.first.propose(context, max_tokens, stop, uniforms)
        rows = self._short_rows(draft, context, max_tokens)
        if not rows:
            return draft
        limits = [max_tokens[row] for row in rows]
        other = self.second.propose(context.select(rows), limits, _for_rows(stop, rows, context), uniforms.select(rows))
        found = [index for index, length in enumerate(other.lengths.tolist()) if length > 0]
        if not found:
            return draft
        rows = [rows[index] for index in found]
        self._of_second |= {context.slots[row] for row in rows}
        return _replaced(draft, rows, other, found, context.vocab_size)

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Both parts learn what became of every row. Of a draft that was not its own, a part sees an empty row."""
        of_second = torch.tensor([slot in self._of_second for slot in context.slots])
        for part, own in zip(self._parts, (~of_second, of_second), strict=True):
            layers = self._layers_of(part)
            features = hidden[:, :, layers] if hidden is not None and layers else None
            part.observe(context, draft if own.all() else _blanked(draft, ~own), verdict, features)

    def reset(self, slot: int) -> None:
        """The slot's request has ended."""
        self._of_second.discard(slot)
        for part in self._parts:
            part.reset(slot)

    def reveal(self, request_id: str, token_ids: Sequence[int]) -> None:
        """See `Drafter.reveal`."""
        for part in self._parts:
            part.reveal(request_id, token_ids)

    @property
    def num_bytes(self) -> int:
        """Of both parts."""
        return sum(part.num_bytes for part in self._parts)

    def _declare_layers(self) -> None:
        self.hidden_layers = tuple(sorted({layer for part in self._parts for layer in part.hidden_layers}))

    def _layers_of(self, part: Drafter) -> list[int]:
        """Where a part's layers are among those of the cascade."""
        return [self.hidden_layers.index(layer) for layer in part.hidden_layers]

    def _short_rows(self, draft: Draft, context: DraftContext, max_tokens: Sequence[int]) -> list[int]:
        """Rows in which the first part's draft does not stand."""
        drawn = zip(_sampled(draft), context.sampling, strict=True)
        enough = [1 if sampled and not sampling.greedy else self.min_tokens for sampled, sampling in drawn]
        counts = zip(draft.lengths.tolist(), enough, max_tokens, strict=True)
        return [row for row, (length, least, limit) in enumerate(counts) if length < min(least, limit)]


def _sampled(draft: Draft) -> tuple[bool, ...]:
    """Rows that could have been drawn differently, but for those at temperature 0."""
    return draft.sampled or (draft.probs is not None,) * len(draft.tokens)


def _for_rows(stop: StopDrafting, rows: Sequence[int], context: DraftContext) -> StopDrafting:
    """The controller's `stop` for some of the rows: the others are shown one of theirs, and their answers dropped."""
    if len(rows) == context.batch_size:
        return stop
    shown = torch.zeros(context.batch_size, dtype=torch.long)
    shown[list(rows)] = torch.arange(len(rows))

    def stop_rows(draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return stop(draft_probs[shown.to(draft_probs.device)], tokens[shown.to(tokens.device)], depth)[list(rows)]

    return stop_rows


def _replaced(draft: Draft, rows: Sequence[int], other: Draft, source: Sequence[int], vocab_size: int) -> Draft:
    """`draft` with row rows[i] taken from row source[i] of `other`."""
    lengths = draft.lengths.clone()
    lengths[list(rows)] = other.lengths[list(source)]
    width = int(lengths.max())
    into, chosen = (torch.tensor(index, device=draft.tokens.device) for index in (rows, source))

    def joined(one: Tensor, two: Tensor, fill: int) -> Tensor:
        return _resized(one, width, fill).index_copy(0, into, _resized(two[chosen], width, fill))

    probs = parents = None
    if draft.probs is not None or other.probs is not None:
        probs = joined(_probs(draft, vocab_size), _probs(other, vocab_size), 0)
    if draft.parents is not None or other.parents is not None:
        parents = joined(_parents(draft), _parents(other), PADDING)
    sampled = list(_sampled(draft))
    for row, index in zip(rows, source, strict=True):
        sampled[row] = _sampled(other)[index]
    tokens = joined(draft.tokens, other.tokens, PADDING)
    return Draft(tokens, lengths, probs, parents, tuple(sampled), draft.deferred + other.deferred)


def _resized(nodes: Tensor, width: int, fill: int) -> Tensor:
    """[B, K, ...] → [B, width, ...], cut or filled up."""
    return F.pad(nodes, (*(0, 0) * (nodes.dim() - 2), 0, width - nodes.shape[1]), value=fill)


def _probs(draft: Draft, vocab_size: int) -> Tensor:
    """[B, K, V], written out."""
    return one_hot(draft.tokens.clamp(min=0), vocab_size) if draft.probs is None else draft.probs


def _parents(draft: Draft) -> Tensor:
    """[B, K], written out."""
    if draft.parents is not None:
        return draft.parents
    chain = torch.arange(-1, draft.width - 1, device=draft.tokens.device).expand_as(draft.tokens)
    return chain.masked_fill(draft.tokens < 0, PADDING)


def _blanked(draft: Draft, rows: Tensor) -> Draft:
    """The draft with the given rows, [B] bool, empty."""
    gone = rows[:, None].to(draft.tokens.device)
    return Draft(
        draft.tokens.masked_fill(gone, PADDING),
        draft.lengths.masked_fill(rows, 0),
        draft.probs,
        None if draft.parents is None else draft.parents.masked_fill(gone, PADDING),
    )
