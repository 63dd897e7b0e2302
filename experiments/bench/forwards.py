"""v(γ): what a forward of the target costs by the number of tokens it verifies, after a short and after a long context.

And what the weights' dtype makes of a forward of one token, models of every dtype side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from experiments.bench.plan import Plan
from experiments.bench.rounds import Limit, rotated, rounds, timed
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS
from experiments.bench.tables import Row, groups, spread
from specdec.errors import UsageError
from specdec.models.base import LanguageModel

POSITION = 160
"""Tokens in the cache before the forward."""
COUNTS = tuple(range(1, 18))
"""γ + 1 for γ from 0 to 16."""
LONG_COUNTS = (1, 2, 4, 6, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 48, 64, 65, 96)
"""Tokens after a long context: on both sides of every multiple of rows that a kernel may take together."""
REFERENCE = "float32"
_WARM_UP_ROUNDS = 3
_FILL = 512  # tokens of the context written per forward


class Behind:
    """A model with `start` tokens in its cache, to which every forward returns; room for `most` tokens more."""

    @torch.inference_mode()
    def __init__(self, model: LanguageModel, start: int, most: int) -> None:
        self._model = model
        self.start = min(start, model.max_positions - most)
        self._cache = model.new_cache(1, self.start + most)
        self._text = torch.arange(self.start + most, device=model.device)[None] % model.vocab_size
        self._places = torch.arange(self.start + most, device=model.device)[None]
        for begin in range(0, self.start, _FILL):
            self._run(begin, min(begin + _FILL, self.start))

    @torch.inference_mode()
    def forward(self, count: int) -> float:
        """Seconds of a forward over `count` tokens."""
        self._cache.rollback([0], [self.start])
        return timed(self._model.device, lambda: self._run(self.start, self.start + count))[1]

    def _run(self, begin: int, end: int) -> None:
        here = slice(begin, end)
        self._model.forward(self._text[:, here], self._places[:, here], self._cache.view([0]))


def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """After a short context. Columns: system, tokens, round, seconds."""
    return _measure(subject, plan.forwards, POSITION, COUNTS, _WARM_UP_ROUNDS)


def measure_long(subject: Subject, plan: Plan) -> pd.DataFrame:
    """After a long one. Columns: those of `measure`."""
    return _measure(subject, plan.long_forwards, plan.long_context, LONG_COUNTS, warm_up_rounds=1)


def _measure(subject: Subject, limit: Limit, start: int, counts: Sequence[int], warm_up_rounds: int) -> pd.DataFrame:
    model = subject.target.model
    counts = [count for count in counts if count < model.max_positions // 2] or [1]
    behind = Behind(model, start, max(counts))
    for count in [*counts] * warm_up_rounds:
        behind.forward(count)
    records = []
    for number in rounds(limit, f"{subject.dtype} forwards behind {behind.start} tokens"):
        for count in rotated(counts, number):
            records.append({"system": OURS, "tokens": count, "round": number, "seconds": behind.forward(count)})
    return pd.DataFrame(records)


def measure_dtypes(subject: Subject, plan: Plan) -> pd.DataFrame:
    """One token, every dtype of the run in every round. Columns: system, dtype, round, seconds."""
    dtypes = subject.setting.dtypes
    if REFERENCE not in dtypes or len(dtypes) == 1:
        raise UsageError(f"the part dtypes compares {REFERENCE} with others, not {dtypes}; name both in --dtypes")
    sides = {dtype: Behind(subject.of(dtype).target.model, POSITION, 1) for dtype in dtypes}
    for dtype in dtypes * _WARM_UP_ROUNDS:
        sides[dtype].forward(1)
    records = []
    for number in rounds(plan.dtypes, "dtypes"):
        for dtype in rotated(dtypes, number):
            records.append({"system": OURS, "dtype": dtype, "round": number, "seconds": sides[dtype].forward(1)})
    return pd.DataFrame(records)


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Seconds of each forward, and its ratio to the forward of one token in the same round."""
    return _summarise(raw, "forward_seconds", "relative_cost")


def summarise_long(raw: pd.DataFrame) -> list[Row]:
    """The same after a long context."""
    return _summarise(raw, "long_forward_seconds", "long_relative_cost")


def _summarise(raw: pd.DataFrame, seconds_name: str, ratio_name: str) -> list[Row]:
    seconds = raw.pivot(index="round", columns="tokens", values="seconds")
    counts = [int(count) for count in seconds.columns]
    rows = [spread(seconds_name, seconds[count], system=OURS, x=count) for count in counts]
    return rows + [spread(ratio_name, seconds[count] / seconds[1], system=OURS, x=count) for count in counts[1:]]


def summarise_dtypes(raw: pd.DataFrame) -> list[Row]:
    """Each dtype's forward ÷ the reference's of the same round."""
    reference = raw[raw["dtype"] == REFERENCE].set_index("round")["seconds"]
    return [
        {**spread("dtype_cost", rows.set_index("round")["seconds"] / reference, system=OURS), "dtype": dtype}
        for (dtype,), rows in groups(raw, "dtype")
        if dtype != REFERENCE
    ]
