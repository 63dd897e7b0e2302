"""Decoding on a machine of known costs with a drafter of known acceptance: no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.controllers.base import Controller, Observation
from specdec.costmodel import StepCosts
from specdec.types import StepRecord

PLAIN_SECONDS = 0.0144
NUM_TOKENS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 17)
SLOWER = (1.0, 1.1, 1.15, 1.17, 1.22, 1.23, 1.38, 1.46, 1.53, 1.85)  # SmolLM2-135M on two cores


def costs(c: float) -> StepCosts:
    """A draft token costs c plain steps."""
    return StepCosts(NUM_TOKENS, tuple(PLAIN_SECONDS * v for v in SLOWER), draft_each_seconds=c * PLAIN_SECONDS)


@dataclass(frozen=True)
class Drafting:
    """alpha: chance that a draft token is accepted, given (request, tokens emitted); offered: share of steps in which
    the drafter has something to say. c: seconds of a draft token in plain steps."""

    alpha: Callable[[int, int], float]
    c: float
    offered: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """tokens_per_second over all requests; tpot: each request's seconds per token."""

    tokens_per_second: float
    tpot: tuple[float, ...]
    lengths: tuple[int, ...]


def decode(
    controller: Controller,
    drafting: Drafting,
    *,
    num_requests: int = 24,
    num_tokens: int = 128,
    noise: float = 0.08,
    seed: int = 0,
) -> Outcome:
    """Requests one after the other, the first one short and uncounted, as a warm-up is."""
    rng, machine = np.random.default_rng(seed), costs(drafting.c)
    seconds, emitted, tpot, lengths = 0.0, 0, [], []
    for request in range(num_requests + 1):
        total = num_tokens if request else 16
        took, chosen = _request(controller, drafting, machine, request, total, noise, rng)
        if request:
            seconds, emitted = seconds + took, emitted + total - 1
            tpot.append(took / (total - 1))
            lengths += chosen
    return Outcome(emitted / seconds, tuple(tpot), tuple(lengths))


def _request(
    controller: Controller,
    drafting: Drafting,
    machine: StepCosts,
    request: int,
    total: int,
    noise: float,
    rng: np.random.Generator,
) -> tuple[float, Sequence[int]]:
    state, emitted, number, seconds, lengths = controller.init(), 1, 0, 0.0, []
    while emitted < total:
        left = total - emitted
        wanted = min(controller.decide([state], Observation((40 + emitted,), (left,), 1))[0], left - 1)
        drafted = wanted if rng.random() < drafting.offered else 0
        accepted = 0
        while accepted < drafted and rng.random() < drafting.alpha(request, emitted):
            accepted += 1
        took = machine.seconds(drafted) * (1 + noise * abs(rng.standard_normal()))
        number += 1
        step = StepRecord(
            f"{request}", number, 1, 40 + emitted, drafted, min(accepted + 1, drafted), accepted, accepted + 1, False,
            0.0, took, 0.0, 0.0, 0.0, seconds + took,
        )  # fmt: skip
        state = controller.update(state, step)
        seconds, emitted = seconds + took, emitted + accepted + 1
        lengths.append(wanted)
    return seconds, lengths
