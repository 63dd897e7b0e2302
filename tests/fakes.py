"""Small parts that stand at the ends of the contracts: trees, hidden features, stopping in the middle of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.controllers.base import Controller, Observation
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.oracle import OracleDrafter
from specdec.sampling.uniforms import Uniforms
from specdec.types import PADDING, Draft, Request, SamplingParams, StepRecord, Verdict


def make_request(name: str, length: int = 12, *, max_new_tokens: int = 24, seed: int = 0, **options: Any) -> Request:
    """A prompt of random bytes that repeats itself, so that lookup finds something."""
    rng = np.random.default_rng([length, *name.encode()])
    half = rng.integers(0, 256, size=length - length // 2).tolist()
    sampling = {key: options.pop(key) for key in list(options) if key in SamplingParams.__dataclass_fields__}
    return Request(
        name, tuple((half + half)[:length]), SamplingParams(seed=seed, **sampling), max_new_tokens, **options
    )


class TreeDrafter(OracleDrafter):
    """A comb: at every depth a wrong child first, then the right one, which carries on. Needs `reveal`."""

    proposes_trees = True

    def max_nodes(self, depth: int) -> int:
        return 2 * depth

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        chains = super().propose(context, max_tokens, stop, uniforms)
        width = 2 * chains.width
        tokens = torch.full((context.batch_size, width), PADDING)
        parents = torch.full((context.batch_size, width), PADDING)
        for row, length in enumerate(chains.lengths.tolist()):
            for depth in range(length):
                right = chains.tokens[row, depth]
                tokens[row, 2 * depth : 2 * depth + 2] = torch.stack([(right + 7) % context.vocab_size, right])
                parents[row, 2 * depth : 2 * depth + 2] = 2 * depth - 1
        return Draft(tokens, 2 * chains.lengths, None, parents)


class HiddenDrafter(Drafter):
    """Drafts nothing useful, but keeps every feature it is given, per request, as an EAGLE head would."""

    hidden_layers = (1, 3)

    def __init__(self) -> None:
        self.features: dict[str, list[Tensor]] = {}

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        assert hidden is not None
        for name, features in zip(context.request_ids, hidden, strict=True):
            self.features[name] = [features]

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        chains = [[int(tokens[0])] * limit for tokens, limit in zip(context.tokens, max_tokens, strict=True)]
        return Draft.from_chains(chains)

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        assert hidden is not None
        for row, name in enumerate(context.request_ids):
            path = [0, *(node + 1 for node in verdict.path[row].tolist() if node != PADDING)]
            self.features[name].append(hidden[row, path])


class StoppingController(Controller):
    """Asks for `max_draft_tokens`, stops a row's draft at its second token in every other step."""

    def __init__(self, max_draft_tokens: int = 5) -> None:
        self.max_draft_tokens = max_draft_tokens

    def init(self) -> int:
        return 0

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        assert len(states) == observation.batch_size == len(observation.lengths) == len(observation.remaining)
        return [self.max_draft_tokens] * len(states)

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        torch.testing.assert_close(draft_probs.sum(-1), torch.ones(len(states)))
        return torch.tensor([state % 2 == 0 and depth == 2 for state in states])

    def update(self, state: int, step: StepRecord) -> int:
        return state + (step.step > 0)


class SpoilingController(Controller):
    """A different number of draft tokens for every row and step: 0, 1, 2, 3, 0, ..."""

    max_draft_tokens = 3

    def init(self) -> int:
        return 0

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        return [state % 4 for state in states]

    def update(self, state: int, step: StepRecord) -> int:
        return state + 1
