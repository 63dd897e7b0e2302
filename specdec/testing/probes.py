"""Parts that look on while an engine decodes, and parts that make it do what a check needs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.controllers.base import Controller, Observation
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.testing.forms import Row, require_form
from specdec.types import PADDING, Draft, StepRecord, Verdict
from specdec.verifiers.base import Verifier


class LoggedUniforms(Uniforms):
    """Uniforms that remember what they were drawn for."""

    def __init__(self, uniforms: Uniforms, purposes: set[Purpose]) -> None:
        super().__init__(
            uniforms.keys, uniforms.steps, uniforms.device, positions=uniforms.positions, coupled=uniforms.coupled
        )
        self._purposes = purposes

    def draw(self, purpose: Purpose, first_node: int, num_nodes: int) -> Tensor:
        """See `Uniforms.draw`."""
        self._purposes.add(purpose)
        return super().draw(purpose, first_node, num_nodes)

    def on(self, device: torch.device) -> Uniforms:
        """See `Uniforms.on`."""
        return LoggedUniforms(super().on(device), self._purposes)

    def select(self, rows: Sequence[int]) -> Uniforms:
        """See `Uniforms.select`."""
        return LoggedUniforms(super().select(rows), self._purposes)


@dataclass(frozen=True)
class StopCall:
    """One question to `stop` and its answer."""

    probs: Tensor
    tokens: Tensor
    depth: int
    answer: Tensor


@dataclass(frozen=True)
class Proposal:
    """One call of `propose`: what was asked, what came back, and what happened meanwhile.

    context: with copies of the tokens. generators: global random generators that were drawn from.
    """

    context: DraftContext
    max_tokens: tuple[int, ...]
    uniforms: Uniforms
    draft: Draft
    stops: tuple[StopCall, ...]
    purposes: frozenset[Purpose]
    generators: tuple[str, ...]

    def row(self, index: int = 0) -> Row:
        """One request's draft."""
        return Row.of(self.draft, index)


