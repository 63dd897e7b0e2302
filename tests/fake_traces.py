"""Traces of decoding that never happened: token-wise acceptance at a set rate, on a machine of set speed."""

from __future__ import annotations

import numpy as np

from specdec.measurement.results import ArmMetadata, Hardware, Provenance, RunMetadata
from specdec.types import FinishReason, StepRecord, TokenKind, TokenRecord, Trace

PROVENANCE = Provenance(
    command="python -m experiments.sweep",
    git_sha="0123456789abcdef",
    git_dirty=False,
    packages={"torch": "2.13.0"},
    python="3.12.0",
    hardware=Hardware("Imaginary CPU", 2, 2, 8 * 2**30, None),
    seeds=[0],
    prompts_sha256="00" * 32,
    date="2030-01-02T03:04:05+00:00",
)


def fake_step(request_id: str, step: int, drafted: int, accepted: int, examined: int, end: float, took: float):
    """A step without a cut, `took` seconds long, a tenth of it drafting per drafted token."""
    parts = {"forward_seconds": took * 0.9, "verify_seconds": took * 0.06, "rollback_seconds": 0.0}
    return StepRecord(
        request_id, step, 1, 10 + step, drafted, examined, accepted, accepted + 1, False,
        draft_seconds=took * 0.03, other_seconds=took * 0.01, end_seconds=end, **parts,
    )  # fmt: skip


def fake_token(request_id: str, step: int, position: int, token: int, kind: TokenKind, entropy: float):
    drafted = kind in (TokenKind.ACCEPTED, TokenKind.REJECTED)
    return TokenRecord(
        request_id, step, position, token, kind, kind is not TokenKind.REJECTED, 0.5, 0.5 if drafted else None,
        entropy, entropy / 2, 0.5 if drafted else None,
    )  # fmt: skip


def fake_trace(request_id: str, gamma: int, alpha: float, entropy: float, tokens: int, rng, step_seconds=0.035):
    """One request of at least `tokens` tokens; draft length gamma, i.i.d. acceptance alpha."""
    steps, records, clock = [], [], 0.0
    while sum(step.num_emitted for step in steps) < tokens:
        number, took = len(steps), step_seconds * (1 + 0.05 * gamma) * float(rng.lognormal(0, 0.05))
        clock += took
        drafted = gamma if number else 0
        accepted = int(np.argmin([*(rng.random(drafted) < alpha), False]))
        examined = min(accepted + 1, drafted)
        steps.append(fake_step(request_id, number, drafted, accepted, examined, clock, took))
        last = TokenKind.RECOVERED if examined > accepted else TokenKind.BONUS
        kinds = [TokenKind.ACCEPTED] * accepted + [TokenKind.REJECTED] * (examined - accepted)
        spots = [*enumerate(kinds, 1), (accepted + 1, last) if number else (0, TokenKind.PREFILL)]
        for position, kind in spots:
            bits = float(rng.gamma(2, entropy / 2))
            records.append(fake_token(request_id, number, position, int(rng.integers(1000)), kind, bits))
    ids = tuple(record.token_id for record in records if record.emitted)
    return Trace(request_id, 10, ids, "text", FinishReason.LENGTH, tuple(steps), tuple(records), 2**29)


def fake_metadata(arms: dict[str, ArmMetadata], **changes) -> RunMetadata:
    fields = {
        "run_id": "abc123abc123", "experiment": "demo", "workload": "json", "tier": "low", "temperature": 0.0,
        "model": "Imaginary-1B", "dtype": "float32", "provenance": PROVENANCE,
    }  # fmt: skip
    return RunMetadata(**{**fields, **changes}, arms=arms)


def fake_arm(gamma: int = 4, **changes) -> ArmMetadata:
    fields = {"drafter": "prompt_lookup", "verifier": "greedy", "controller": "fixed", "num_draft_tokens": gamma}
    return ArmMetadata(**{**fields, **changes})


PLAIN = ArmMetadata("none", "greedy", "fixed", 0, lossless="equal")
