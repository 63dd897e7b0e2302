"""Sweeps that never happened: fixed lengths and a controller on a machine of known costs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from specdec.measurement import traces
from specdec.measurement.metrics import summarise
from specdec.types import FinishReason, StepRecord, TokenKind, TokenRecord, Trace
from tests.fake_traces import PLAIN, fake_arm, fake_metadata

PLAIN_SECONDS, EACH_SECONDS, WIDER = 0.016, 0.0008, 0.03  # a plain step, a draft token, and what each adds to a forward
WORKLOADS = {"json": ("low", 0.5, 0.9), "qa": ("mixed", 1.5, 0.5), "creative": ("high", 2.5, 0.1)}


def decode(request_id: str, gamma: int, alpha: float, offered: float, tokens: int, rng: np.random.Generator) -> Trace:
    """One request: a draft in a share `offered` of steps, independent acceptance, costs without noise."""
    steps, records, clock = [], [], 0.0
    while sum(step.num_emitted for step in steps) < tokens:
        number = len(steps)
        drafted = gamma if number and rng.random() < offered else 0
        accepted = int(np.argmin([*(rng.random(drafted) < alpha), False]))
        examined = min(accepted + 1, drafted)
        drafting, forward = drafted * EACH_SECONDS, PLAIN_SECONDS * (1 + WIDER * drafted)
        clock += drafting + forward
        counts = (drafted, examined, accepted, accepted + 1, False)
        steps.append(StepRecord(request_id, number, 1, 10 + number, *counts, drafting, forward, 0.0, 0.0, 0.0, clock))
        last = TokenKind.RECOVERED if examined > accepted else TokenKind.BONUS
        kinds = [TokenKind.ACCEPTED] * accepted + [TokenKind.REJECTED] * (examined - accepted)
        for place, kind in [*enumerate(kinds, 1), (accepted + 1, last) if number else (0, TokenKind.PREFILL)]:
            emitted, prob = kind is not TokenKind.REJECTED, 0.5 if kind in kinds else None
            records.append(TokenRecord(request_id, number, place, 7, kind, emitted, 0.5, prob, 2.5, 1.0, prob))
    ids = tuple(record.token_id for record in records if record.emitted)
    return Trace(request_id, 10, ids, "", FinishReason.LENGTH, tuple(steps), tuple(records))


def sweep(lengths: tuple[int, ...], temperatures: tuple[float, ...] = (0.0,), offered: float = 0.6) -> pd.DataFrame:
    """A summary: per workload and temperature the plain arm, every length, and a controller that drafts one token."""
    rng, parts = np.random.default_rng(0), []
    arms = {"plain": PLAIN, **{f"g{gamma}": fake_arm(gamma) for gamma in lengths}}
    arms["cost_aware"] = fake_arm(16, controller="cost_aware")
    for temperature in temperatures:
        for workload, (tier, entropy, alpha) in WORKLOADS.items():
            frames = traces.concat(
                traces.to_frames(
                    [
                        decode(
                            f"p{i}", 1 if name == "cost_aware" else arm.num_draft_tokens or 0, alpha, offered, 150, rng
                        )
                        for i in range(3)
                    ],
                    name,
                )
                for name, arm in arms.items()
            )
            frames.tokens["model_entropy_bits"] = entropy
            run = f"{workload}-{temperature:g}"
            metadata = fake_metadata(arms, workload=workload, tier=tier, temperature=temperature, run_id=run)
            parts.append(summarise(frames.steps, frames.tokens, frames.requests, metadata))
    return pd.concat(parts, ignore_index=True)
