"""Decoding on a machine of known costs with a drafter of known acceptance: no model, no clock.

Whether a draft token at a position is right depends on seed, request and position alone, as it does where text is
greedy or coupled: policies are compared on the same text.
"""

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
    seconds, emitted, tpot, lengths = 0.0, 0, [], []
    for request in range(num_requests + 1):
        total = num_tokens if request else 16
        took, chosen = _request(controller, drafting, request, total, noise, seed)
        if request:
            seconds, emitted = seconds + took, emitted + total - 1
            tpot.append(took / (total - 1))
            lengths += chosen
    return Outcome(emitted / seconds, tuple(tpot), tuple(lengths))


def _request(
    controller: Controller, drafting: Drafting, request: int, total: int, noise: float, seed: int
) -> tuple[float, Sequence[int]]:
    text, interruptions = np.random.default_rng((seed, request, 0)), np.random.default_rng((seed, request, 1))
    right = [draw < drafting.alpha(request, position) for position, draw in enumerate(text.random(total))]
    answers = text.random(total) < drafting.offered
    machine, state, emitted, number, seconds, lengths = costs(drafting.c), controller.init(), 1, 0, 0.0, []
    while emitted < total:
        left = total - emitted
        wanted = min(controller.decide([state], Observation((40 + emitted,), (left,), 1))[0], left - 1)
        drafted = wanted if answers[emitted] else 0
        accepted = 0
        while accepted < drafted and right[emitted + accepted]:
            accepted += 1
        slower = 1 + noise * abs(interruptions.standard_normal(2))
        draft_seconds, rest = slower * (machine.drafting(drafted), machine.verifying(drafted + 1))
        number += 1
        step = StepRecord(
            f"{request}", number, 1, 40 + emitted, drafted, min(accepted + 1, drafted), accepted, accepted + 1, False,
            draft_seconds, rest, 0.0, 0.0, 0.0, seconds + draft_seconds + rest,
        )  # fmt: skip
        state = controller.update(state, step)
        seconds, emitted = step.end_seconds, emitted + accepted + 1
        lengths.append(wanted)
    return seconds, lengths
