"""Is a draft what `specdec.types.Draft` says a draft is? Each rule as a sentence where it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafters.base import DraftContext
from specdec.testing.report import require
from specdec.types import PADDING, Draft

_ROUNDING = 1e-3  # how far probabilities in float32 may be from summing to 1


@dataclass(frozen=True)
class Row:
    """One request's draft: tokens and parents of its nodes, probs [n, V] or None."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: Tensor | None

    @classmethod
    def of(cls, draft: Draft, row: int) -> Row:
        """A row of a batch, without its padding."""
        length = int(draft.lengths[row])
        parents = range(-1, length - 1) if draft.parents is None else draft.parents[row, :length].tolist()
        probs = None if draft.probs is None else draft.probs[row, :length].float().cpu()
        return cls(tuple(draft.tokens[row, :length].tolist()), tuple(parents), probs)

    def difference(self, other: Row, tolerance: float = _ROUNDING) -> str | None:
        """What tells two drafts apart, in words, or None: probabilities may differ by `tolerance`."""
        if (self.tokens, self.parents) != (other.tokens, other.parents):
            return f"{self._drawn()} against {other._drawn()}"
        if self.probs is None or other.probs is None or not self.tokens:
            return None  # a batch declares probabilities for rows that alone would be deterministic
        distance = float((self.probs - other.probs).abs().max())
        return None if distance <= tolerance else f"declared probabilities that differ by {distance:.3g}"

    def _drawn(self) -> str:
        chain = self.parents == tuple(range(-1, len(self.parents) - 1))
        return f"tokens {list(self.tokens)}{'' if chain else f' under parents {list(self.parents)}'}"


def require_form(
    draft: Draft,
    context: DraftContext,
    max_tokens: Sequence[int],
    *,
    trees: bool,
    max_nodes: Callable[[int], int],
) -> None:
    """Raise `ConformanceError` at the first rule of `Draft` and `Drafter.propose` that the draft breaks."""
    _require_shapes(draft, context.batch_size)
    _require_tokens(draft, context)
    if draft.parents is not None:
        require(trees, "a draft has parents, and proposes_trees is False")
        _require_parents(draft)
    for row, (length, limit) in enumerate(zip(draft.lengths.tolist(), max_tokens, strict=True)):
        depth = int(draft.node_depths()[row, :length].max()) if length else 0
        require(depth <= limit, f"row {row} is {depth} deep, and max_tokens allowed {limit}")
        nodes = max_nodes(limit)
        require(length <= nodes, f"row {row} has {length} nodes, and max_nodes({limit}) promised at most {nodes}")
    if draft.probs is not None:
        _require_probs(draft, draft.probs, context.vocab_size)


def _require_shapes(draft: Draft, batch: int) -> None:
    tokens, lengths = draft.tokens, draft.lengths
    shape = list(tokens.shape)
    require(tokens.dtype == torch.long and tokens.dim() == 2, f"tokens are {tokens.dtype} {shape}, not int64 [B, K]")
    require(len(tokens) == batch, f"tokens have {len(tokens)} rows for a batch of {batch}")
    on_host = lengths.dtype == torch.long and lengths.device.type == "cpu" and list(lengths.shape) == [batch]
    require(
        on_host, f"lengths are {lengths.dtype} {list(lengths.shape)} on {lengths.device}, not int64 [B] on the host"
    )
    longest = max(lengths.tolist(), default=0)
    require(draft.width == longest, f"tokens are {draft.width} wide, and the longest row has {longest} nodes")


def _require_tokens(draft: Draft, context: DraftContext) -> None:
    require(
        draft.tokens.device.type == context.device.type, f"tokens are on {draft.tokens.device}, not {context.device}"
    )
    for row, length in enumerate(draft.lengths.tolist()):
        tokens = draft.tokens[row].tolist()
        for token in tokens[:length]:
            known = 0 <= token < context.vocab_size
            require(known, f"row {row} drafts token {token}, outside the target's vocabulary of {context.vocab_size}")
        padding = set(tokens[length:]) <= {PADDING}
        require(padding, f"row {row} has {length} nodes, and {tokens[length:]} after them instead of PADDING")


def _require_parents(draft: Draft) -> None:
    assert draft.parents is not None
    shape = list(draft.parents.shape)
    right = draft.parents.dtype == torch.long and draft.parents.shape == draft.tokens.shape
    require(right, f"parents are {draft.parents.dtype} {shape}, not int64 {list(draft.tokens.shape)}")
    for row, length in enumerate(draft.lengths.tolist()):
        for node, parent in enumerate(draft.parents[row, :length].tolist()):
            require(-1 <= parent < node, f"node {node} of row {row} has parent {parent}, which does not come before it")


def _require_probs(draft: Draft, probs: Tensor, vocab_size: int) -> None:
    wanted = [*draft.tokens.shape, vocab_size]
    require(
        probs.is_floating_point() and list(probs.shape) == wanted,
        f"probs are {probs.dtype} {list(probs.shape)}, not floats {wanted}",
    )
    for row, node, own, total in _declared(draft, probs):
        where = f"node {node} of row {row}"
        require(bool(abs(total - 1) <= _ROUNDING), f"the probabilities of {where} sum to {total:.6g}")
        require(own > 0, f"{where} is token {int(draft.tokens[row, node])}, whose declared probability is {own:.3g}")


def _declared(draft: Draft, probs: Tensor) -> Iterator[tuple[int, int, float, float]]:
    """(row, node, probability of its own token, sum), for every node; a negative entry makes the sum nan."""
    own = probs.gather(-1, draft.tokens.clamp(min=0)[..., None])[..., 0].tolist()
    totals = probs.sum(-1).masked_fill((probs < 0).any(-1), float("nan")).tolist()
    for row, length in enumerate(draft.lengths.tolist()):
        for node in range(length):
            yield row, node, own[row][node], totals[row][node]
