"""The speculative decoding loop: prefill, then draft → verify → roll back → record until every request has ended.

Every part is injected. Plain decoding is the same loop with a controller that asks for no draft tokens, which is what
makes it a fair baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.cache.base import Cache
from specdec.controllers.base import Controller, Observation
from specdec.decoding.judging import judge
from specdec.decoding.recording import Lap, Recording, StepId, record_step
from specdec.decoding.sequence import OnChunk, Sequence_
from specdec.drafters.base import DraftContext, Drafter
from specdec.errors import UsageError
from specdec.machine import interrupts
from specdec.machine.timing import PeakMemory, Stopwatch
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Request, Trace, ancestor_mask
from specdec.verifiers.base import Verifier

_CAPACITY_STEP = 256  # caches grow in steps, so that requests of similar length share one

NewCache = Callable[[LanguageModel, int, int], Cache]
"""(target, num_slots, capacity) → an empty cache."""


def preferred_cache(target: LanguageModel, num_slots: int, capacity: int) -> Cache:
    """The kind of cache the model itself prefers."""
    return target.new_cache(num_slots, capacity)


class Engine:
    """Decodes requests with one target, drafter, verifier and controller.

    Requests handed to `generate` together start together and form one batch; rows may end at different times.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        verifier: Verifier,
        controller: Controller,
        *,
        tokenizer: Tokenizer | None = None,
        new_cache: NewCache = preferred_cache,
    ) -> None:
        if drafter.proposes_trees and not (verifier.accepts_trees and target.supports_trees):
            who = type(verifier).__name__ if not verifier.accepts_trees else target.name
            raise UsageError(f"{type(drafter).__name__} proposes trees, which {who} cannot verify; use chains")
        cache = new_cache(target, 1, _CAPACITY_STEP)
        if controller.max_draft_tokens > 0 and not cache.can_rollback:
            raise UsageError(
                f"{target.name} cannot roll back rejected tokens ({', '.join(cache.unable) or 'its cache'}); "
                f"decode it with num_draft_tokens=0"
            )
        if controller.max_draft_tokens >= target.max_positions:
            raise UsageError(
                f"{type(controller).__name__} drafts up to {controller.max_draft_tokens} tokens, and {target.name}'s "
                f"window is {target.max_positions}; draft at most {target.max_positions - 1}"
            )
        drafter.bind(target, tokenizer)
        drafter.reserve(1, _CAPACITY_STEP)
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self.controller = controller
        self.tokenizer = tokenizer
        self._watches_drafts = type(controller).stop is not Controller.stop
        self._reports_verdicts = type(drafter).observe is not Drafter.observe
        self._new_cache = new_cache
        self._memory = PeakMemory(target.device)
        self._cache = cache

    def with_parts(self, drafter: Drafter, controller: Controller) -> Engine:
        """An engine of its own that differs in drafter and controller."""
        return Engine(
            self.target, drafter, self.verifier, controller, tokenizer=self.tokenizer, new_cache=self._new_cache
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], on_chunk: OnChunk | None = None) -> list[Trace]:
        """Decode the requests as one batch; traces come in the order of the requests.

        on_chunk: called with every chunk as it is emitted, before the next step begins.
        """
        if not requests:
            return []
        self.check(requests)
        self._reserve(requests)
        self._memory.reset()
        window = self.target.max_positions
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        batch = [
            Sequence_(request, slot, window, decode, self.controller.init(), on_chunk)
            for slot, request in enumerate(requests)
        ]
        clock = Stopwatch(self.target.device)
        self._prefill(batch, clock)
        while active := self._unfinished(batch):
            interrupts.check()
            self._step(active, clock)
        peak = self._memory.read()
        return [sequence.trace(peak) for sequence in batch]

    def _prefill(self, batch: Sequence[Sequence_], clock: Stopwatch) -> None:
        """Run the prompts through the target, draw the first tokens, and let the drafter begin."""
        lap, device = Lap(other=clock.lap()), self.target.device
        context = self._context(batch)
        lengths = torch.tensor(context.num_prompt)
        prompts = np.zeros((len(batch), int(lengths.max())), dtype=np.int64)  # [B, S], padded on the right
        for row, tokens in enumerate(context.tokens):
            prompts[row, : len(tokens)] = tokens
        output = self.target.forward(
            torch.from_numpy(prompts).to(device),
            torch.arange(prompts.shape[1], device=device).expand(len(batch), -1),
            self._cache.view(context.slots),
            logits_at=(lengths - 1)[:, None].to(device),
            hidden_layers=self.drafter.hidden_layers,
        )
        self._cache.rollback(context.slots, context.num_prompt)
        lap.forward = clock.lap()

        nothing = Draft.empty(len(batch), device)
        recording = self._verify(batch, context, nothing, output.logits, self._uniforms(batch))
        lap.verify = clock.lap()

        for row, sequence in enumerate(batch):
            sequence.emit(recording.tokens(row))
        lap.other += clock.lap()
        self._begin(batch, output.hidden)
        lap.draft = clock.lap()
        self._record(batch, recording, lap, clock)

    def _begin(self, batch: Sequence[Sequence_], hidden: Tensor | None) -> None:
        """Show the drafter prompts, hidden [B, S, L, d] and first tokens, but for requests that ended with theirs."""
        rows = [row for row, sequence in enumerate(batch) if not sequence.finished]
        if rows:
            features = None if hidden is None else [hidden[row, : batch[row].num_prompt] for row in rows]
            self.drafter.begin(self._context([batch[row] for row in rows]), features)

    def _step(self, batch: Sequence[Sequence_], clock: Stopwatch) -> None:
        """One draft → verify → roll back round for every unfinished sequence."""
        lap = Lap(other=clock.lap())
        context, uniforms = self._context(batch), self._uniforms(batch)

        draft = self._propose(batch, context, uniforms)
        lap.draft = clock.lap()

        logits, hidden = self._forward(context, draft)
        lap.forward = clock.lap()

        recording = self._verify(batch, context, draft, logits, uniforms)
        lap.verify = clock.lap()

        self._keep(context, recording.paths)
        if self._reports_verdicts:
            self.drafter.observe(context, draft, recording.verdict(), hidden)
        lap.rollback = clock.lap()

        for row, sequence in enumerate(batch):
            sequence.emit(recording.tokens(row))
        self._record(batch, recording, lap, clock)

    def _propose(self, batch: Sequence[Sequence_], context: DraftContext, uniforms: Uniforms) -> Draft:
        """Ask the controller how much and the drafter what. Never more than could be emitted before the end."""
        states = [sequence.controller_state for sequence in batch]
        remaining = tuple(sequence.remaining for sequence in batch)
        lengths = tuple(len(tokens) for tokens in context.tokens)
        wanted = self.controller.decide(states, Observation(lengths, remaining, len(batch)))
        limits = [max(0, min(count, left - 1)) for count, left in zip(wanted, remaining, strict=True)]
        if not any(limits):
            return Draft.empty(len(batch), self.target.device)

        def stop(draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
            return self.controller.stop(states, draft_probs, tokens, depth)

        return self.drafter.propose(context, limits, stop, uniforms)

    def _forward(self, context: DraftContext, draft: Draft) -> tuple[Tensor, Tensor | None]:
        """Logits [B, K + 1, V] of the last emitted token and every draft node, in one pass over the target."""
        last = [len(tokens) - 1 for tokens in context.tokens]
        roots = torch.tensor([int(tokens[-1]) for tokens in context.tokens], device=context.device)[:, None]
        mask = None if draft.parents is None else ancestor_mask(draft.parents)
        depths = torch.arange(draft.width + 1, device=context.device) if mask is None else mask.sum(-1) - 1
        positions = torch.tensor(last, device=context.device)[:, None] + depths
        output = self.target.forward(
            torch.cat([roots, draft.tokens.clamp(min=0)], dim=1),
            positions.clamp(max=self.target.max_positions - 1),  # only padding lies beyond the window
            self._cache.view(context.slots),
            mask=mask,
            hidden_layers=self.drafter.hidden_layers,
        )
        return output.logits, output.hidden

    def _verify(
        self, batch: Sequence[Sequence_], context: DraftContext, draft: Draft, logits: Tensor, uniforms: Uniforms
    ) -> Recording:
        """Decide what stays of the draft, and read back what is to be kept of the step."""
        seen = context.seen(draft.tokens, draft.parents)
        judged = judge(self.verifier, draft, logits, context.sampling, seen, uniforms)
        return record_step(judged, self._where(batch), self.target.name)

    def _keep(self, context: DraftContext, paths: Sequence[Sequence[int]]) -> None:
        """Roll the target's cache back to the root token and the accepted path."""
        starts = [len(tokens) - 1 for tokens in context.tokens]
        self._cache.keep(context.slots, starts, [[0, *(node + 1 for node in path)] for path in paths])

    def _record(self, batch: Sequence[Sequence_], recording: Recording, lap: Lap, clock: Stopwatch) -> None:
        """Write the step down and tell the controller; what this costs is part of the step."""
        tokens = [recording.token_records(row) for row in range(len(batch))]
        lap.other += clock.lap()
        for row, sequence in enumerate(batch):
            step = recording.step_record(row, lap, sequence.age_seconds)
            sequence.record(step, tokens[row])
            sequence.controller_state = self.controller.update(sequence.controller_state, step)

    def _unfinished(self, batch: Sequence[Sequence_]) -> list[Sequence_]:
        """The sequences still to be decoded; slots of the others are handed back."""
        unfinished = [sequence for sequence in batch if not sequence.finished]
        for sequence in batch:
            if sequence.finished and not sequence.released:
                self._cache.free(sequence.slot)
                self.drafter.reset(sequence.slot)
                sequence.released = True
        return unfinished

    def _where(self, batch: Sequence[Sequence_]) -> list[StepId]:
        return [StepId(sequence.request.id, sequence.step, sequence.context_length) for sequence in batch]

    def _uniforms(self, batch: Sequence[Sequence_]) -> Uniforms:
        keys, steps = [sequence.key for sequence in batch], [sequence.step for sequence in batch]
        positions = [sequence.context_length for sequence in batch]
        return Uniforms(keys, steps, self.target.device, positions=positions, coupled=self.verifier.coupled)

    def _context(self, batch: Sequence[Sequence_]) -> DraftContext:
        return DraftContext(
            slots=tuple(sequence.slot for sequence in batch),
            request_ids=tuple(sequence.request.id for sequence in batch),
            tokens=tuple(sequence.tokens for sequence in batch),
            num_prompt=tuple(sequence.num_prompt for sequence in batch),
            sampling=tuple(sequence.request.sampling for sequence in batch),
            vocab_size=self.target.vocab_size,
            device=self.target.device,
            watched=self._watches_drafts,
        )

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what cannot be decoded as one batch, before any work is done. `generate` begins with it."""
        limit = self.target.max_batch
        if limit is not None and len(requests) > limit:
            raise UsageError(f"{self.target.name} takes at most {limit} sequences at once, not {len(requests)}")
        ids = [request.id for request in requests]
        if len(set(ids)) != len(ids):
            raise UsageError(f"request ids must differ within a batch: {ids}")
        for request in requests:
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        window, length = self.target.max_positions, len(request.prompt_ids)
        if length >= window:
            raise UsageError(
                f"request {request.id!r} has {length} prompt tokens, and {self.target.name}'s window is {window}; "
                f"shorten the prompt to at most {window - 1}"
            )
        if not all(0 <= token < self.target.vocab_size for token in request.prompt_ids):
            raise UsageError(
                f"request {request.id!r} has token ids outside {self.target.name}'s vocabulary of "
                f"{self.target.vocab_size}; encode it with the target's tokenizer"
            )
        if request.stop and self.tokenizer is None:
            raise UsageError(f"request {request.id!r} has stop strings, which need a tokenizer; pass tokenizer=...")
        for part in (self.drafter, self.verifier):
            if part.greedy_only and not request.sampling.greedy:
                raise UsageError(
                    f"{type(part).__name__} works at temperature 0 only, and request {request.id!r} asks for "
                    f"temperature={request.sampling.temperature}; use the rejection verifier, or temperature 0"
                )

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Room for every request and the draft being verified; earlier caches are kept where they suffice."""
        window = self.target.max_positions
        longest = max(min(len(request.prompt_ids) + request.max_new_tokens, window) for request in requests)
        nodes = self.drafter.max_nodes(self.controller.max_draft_tokens) + 1
        capacity = -(-(longest + nodes) // _CAPACITY_STEP) * _CAPACITY_STEP
        if self._cache.num_slots >= len(requests) and self._cache.capacity >= capacity:
            return
        self._cache = self._new_cache(self.target, len(requests), capacity)
        self.drafter.reserve(len(requests), capacity)
