"""v(γ): what a forward of the target costs by the number of tokens it verifies."""

from __future__ import annotations

import pandas as pd
import torch

from experiments.bench.plan import Plan
from experiments.bench.rounds import rotated, rounds, timed
from experiments.bench.subject import Subject
from experiments.bench.systems import OURS
from experiments.bench.tables import Row, spread

POSITION = 160
"""Tokens in the cache before the forward."""
COUNTS = tuple(range(1, 18))
"""γ + 1 for γ from 0 to 16."""
_WARM_UP_ROUNDS = 3


@torch.inference_mode()
def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Columns: system, tokens, round, seconds."""
    model = subject.target.model
    start = min(POSITION, model.max_positions - max(COUNTS))
    cache = model.new_cache(1, start + max(COUNTS))
    text = torch.arange(start + max(COUNTS), device=model.device)[None] % model.vocab_size
    places = torch.arange(start + max(COUNTS), device=model.device)[None]
    model.forward(text[:, :start], places[:, :start], cache.view([0]))

    def forward(count: int) -> float:
        cache.rollback([0], [start])
        here = slice(start, start + count)
        return timed(model.device, lambda: model.forward(text[:, here], places[:, here], cache.view([0])))[1]

    for count in COUNTS * _WARM_UP_ROUNDS:
        forward(count)
    records = []
    for number in rounds(plan.forwards, f"{subject.dtype} forwards"):
        for count in rotated(COUNTS, number):
            records.append({"system": OURS, "tokens": count, "round": number, "seconds": forward(count)})
    return pd.DataFrame(records)


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Seconds of each forward, and its ratio to the forward of one token in the same round."""
    seconds = raw.pivot(index="round", columns="tokens", values="seconds")
    counts = [int(count) for count in seconds.columns]
    rows = [spread("forward_seconds", seconds[count], system=OURS, x=count) for count in counts]
    return rows + [
        spread("relative_cost", seconds[count] / seconds[1], system=OURS, x=count) for count in counts if count > 1
    ]
