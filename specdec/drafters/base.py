"""What every drafter can do: propose tokens, and follow what the verifier decided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.models.base import LanguageModel
from specdec.models.tokenizer import Tokenizer
from specdec.types import Draft, SamplingParams, Verdict
from specdec.uniforms import Uniforms

StopDrafting = Callable[[Tensor, Tensor, int], Tensor]
"""(draft_probs [B, V], tokens [B], depth) → [B] bool: the controller's `stop`, bound to the batch's states."""


@dataclass(frozen=True)
class DraftContext:
    """The B requests a drafter is asked about. Lists have length B.

    tokens[b]: [length] int64, prompt and everything emitted so far; the last one is not yet in the target's
    cache. Read-only. num_prompt[b] of them are the prompt. vocab_size is the target's.
    """

    slots: tuple[int, ...]
    request_ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    num_prompt: tuple[int, ...]
    sampling: tuple[SamplingParams, ...]
    vocab_size: int
    device: torch.device

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.slots)

    def seen(self, nodes: Tensor, parents: Tensor | None = None) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
        """What each position's penalties may look at: `seen(row, position) → (prompt ids, output ids)`.

        nodes: [B, N] drafted so far. Position 0 is the root, position i + 1 sees node i and its ancestors.
        """

        def history(row: int, position: int) -> tuple[np.ndarray, np.ndarray]:
            tokens, start = self.tokens[row], self.num_prompt[row]
            path = _path_to(position - 1, None if parents is None else parents[row].tolist())
            drafted = nodes[row].cpu().numpy()[path]
            return tokens[:start], np.concatenate([tokens[start:], drafted])

        return history


def _path_to(node: int, parents: Sequence[int] | None) -> list[int]:
    """Indices from the root's child down to `node`; empty for the root itself (-1)."""
    if parents is None:
        return list(range(node + 1))
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Drafter(ABC):
    """Proposes draft tokens.

    hidden_layers: the target's layers whose features it needs (empty: none).
    proposes_trees: drafts may carry `parents`. greedy_only: refuses temperature > 0.
    synthetic: its acceptance is set, not earned; named so wherever it appears.
    """

    hidden_layers: tuple[int, ...] = ()
    proposes_trees: bool = False
    greedy_only: bool = False
    synthetic: bool = False

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """Called once by the engine before any request: refuse a target it does not fit, with `UsageError`.

        tokenizer is None only where no text is involved; then vocabularies are compared by size.
        """

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Make room for `num_slots` requests of `capacity` tokens each; earlier requests have ended."""

    def max_nodes(self, depth: int) -> int:
        """The most nodes a draft of this depth can have; the target's cache holds them while they are verified."""
        return depth

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """After every (re)prefill of the context's slots.

        tokens[b] ends with the first emitted token; hidden[b]: [prompt_length, len(hidden_layers), d].
        """

    @abstractmethod
    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """At most max_tokens[b] nodes deep per row; a drafter with nothing to say returns an empty row.

        `Draft.probs` is exactly what the tokens were drawn from.
        """

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Replace speculative state by the accepted path.

        context: as `propose` saw it. hidden: [B, K + 1, len(hidden_layers), d], index 0 the root token.
        """

    def reset(self, slot: int) -> None:
        """The slot's request has ended."""

    def reveal(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The target's own greedy continuation of a request, for synthetic drafters that replay it."""

    @property
    def num_bytes(self) -> int:
        """Memory of its own cache and weights not shared with the target."""
        return 0
