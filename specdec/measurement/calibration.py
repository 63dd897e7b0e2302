"""Times this machine for the cost model: what a decode step costs by draft length, and what a draft token costs.

Steps of the real engine are timed, on random tokens, lengths taking turns, so that what is measured here is what a step
records later. A target's part is kept in the user's cache; a drafter's, which takes a second, is measured every time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from specdec.controllers.base import Controller, Observation
from specdec.costmodel import StepCosts
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.kernels import build
from specdec.machine.folders import cache_root
from specdec.machine.processor import cpu_model
from specdec.measurement.results import sha256, write_text
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Request, SamplingParams, StepRecord

VERIFIED_LENGTHS = (0, 32, 1, 16, 2, 12, 3, 8, 4, 6)
DRAFTED_LENGTHS = (0, 1, 4)
_FORMAT = 1  # raise when what is measured changes: older files are then left alone
_PROMPT_TOKENS = 48
_MOST_ROUNDS = 25


class RandomDrafter(Drafter):
    """Drafts random tokens, exactly as many as it may, `nodes(depth)` of them: what the worst draft costs."""

    def __init__(self, nodes: Callable[[int], int] = lambda depth: depth) -> None:
        self._nodes = nodes
        self._tokens = np.random.default_rng(0)

    def max_nodes(self, depth: int) -> int:
        """See `Drafter.max_nodes`."""
        return self._nodes(depth)

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Chains of random token ids."""
        sizes = [self._nodes(limit) if limit else 0 for limit in max_tokens]
        chains = [self._tokens.integers(context.vocab_size, size=size).tolist() for size in sizes]
        return Draft.from_chains(chains, context.device)


class _Ladder(Controller):
    """The given lengths in turn, over and over. State: decode steps done."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.max_draft_tokens = max(lengths)

    def init(self) -> int:
        return 0

    def decide(self, states: Sequence[int], observation: Observation) -> list[int]:
        return [self.lengths[state % len(self.lengths)] for state in states]

    def update(self, state: int, step: StepRecord) -> int:
        return state + (step.step > 0)


def step_costs(engine: Engine, seconds: float = 4.0, root: Path | None = None) -> StepCosts:
    """Step costs of the engine's target, rule and drafter on this machine, measured in about `seconds`.

    root: where measurements of targets are kept, the user's cache unless given. The engine must be idle: its drafter
    forgets whatever it held.
    """
    folder = (root or cache_root()) / "step_costs"
    target = _kept(folder, _identity(engine), lambda: _verifying(engine, 0.7 * seconds))
    fixed, each = _drafting(engine, 0.3 * seconds)
    return StepCosts(target.num_tokens, target.step_seconds, fixed, each)


def _kept(folder: Path, identity: str, measure: Callable[[], StepCosts]) -> StepCosts:
    """What was measured before, else what is measured now, kept where the folder can be written."""
    path = folder / f"{sha256(identity)[:16]}.json"
    try:
        return StepCosts.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: measured again
        costs = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, costs.to_json())
    except OSError:  # a cache that can't be written costs the next start a few seconds
        return costs
    return costs


def _identity(engine: Engine) -> str:
    """Everything that a target's step costs depend on."""
    target = engine.target
    cuda = target.device.type == "cuda"
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "model": target.fingerprint or target.name,
        "size": [target.vocab_size, target.num_layers, target.hidden_size, target.num_bytes],
        "dtype": [str(target.dtype), str(target.compute_dtype)],
        "hardware": torch.cuda.get_device_name(target.device) if cuda else cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": None if cuda else build().name,
        "rule": type(engine.verifier).__qualname__,
        "nodes": [engine.drafter.max_nodes(length) for length in VERIFIED_LENGTHS if length],
    }
    return json.dumps(facts, sort_keys=True)


def _verifying(engine: Engine, seconds: float) -> StepCosts:
    """What steps cost by draft length, drafting left out."""
    lengths = [length for length in VERIFIED_LENGTHS if length <= engine.target.max_positions // 4]
    steps = _timed(engine, RandomDrafter(engine.drafter.max_nodes), lengths, seconds)
    costs = {
        length + 1: median(step.seconds - step.draft_seconds for step in found)
        for length, found in sorted(steps.items())
        if found
    }
    return StepCosts(tuple(costs), tuple(costs.values()))


def _drafting(engine: Engine, seconds: float) -> tuple[float, float]:
    """Seconds of asking the drafter at all, and per token; what a step without a draft spends there is not its."""
    steps = _timed(engine, engine.drafter, DRAFTED_LENGTHS, seconds)
    none, one, four = (median(step.draft_seconds for step in steps[length]) for length in DRAFTED_LENGTHS)
    each = max(four - one, 0.0) / (DRAFTED_LENGTHS[2] - DRAFTED_LENGTHS[1])
    return max(one - none - each, 0.0), each


def _timed(engine: Engine, drafter: Drafter, lengths: Sequence[int], seconds: float) -> dict[int, list[StepRecord]]:
    """Steps by the length they were allowed. A short request warms up, and tells how long a longer one may be."""
    trial = engine.with_parts(drafter, _Ladder(lengths))
    short = 2 * len(lengths) + max(lengths)
    start = time.perf_counter()
    steps = _decode(trial, lengths, short)
    spent = time.perf_counter() - start
    longer = min(int(short * (seconds - spent) / spent), _MOST_ROUNDS * len(lengths))
    return _decode(trial, lengths, longer) if longer >= short else steps


def _decode(engine: Engine, lengths: Sequence[int], num_tokens: int) -> dict[int, list[StepRecord]]:
    """The steps of one request of random tokens, while none of the lengths is cut short by its end."""
    window, size = engine.target.max_positions, engine.target.vocab_size
    prompt = np.random.default_rng(1).integers(size, size=min(_PROMPT_TOKENS, window // 4)).tolist()
    greedy = engine.drafter.greedy_only or engine.verifier.greedy_only
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
    request = Request("calibration", tuple(prompt), sampling, num_tokens + 1)
    engine.drafter.reveal(request.id, prompt)
    trace = engine.generate([request])[0]
    found: dict[int, list[StepRecord]] = {length: [] for length in lengths}
    emitted = 1
    for step in trace.steps[1:]:
        length = lengths[(step.step - 1) % len(lengths)]
        if emitted + length < len(trace.token_ids):
            found[length].append(step)
        emitted += step.num_emitted
    return found
