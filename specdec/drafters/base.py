"""What every drafter can do: propose tokens, and follow what the verifier decided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, SamplingParams, Verdict, ancestor_mask

StopDrafting = Callable[[Tensor, Tensor, int], Tensor]
"""(draft_probs [B, V], tokens [B], depth) → [B] bool: the controller's `stop`, bound to the batch's states.

draft_probs is what `DraftContext.confidence` gives: how sure the draft model was, also where it drafts greedily. Where
`DraftContext.watched` is False the controller never looks, and `stop` need not be called.
"""


@dataclass(frozen=True)
class DraftContext:
    """The B requests a drafter is asked about. Lists have length B.

    tokens[b]: [length] int64, prompt and everything emitted so far; the last one is not yet in the target's
    cache. Read-only. num_prompt[b] of them are the prompt. vocab_size is the target's. watched: whether the controller
    may stop a draft while it is made.
    """

    slots: tuple[int, ...]
    request_ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    num_prompt: tuple[int, ...]
    sampling: tuple[SamplingParams, ...]
    vocab_size: int
    device: torch.device
    watched: bool = True

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.slots)

    def select(self, rows: Sequence[int]) -> DraftContext:
        """Some of the requests, in the order given."""
        return replace(
            self,
            slots=tuple(self.slots[row] for row in rows),
            request_ids=tuple(self.request_ids[row] for row in rows),
            tokens=tuple(self.tokens[row] for row in rows),
            num_prompt=tuple(self.num_prompt[row] for row in rows),
            sampling=tuple(self.sampling[row] for row in rows),
        )

    def confidence(self, logits: Tensor, probs: Tensor | None) -> Tensor:
        """What `stop` is shown of a draft token: [B, V] float32.

        logits: [B, V] of the draft model. probs: [B, V], what the token was drawn from, None where every row is
        greedy. At temperature 0 that is one-hot and says nothing; such rows show the draft's softmax at temperature 1.
        """
        greedy = [sampling.greedy for sampling in self.sampling]
        if probs is None:
            return logits.float().softmax(-1)
        if not any(greedy):
            return probs
        return torch.where(torch.tensor(greedy, device=probs.device)[:, None], logits.float().softmax(-1), probs)

    def seen(self, nodes: Tensor, parents: Tensor | None = None) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """What each position's penalties may look at: `seen(row, position) → (prompt ids, output ids)`, on `device`.

        nodes: [B, N] drafted so far. Position 0 is the root, position i + 1 sees node i and its ancestors. In a tree
        the others are there as `PADDING`: who they are need not be known on the host.
        """
        visible = None if parents is None else ancestor_mask(parents)[:, :, 1:]  # [B, N + 1, N]

        texts: dict[int, Tensor] = {}

        def history(row: int, position: int) -> tuple[Tensor, Tensor]:
            if row not in texts:
                texts[row] = torch.tensor(self.tokens[row], device=nodes.device)
            prompt, output = texts[row][: self.num_prompt[row]], texts[row][self.num_prompt[row] :]
            if visible is None:
                return prompt, torch.cat((output, nodes[row, :position]))
            return prompt, torch.cat((output, nodes[row].masked_fill(~visible[row, position], PADDING)))

        return history


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

        `Draft.probs` is exactly what the tokens were drawn from. Drafted tokens stay on the device: the engine reads
        them with everything else of the step. See `Limits` for what `stop` answers there.
        """

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Replace speculative state by the accepted path.

        context: as `propose` saw it. verdict: on the host, where a step is read once. hidden: [B, K + 1,
        len(hidden_layers), d], index 0 the root token. In a cascade another drafter's draft may have been verified:
        such a row has length 0 in `draft`, and its path all the same.
        """

    def reset(self, slot: int) -> None:
        """The slot's request has ended."""

    def reveal(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The target's own greedy continuation of a request, for synthetic drafters that replay it."""

    @property
    def num_bytes(self) -> int:
        """Memory of its own cache and weights not shared with the target."""
        return 0
