"""One request while it is being decoded: its tokens, its records, its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec.decoding.stopping import Decode, Ending
from specdec.sampling.uniforms import request_key
from specdec.types import Chunk, FinishReason, Request, StepRecord, TokenKind, TokenRecord, Trace

OnChunk = Callable[[Chunk], None]


class Sequence_:  # noqa: N801 - `Sequence` is the standard library's word
    """Mutable state of one request in the engine. Only the engine touches it."""

    def __init__(
        self, request: Request, slot: int, window: int, decode: Decode | None, state: Any, on_chunk: OnChunk | None
    ) -> None:
        self.request = request
        self.slot = slot
        self.key = request_key(request.sampling.seed, request.id)
        self.step = 0
        self.controller_state = state
        self.released = False
        self._submitted = time.perf_counter()
        self._on_chunk = on_chunk
        self._ending = Ending(request, window, decode, stream=on_chunk is not None)
        self._buffer = np.empty(len(request.prompt_ids) + request.max_new_tokens, dtype=np.int64)
        self._buffer[: len(request.prompt_ids)] = request.prompt_ids
        self._length = len(request.prompt_ids)
        self._steps: list[StepRecord] = []
        self._tokens: list[list[TokenRecord]] = []

    @property
    def tokens(self) -> np.ndarray:
        """[length] int64: prompt and output; a read-only view."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    @property
    def context_length(self) -> int:
        """Prompt and output tokens."""
        return self._length

    @property
    def age_seconds(self) -> float:
        """Since the request was submitted."""
        return time.perf_counter() - self._submitted

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens the request may still emit."""
        return self._ending.remaining

    @property
    def finished(self) -> FinishReason | None:
        """Why the sequence ended, or None."""
        return self._ending.reason

    def emit(self, tokens: Sequence[int]) -> None:
        """Take what a step granted, up to where the request ends, and show it to a streaming client."""
        before = len(self._ending.tokens)
        self._ending.extend(tokens)
        emitted = self._ending.tokens
        self._length = self.num_prompt + len(emitted)
        self._buffer[self.num_prompt : self._length] = emitted
        if self._on_chunk is not None:
            chunk = Chunk(self.request.id, tuple(emitted[before:]), self._ending.new_text(), self._ending.reason)
            self._on_chunk(chunk)

    def record(self, step: StepRecord, tokens: list[TokenRecord]) -> None:
        """Keep a step's records; `tokens` in the order they were examined, the granted one last."""
        self._steps.append(step)
        self._tokens.append(tokens)
        self.step += 1

    def trace(self, peak_memory_bytes: int | None) -> Trace:
        """Everything that happened, with nothing in it from beyond the end."""
        reason = self._ending.reason
        assert reason is not None, "a trace exists once its request has ended"
        budget = len(self._ending.tokens)
        steps, tokens = [], []
        for step, records in zip(self._steps, self._tokens, strict=True):
            kept_step, kept_records = _cut(step, records, budget)
            budget -= kept_step.num_emitted
            steps.append(kept_step)
            tokens.extend(kept_records)
        return Trace(
            request_id=self.request.id,
            prompt_length=self.num_prompt,
            token_ids=tuple(self._ending.tokens),
            text=self._ending.text,
            finish_reason=reason,
            steps=tuple(steps),
            tokens=tuple(tokens),
            peak_memory_bytes=peak_memory_bytes,
        )


def _cut(step: StepRecord, records: list[TokenRecord], budget: int) -> tuple[StepRecord, list[TokenRecord]]:
    """A step's records when only `budget` of its emitted tokens are kept. A cut step has no rejection."""
    if step.num_emitted <= budget:
        return step, records
    emitted = [record for record in records if record.emitted][:budget]
    accepted = sum(record.kind is TokenKind.ACCEPTED for record in emitted)
    cut = dataclasses.replace(step, num_examined=accepted, num_accepted=accepted, num_emitted=len(emitted), cut=True)
    return cut, emitted
