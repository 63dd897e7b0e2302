"""Token after token until the chain is long enough: the loop that drafters with a model of their own share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafters.base import DraftContext, StopDrafting
from specdec.errors import ModelError
from specdec.models.vocabulary.vocab import TokenMap
from specdec.sampling.distributions import probabilities
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, DeferredError, Draft, refuse

Advance = Callable[[Tensor], Tensor]
"""The tokens just drawn, [B] target ids → the draft model's logits after them, [B, W]."""


class Limits:
    """How deep each row of a draft in the making may get: as asked for, and cut where the controller said `stop`.

    On the host a draft ends as soon as all rows have stopped. Elsewhere, to look would be to wait for the device after
    every token: there the answers stay, the draft is made as long as it may be, and is cut when they are read together.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = list(limits)
        self._unread: list[Tensor] = []  # answers [B], one per depth

    @property
    def deepest(self) -> int:
        """Of all rows, as far as is known."""
        return max(self._limits)

    def ended(self, depth: int) -> list[bool]:
        """Rows known to have no node of this depth."""
        return [depth > limit for limit in self._limits]

    def stop(self, answer: Tensor, depth: int) -> None:
        """What the controller said of each row's node of this depth, [B] bool."""
        if answer.is_cpu:
            self._cut(answer.tolist(), depth)
        else:
            self._unread.append(answer)

    def read(self) -> list[int]:
        """Each row's length."""
        if self._unread:
            answers = torch.stack(self._unread).tolist()
            for depth, answer in enumerate(answers, start=1):
                self._cut(answer, depth)
            self._unread = []
        return self._limits

    def _cut(self, stops: Sequence[bool], depth: int) -> None:
        self._limits = [min(limit, depth) if ends else limit for limit, ends in zip(self._limits, stops, strict=True)]


@dataclass(frozen=True)
class Chains:
    """One draft in the making. name: of the draft model; token_map: what its logits are about."""

    name: str
    token_map: TokenMap
    context: DraftContext
    stop: StopDrafting
    uniforms: Uniforms

    def draw(self, logits: Tensor, lengths: Sequence[int], advance: Advance) -> Draft:
        """At most lengths[b] tokens per row, not all of them 0, from logits [B, W] on.

        Rows that have ended are advanced with the others; what they draw is padding. Nothing waits for the device but
        where the controller watches. Raises `ModelError` for broken logits, or leaves that to the engine.
        """
        limits, drawn, drawn_from = Limits(lengths), list[Tensor](), list[Tensor]()
        broken: list[Tensor] = []
        while True:
            broken.append(are_broken(logits.amax(-1)))
            tokens, probs = self._draw(logits, drawn)
            drawn.append(tokens)
            drawn_from += [] if probs is None else [probs]
            if self.context.watched:
                shown = self.context.confidence(self.token_map.expand(logits), probs)
                limits.stop(self.stop(shown, tokens, len(drawn)), len(drawn))
            if len(drawn) >= limits.deepest:
                break
            logits = advance(tokens)
        deferred = refuse(torch.stack(broken), broken_logits(self.name, self.context))
        return _cut(drawn, drawn_from, limits.read(), deferred)

    def _draw(self, logits: Tensor, drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The next token of every row, [B], and what it was drawn from, [B, V]; None where all rows are greedy.

        Greedy rows need no distribution, and no tensor as wide as the target's vocabulary.
        """
        context, depth = self.context, len(drawn)
        if all(sampling.greedy and not sampling.penalised for sampling in context.sampling):
            return self.token_map.choose(logits), None
        before = torch.stack(list(drawn), dim=1) if drawn else logits.new_empty(len(logits), 0, dtype=torch.long)
        seen = context.seen(before)
        full = self.token_map.expand(logits)[:, None]
        probs = probabilities(full, context.sampling, lambda row, _: seen(row, depth))[:, 0]
        tokens = self.uniforms.draft(probs, depth)
        return tokens, None if all(sampling.greedy for sampling in context.sampling) else probs


def _cut(
    drawn: list[Tensor], drawn_from: list[Tensor], lengths: Sequence[int], deferred: tuple[DeferredError, ...]
) -> Draft:
    """The first lengths[b] of each row's tokens."""
    width, counts = max(lengths), torch.tensor(lengths)
    chains = torch.stack(drawn[:width], dim=1)  # [B, K]
    if min(lengths) < width:
        chains = chains.masked_fill((torch.arange(width) >= counts[:, None]).to(chains.device), PADDING)
    probs = torch.stack(drawn_from[:width], dim=1) if drawn_from else None
    return Draft(chains, counts, probs, deferred=deferred)


def are_broken(largest: Tensor) -> Tensor:
    """Whether no distribution can be made of logits whose maximum, [...], is this: it passes NaN on, and no mass at
    all is -inf."""
    return ~largest.isfinite()


def broken_logits(name: str, context: DraftContext) -> ModelError:
    """What to say of a draft model whose logits are broken."""
    return ModelError(
        f"draft {name} gave NaN or infinite logits for one of the requests {context.request_ids}; "
        f"try float32, or check the checkpoint"
    )
