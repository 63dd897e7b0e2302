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
from specdec.types import PADDING, Draft

Advance = Callable[[Tensor], Tensor]
"""The tokens just drawn, [B] target ids → the draft model's logits after them, [B, W]."""


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

        Rows that have ended are advanced with the others; what they draw is padding. Lengths stay on the host, so that
        nothing waits for the device where the controller does not watch. Raises `ModelError` for broken logits.
        """
        lengths, drawn, drawn_from = list(lengths), list[Tensor](), list[Tensor]()
        while True:
            tokens, probs = self._draw(logits, drawn)
            drawn.append(tokens)
            drawn_from += [] if probs is None else [probs]
            if self.context.watched:
                lengths = self._stopped(logits, tokens, probs, lengths, len(drawn))
            if len(drawn) >= max(lengths):
                break
            logits = advance(tokens)
        counts = torch.tensor(lengths)
        chains = torch.stack(drawn, dim=1)  # [B, K]
        if min(lengths) < len(drawn):
            chains = chains.masked_fill((torch.arange(len(drawn)) >= counts[:, None]).to(chains.device), PADDING)
        return Draft(chains, counts, torch.stack(drawn_from, dim=1) if drawn_from else None)

    def _draw(self, logits: Tensor, drawn: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The next token of every row, [B], and what it was drawn from, [B, V]; None where all rows are greedy.

        Greedy rows need no distribution, and no tensor as wide as the target's vocabulary.
        """
        context, depth = self.context, len(drawn)
        refuse_broken(logits, self.name, context)
        if all(sampling.greedy and not sampling.penalised for sampling in context.sampling):
            return self.token_map.choose(logits), None
        before = torch.stack(list(drawn), dim=1) if drawn else torch.empty(len(logits), 0, dtype=torch.long)
        seen = context.seen(before)
        full = self.token_map.expand(logits)[:, None]
        probs = probabilities(full, context.sampling, lambda row, _: seen(row, depth))[:, 0]
        tokens = self.uniforms.draft(probs, depth)
        return tokens, None if all(sampling.greedy for sampling in context.sampling) else probs

    def _stopped(
        self, logits: Tensor, tokens: Tensor, probs: Tensor | None, lengths: Sequence[int], depth: int
    ) -> list[int]:
        """Each row's length once the controller has looked at the token at this depth."""
        stops = self.stop(self.context.confidence(self.token_map.expand(logits), probs), tokens, depth).tolist()
        return [min(length, depth) if ends else length for length, ends in zip(lengths, stops, strict=True)]


def refuse_broken(logits: Tensor, name: str, context: DraftContext) -> None:
    """Raise `ModelError` where the draft model `name` gave a row of logits [..., W] no distribution can be made of."""
    if not torch.isfinite(logits.amax(-1)).all():  # a maximum passes NaN on, and no mass at all is -inf
        raise ModelError(
            f"draft {name} gave NaN or infinite logits for one of the requests {context.request_ids}; "
            f"try float32, or check the checkpoint"
        )