class Recorder(Drafter):
    """Passes everything on to a drafter, keeps what it answers, and refuses a draft that is none.

    starts: how many proposals there were at each `begin`. features: hidden features of every token read so far, per
    request: [length - 1, layers, d]. altered: arguments that the drafter has written to.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.proposals: list[Proposal] = []
        self.begun: list[DraftContext] = []
        self.starts: list[int] = []
        self.features: dict[str, list[Tensor]] = {}
        self.altered: list[str] = []
        self._declare()

    def _declare(self) -> None:
        self.hidden_layers = self.inner.hidden_layers
        self.proposes_trees, self.greedy_only = self.inner.proposes_trees, self.inner.greedy_only
        self.synthetic = self.inner.synthetic

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        """See `Drafter.bind`; what a drafter needs may depend on the target."""
        self.inner.bind(target, tokenizer)
        self._declare()

    def reserve(self, num_slots: int, capacity: int) -> None:
        """See `Drafter.reserve`."""
        self.inner.reserve(num_slots, capacity)

    def max_nodes(self, depth: int) -> int:
        """See `Drafter.max_nodes`."""
        return self.inner.max_nodes(depth)

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """See `Drafter.begin`."""
        self.begun.append(_snapshot(context))
        self.starts.append(len(self.proposals))
        kept = None if hidden is None else [features.clone() for features in hidden]
        self.inner.begin(context, hidden)
        if hidden is not None and kept is not None:
            self._compare("hidden", list(hidden), kept)
            self.features.update({name: [own] for name, own in zip(context.request_ids, kept, strict=True)})

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """See `Drafter.propose`."""
        purposes: set[Purpose] = set()
        stops: list[StopCall] = []
        limits, before = list(max_tokens), _generators()

        def asked(probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
            answer = stop(probs, tokens, depth)
            stops.append(StopCall(probs.clone(), tokens.clone(), depth, answer.clone()))
            return answer

        draft = self.inner.propose(context, limits, asked, LoggedUniforms(uniforms, purposes))
        if limits != list(max_tokens):
            self.altered.append("max_tokens")
        require_form(draft, context, max_tokens, trees=self.proposes_trees, max_nodes=self.max_nodes)
        self.proposals.append(
            Proposal(
                context=_snapshot(context),
                max_tokens=tuple(max_tokens),
                uniforms=uniforms,
                draft=_copied(draft),
                stops=tuple(stops),
                purposes=frozenset(purposes),
                generators=tuple(name for name, state in _generators().items() if state != before[name]),
            )
        )
        return draft

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        kept = [t.clone() for t in _tensors(draft, verdict, hidden)]
        self.inner.observe(context, draft, verdict, hidden)
        self._compare("draft, verdict or hidden of observe", _tensors(draft, verdict, hidden), kept)
        if hidden is not None:
            for row, name in enumerate(context.request_ids):
                path = [0, *(node + 1 for node in verdict.path[row].tolist() if node != PADDING)]
                self.features[name].append(hidden[row, path].clone())

    def reset(self, slot: int) -> None:
        """See `Drafter.reset`."""
        self.inner.reset(slot)

    def reveal(self, request_id: str, token_ids: Sequence[int]) -> None:
        """See `Drafter.reveal`."""
        self.inner.reveal(request_id, token_ids)

    @property
    def num_bytes(self) -> int:
        """See `Drafter.num_bytes`."""
        return self.inner.num_bytes

    def rows(self) -> dict[tuple[str, int], Row]:
        """(request id, its step) → what was drafted, wherever anything was asked for."""
        return {
            (name, proposal.uniforms.steps[index]): proposal.row(index)
            for proposal in self.proposals
            for index, name in enumerate(proposal.context.request_ids)
            if proposal.max_tokens[index] > 0
        }

    def forget(self) -> None:
        """Drop what was recorded."""
        self.proposals, self.begun, self.starts, self.features = [], [], [], {}

    @property
    def num_drafted(self) -> int:
        """Nodes of all drafts."""
        return sum(int(proposal.draft.lengths.sum()) for proposal in self.proposals)

    def _compare(self, what: str, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(now, before, strict=True)):
            self.altered.append(what)


def _snapshot(context: DraftContext) -> DraftContext:
    return replace(context, tokens=tuple(tokens.copy() for tokens in context.tokens))


def _copied(draft: Draft) -> Draft:
    probs, parents = (None if part is None else part.clone() for part in (draft.probs, draft.parents))
    return Draft(draft.tokens.clone(), draft.lengths.clone(), probs, parents)


def _tensors(draft: Draft, verdict: Verdict, hidden: Tensor | None) -> list[Tensor]:
    parts = (draft.tokens, draft.lengths, draft.probs, draft.parents, verdict.path, verdict.num_accepted)
    return [part for part in (*parts, verdict.next_token, hidden) if part is not None]


def _generators() -> dict[str, Any]:
    """States of the generators that a drafter must not draw from."""
    name, keys, position, *_ = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, np.asarray(keys).tobytes(), position),
        "random": random.getstate(),
    }


class Schedule(Controller):
    """A number of draft tokens for every row and step, read off a list at the request's own length and step."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.max_draft_tokens = max(counts)

    def init(self) -> int:
        """Steps so far."""
        return 0

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        """See `Controller.decide`."""
        places = zip(states, observation.lengths, strict=True)
        return [self.counts[(state + length) % len(self.counts)] for state, length in places]

    def update(self, state: int, step: StepRecord) -> int:
        """One step more."""
        return state + 1


class StopAt(Controller):
    """Asks for `max_draft_tokens` and stops every draft at a depth; 0: never."""

    def __init__(self, max_draft_tokens: int, depth: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.depth = depth

    def decide(self, states: Sequence[Any], observation: Observation) -> list[int]:
        """See `Controller.decide`."""
        return [self.max_draft_tokens] * len(states)

    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """See `Controller.stop`."""
        return torch.full((len(states),), depth == self.depth, device=tokens.device)


class AcceptScript(Verifier):
    """Keeps a set number of nodes whatever they are, step by step from a list; first children, in a tree."""

    lossless = False
    accepts_trees = True

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """See `Verifier.verify`."""
        rows = [Row.of(draft, row) for row in range(len(draft.lengths))]
        paths = [self._path(row, step) for row, step in zip(rows, uniforms.steps, strict=True)]
        counts = [len(path) for path in paths]
        ends = [path[-1] if path else -1 for path in paths]
        chosen = target_probs[torch.arange(len(rows)), torch.tensor(ends) + 1].argmax(-1)
        padded = [[*path, *[PADDING] * (draft.width - len(path))] for path in paths]
        examined = [count + (end in row.parents) for count, end, row in zip(counts, ends, rows, strict=True)]
        path = torch.tensor(padded, dtype=torch.long).reshape(len(paths), draft.width)
        kept, seen = torch.tensor(counts), torch.tensor(examined)
        return Verdict(path.to(chosen.device), kept.to(chosen.device), seen.to(chosen.device), chosen)

    def _path(self, row: Row, step: int) -> list[int]:
        path: list[int] = []
        while len(path) < self.counts[step % len(self.counts)]:
            above = path[-1] if path else -1
            if above not in row.parents:
                break
            path.append(row.parents.index(above))
        return path
