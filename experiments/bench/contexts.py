"""How a step grows with the context: prefill, a plain decode step and a verify step, up to the model's window.

A plain decode step must read every weight and every cached entry once. What it takes beyond that is shown as its ratio
to reading as many bytes, at the rate at which this machine reads a buffer of that size in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd
import torch

from experiments.bench.plan import LOOKUP_TOKENS, Plan
from experiments.bench.rounds import rotated, rounds, timed
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS, THEIRS
from experiments.bench.tables import Row, groups, spread
from specdec.cache.base import Cache
from specdec.machine.allocator import huge_pages
from specdec.models.base import LanguageModel
from specdec.models.hf import HFModel
from specdec.sampling.distributions import argmax

STEP, VERIFY = 1, LOOKUP_TOKENS + 1
"""Tokens of a plain decode step, and of one that verifies a draft."""
MEMORY = "memory"
"""The system whose seconds are those of reading the bytes of our decode step, and nothing else."""


@torch.inference_mode()
def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Columns: system, context, tokens (equal to context for a prefill), round, seconds.

    The context ends early enough for a draft to fit into the window.
    """
    models: dict[str, LanguageModel] = {
        OURS: subject.target.model,
        THEIRS: HFModel(subject.transformers, subject.target.name),
    }
    room = subject.target.model.max_positions - VERIFY
    records = []
    for length in sorted({min(length, room) for length in plan.contexts}):
        cells = {system: _Cell(model, length) for system, model in models.items()}
        records += _time(cells, length, plan, f"{subject.dtype} context {length}")
    return pd.DataFrame(records)


def _time(cells: Mapping[str, _Cell], length: int, plan: Plan, label: str) -> list[Row]:
    records: list[Row] = []

    def note(system: str, tokens: int, number: int, seconds: float) -> None:
        records.append({"system": system, "context": length, "tokens": tokens, "round": number, "seconds": seconds})

    for number in rounds(plan.prefills, f"{label}, prefill"):
        for system in rotated(list(cells), number):
            note(system, length, number, cells[system].prefill())
    for cell in cells.values():
        cell.step(VERIFY)  # untimed
    work: dict[tuple[str, int], Callable[[], float]] = {
        (system, tokens): partial(cell.step, tokens) for tokens in (STEP, VERIFY) for system, cell in cells.items()
    }
    work[MEMORY, STEP] = _Reader(cells[OURS].bytes_per_step, cells[OURS].device).read
    for number in rounds(plan.steps, f"{label}, steps"):
        for system, tokens in rotated(list(work), number):
            note(system, tokens, number, work[system, tokens]())
    return records


class _Cell:
    """One model with one context, filled by `prefill` and rolled back to before every step."""

    def __init__(self, model: LanguageModel, length: int) -> None:
        self._model, self._length = model, length
        self.device = model.device
        self._cache: Cache = model.new_cache(1, length + VERIFY)
        self._text = torch.arange(length + VERIFY, device=model.device)[None] % model.vocab_size
        self._places = torch.arange(length + VERIFY, device=model.device)[None]

    @property
    def bytes_per_step(self) -> int:
        """What a plain decode step must read: the weights, of the embedding one row, and what is cached."""
        entry = self._cache.num_bytes // self._cache.capacity
        return self._model.bytes_per_forward + entry * self._length

    def prefill(self) -> float:
        """Seconds from an empty cache to the choice of the first token."""
        self._cache.free(0)
        return timed(self._model.device, lambda: self._choose(0, self._length, last_only=True))[1]

    def step(self, tokens: int) -> float:
        """Seconds of a forward over `tokens` more tokens and of the greedy choice after each, read back."""
        self._cache.rollback([0], [self._length])
        return timed(self._model.device, lambda: self._choose(self._length, tokens))[1]

    def _choose(self, start: int, tokens: int, last_only: bool = False) -> list[int]:
        here = slice(start, start + tokens)
        wanted = torch.tensor([[tokens - 1]], device=self._model.device) if last_only else None
        output = self._model.forward(
            self._text[:, here], self._places[:, here], self._cache.view([0]), logits_at=wanted
        )
        chosen: list[int] = argmax(output.logits[0]).tolist()
        return chosen


class _Reader:
    """Reads a buffer of `num_bytes` once, on every core and in huge pages, as weights are read: the sum of its floats.

    Sums of whole blocks are as fast as this machine reads; what is summed has no part in it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with huge_pages(num_bytes):
            self._buffer = torch.ones(num_bytes // 4, device=device)

    def read(self) -> float:
        """Seconds."""
        return timed(self._buffer.device, self._buffer.sum)[1]


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Prefill, plain decode step and verify step of each side at each context length, and ours against the floor."""
    names = {STEP: "step_seconds", VERIFY: "verify_step_seconds"}
    kinds = raw["tokens"].where(raw["tokens"] != raw["context"]).map(names).fillna("prefill_seconds")
    rows = [
        spread("read_seconds" if system == MEMORY else kind, found["seconds"], system=system, x=context)
        for (kind, system, context), found in groups(raw.assign(kind=kinds), "kind", "system", "context")
    ]
    for (context,), found in groups(raw.assign(kind=kinds), "context"):
        seconds = found.pivot(index="round", columns=["kind", "system"], values="seconds")
        prefill, step = (seconds[kind].dropna(how="all") for kind in ("prefill_seconds", "step_seconds"))
        rows.append(spread("prefill_ratio", prefill[OURS] / prefill[THEIRS], system=f"{OURS} ÷ {THEIRS}", x=context))
        rows.append(spread("step_over_reading", step[OURS] / step[MEMORY], system=OURS, x=context))
    return rows
