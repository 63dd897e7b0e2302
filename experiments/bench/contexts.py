"""How a step grows with the context: prefill, a plain decode step and a verify step, up to the model's window."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch

from experiments.bench.plan import LOOKUP_TOKENS, Plan
from experiments.bench.rounds import rotated, rounds, timed
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS, THEIRS
from experiments.bench.tables import Row, groups, spread
from specdec.cache.base import Cache
from specdec.models.base import LanguageModel
from specdec.models.hf import HFModel
from specdec.sampling.distributions import argmax

STEP, VERIFY = 1, LOOKUP_TOKENS + 1
"""Tokens of a plain decode step, and of one that verifies a draft."""


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
    work = [(system, tokens) for tokens in (STEP, VERIFY) for system in cells]
    for number in rounds(plan.steps, f"{label}, steps"):
        for system, tokens in rotated(work, number):
            note(system, tokens, number, cells[system].step(tokens))
    return records


class _Cell:
    """One model with one context, filled by `prefill` and rolled back to before every step."""

    def __init__(self, model: LanguageModel, length: int) -> None:
        self._model, self._length = model, length
        self._cache: Cache = model.new_cache(1, length + VERIFY)
        self._text = torch.arange(length + VERIFY, device=model.device)[None] % model.vocab_size
        self._places = torch.arange(length + VERIFY, device=model.device)[None]

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


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Prefill, plain decode step and verify step of each side at each context length."""
    names = {STEP: "step_seconds", VERIFY: "verify_step_seconds"}
    kinds = raw["tokens"].where(raw["tokens"] != raw["context"]).map(names).fillna("prefill_seconds")
    return [
        spread(kind, rows["seconds"], system=system, x=context)
        for (kind, system, context), rows in groups(raw.assign(kind=kinds), "kind", "system", "context")
    ]
