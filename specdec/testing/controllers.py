"""`check_controller`: the contract of `specdec.controllers.base.Controller`, rule by rule."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.controllers.base import Controller, Observation
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.testing.cases import Bench, as_factory
from specdec.testing.exact import emission, total_variation
from specdec.testing.languages import Tokens, constant, joint
from specdec.testing.report import Inapplicable, Report, require, run_checks
from specdec.testing.tiny import tiny_target
from specdec.testing.verifiers import EXACT
from specdec.types import StepRecord, Trace
from specdec.verifiers.rejection import RejectionVerifier

_LONGEST_ENUMERATED = 3  # draft tokens: chains of two tokens up to this length are enumerated
_HISTORY = 11  # steps; a prime, so that nothing periodic comes round


@dataclass
class ControllerCase:
    """A controller under check, and two drafters to steer: one that samples, and one that copies."""

    make: Callable[[], Controller]
    bench: Bench = field(default_factory=Bench)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """New ones."""
        return DraftModelDrafter(tiny_target(noise=0.3)), PromptLookupDrafter()


def check_controller(
    controller: Controller | Callable[[], Controller],
    *,
    num_samples: int = 2000,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Put a speculation-length policy through every rule of its contract; seconds.

    controller: what makes a fresh one (a class or a function), or an instance, which is copied for every check.
    num_samples: sampled requests of the one statistical check; it fails a policy without fault with probability
    `FALSE_ALARM`. only, skip: names of checks.

    Raises `ConformanceError`, an `AssertionError`, at the first rule that is broken.
    """
    make = as_factory(controller, Controller)
    case = ControllerCase(make, Bench(num_samples=num_samples))
    return run_checks(type(make()).__name__, CONTROLLER_CHECKS, case, only, skip)


def check_declarations(case: ControllerCase) -> None:
    """max_draft_tokens is a number of tokens, request_local True or False."""
    controller = case.make()
    longest = controller.max_draft_tokens
    require(isinstance(longest, int) and longest >= 0, f"max_draft_tokens is {longest!r}, not a number of tokens")
    local = controller.request_local
    require(isinstance(local, bool), f"request_local is {local!r}, not True or False")


def check_limits(case: ControllerCase) -> str:
    """Every decision is one whole number per request, from 0 to max_draft_tokens, whatever happened before."""
    controller, seen = case.make(), set()
    for batch in (1, 3):
        states = [controller.init() for _ in range(batch)]
        for step in range(_HISTORY):
            decided = _decide(controller, states, step)
            seen |= set(decided)
            states = [
                controller.update(state, _step(step, row, count))
                for row, (state, count) in enumerate(zip(states, decided, strict=True))
            ]
    return f"decided {', '.join(map(str, sorted(seen)))}"


def _decide(controller: Controller, states: Sequence[Any], step: int) -> list[int]:
    lengths = tuple(20 + 3 * step + 7 * row for row in range(len(states)))
    remaining = tuple(max(1, 40 - 4 * step - row) for row in range(len(states)))
    decided = controller.decide(states, Observation(lengths, remaining, len(states)))
    right = len(decided) == len(states)
    require(right, f"decide returned {len(decided)} numbers for {len(states)} requests")
    for row, count in enumerate(decided):
        whole = isinstance(count, int) and not isinstance(count, bool)
        allowed = whole and 0 <= count <= controller.max_draft_tokens
        require(allowed, f"it decided {count!r} for row {row}, not 0 to {controller.max_draft_tokens} tokens")
    return list(decided)


def _step(step: int, row: int, drafted: int, batch_size: int = 1) -> StepRecord:
    """A made-up step of request `row`: now everything was accepted, now nothing."""
    accepted = [drafted, 0, drafted // 2][(step + row) % 3]
    return StepRecord(
        request_id=f"r{row}",
        step=step,
        batch_size=batch_size,
        context_length=20 + 3 * step,
        num_drafted=drafted,
        num_examined=min(accepted + 1, drafted),
        num_accepted=accepted,
        num_emitted=accepted + 1,
        cut=False,
        draft_seconds=0.002 * drafted,
        forward_seconds=0.02 + 0.001 * drafted,
        verify_seconds=0.001,
        rollback_seconds=0.0005,
        other_seconds=0.0005,
        end_seconds=0.03 * (step + 1),
    )


def check_states_are_independent(case: ControllerCase) -> None:
    """What one request lives through changes nothing for another: each has a state of its own."""
    if not case.make().request_local:
        raise Inapplicable("it declares request_local = False")
    controller, other = case.make(), case.make()
    state, lone = controller.init(), other.init()
    busy = controller.init()
    for step in range(_HISTORY):
        wanted, found = _decide(other, [lone], step), _decide(controller, [state], step)
        require(
            wanted == found, f"at step {step} it decided {found[0]} beside another request, {wanted[0]} without one"
        )
        busy = controller.update(busy, _step(step, 2, _decide(controller, [busy], step)[0]))
        state, lone = (
            own.update(held, _step(step, 0, wanted[0])) for own, held in ((controller, state), (other, lone))
        )


def check_state_is_explicit(case: ControllerCase) -> None:
    """A request can go on from a copy of its state: nothing about it is kept anywhere else."""
    if not case.make().request_local:
        raise Inapplicable("it declares request_local = False")
    one, two = case.make(), case.make()
    state = one.init()
    for step in range(_HISTORY):
        state = one.update(state, _step(step, 0, _decide(one, [state], step)[0]))
    moved = copy.deepcopy(state)
    for step in range(_HISTORY, 2 * _HISTORY):
        wanted, found = _decide(one, [state], step), _decide(two, [moved], step)
        require(wanted == found, f"it decided {wanted[0]}, and {found[0]} from a copy of the same state")
        state, moved = (own.update(s, _step(step, 0, wanted[0])) for own, s in ((one, state), (two, moved)))


def check_stop(case: ControllerCase) -> str:
    """`stop` answers True or False for every row by itself, and leaves its arguments alone."""
    generator = torch.Generator().manual_seed(0)
    answers: list[bool] = []
    for depth in (1, 2, 5):
        probs = (torch.rand(4, 6, generator=generator) * torch.tensor([[1.0], [4.0], [16.0], [64.0]])).softmax(-1)
        tokens = torch.where(torch.arange(4) % 2 == 0, 0, probs.argmax(-1))  # from anything to nearly certain
        together = _ask(case.make(), probs, tokens, depth)
        alone = torch.cat([_ask(case.make(), probs[[row]], tokens[[row]], depth) for row in range(4)])
        same = torch.equal(together, alone)
        require(same, f"at depth {depth} it answered {together.tolist()} for four rows, {alone.tolist()} one by one")
        answers += together.tolist()
    return f"stopped {sum(answers)} of {len(answers)}"


def _ask(controller: Controller, probs: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
    states = [controller.init() for _ in range(len(tokens))]
    _decide(controller, states, 0)
    before = (probs.clone(), tokens.clone())
    answer = controller.stop(states, probs, tokens, depth)
    left = torch.equal(probs, before[0]) and torch.equal(tokens, before[1])
    require(left, "`stop` wrote to draft_probs or tokens: a token it has seen cannot be taken back")
    form = answer.dtype == torch.bool and list(answer.shape) == [len(tokens)]
    require(form, f"`stop` answered {answer.dtype} {list(answer.shape)}, not bool [{len(tokens)}]")
    return answer


def check_non_anticipation(case: ControllerCase) -> str:
    """Whether a token is submitted never depends on that token: P = (.7, .3) stays so, exactly, with Q = (.5, .5)."""
    longest = min(case.make().max_draft_tokens, _LONGEST_ENUMERATED)
    if longest == 0:
        raise Inapplicable("it never drafts")
    submitted: Counter[int] = Counter()
    for target, draft in (((0.7, 0.3), (0.5, 0.5)), ((0.6, 0.4), (0.95, 0.05))):

        def submit(chain: Tokens, draft: tuple[float, float] = draft) -> int:
            count = _submitted(case.make(), chain, draft)
            submitted[count] += 1
            return count

        language = constant(*target)
        found = emission(RejectionVerifier(), language, constant(*draft), longest, submit=submit)
        error = total_variation(found.joint, joint(language, found.joint.ndim))
        first = found.joint.reshape(2, -1).sum(1).round(3).tolist()
        require(error <= EXACT, f"with target {target} and draft {draft} the first token has {first}")
    return f"submitted {', '.join(f'{count}: {times}' for count, times in sorted(submitted.items()))}"


def _submitted(controller: Controller, chain: Tokens, draft: tuple[float, float]) -> int:
    """How much of a drafted chain reaches the verifier, as the engine and a drafter would have it."""
    states = [controller.init()]
    (count,) = controller.decide(states, Observation((10,), (20,), 1))
    drawn = min(count, len(chain))
    for depth in range(1, drawn + 1):
        tokens = torch.tensor([chain[depth - 1]])
        stopped = controller.stop(states, torch.tensor([draft]), tokens, depth)
        withdrawn = int(tokens[0]) != chain[depth - 1]
        if withdrawn:
            return depth - 1
        if bool(stopped[0]):
            return depth
    return drawn


def check_batch_invariance(case: ControllerCase) -> None:
    """A request is drafted for at the same lengths alone, in a batch, and in another order."""
    if not case.make().request_local:
        raise Inapplicable("it declares request_local = False")
    for temperature in (0.0, 1.0):
        requests = case.bench.requests(temperature)
        for drafter in case.drafters:
            together = case.bench.decode(drafter, requests, case.make())
            turned = case.bench.decode(drafter, requests[::-1], case.make())[::-1]
            alone = case.bench.decode(drafter, requests, case.make(), together=False)
            for wanted, found in zip([*alone, *alone], [*together, *turned], strict=True):
                ours, theirs = _drafted(wanted), _drafted(found)
                require(ours == theirs, f"{wanted.request_id} was drafted {theirs} tokens in a batch, alone {ours}")


def _drafted(trace: Trace) -> list[int]:
    return [step.num_drafted for step in trace.steps]


def check_greedy_losslessness(case: ControllerCase) -> str:
    """At temperature 0 output is plain decoding's token for token."""
    requests, drafted = case.bench.requests(), []
    for drafter in case.drafters:
        for together in (True, False):
            traces = case.bench.decode(drafter, requests, case.make(), together=together)
            case.bench.require_plain_output(requests, traces, type(drafter).__name__)
            drafted += [step.num_drafted for trace in traces for step in trace.steps[1:]]
    return f"{np.mean(drafted):.2f} draft tokens a step"


def check_sampled_losslessness(case: ControllerCase) -> str:
    """At temperature 1 one, two and three tokens have the target's exact joint (chi-square, false alarm 1e-4)."""
    drafter, controller = case.drafters[0], case.make()
    traces = [
        trace for batch in case.bench.sampled_requests() for trace in case.bench.decode(drafter, batch, controller)
    ]
    return f"p = {case.bench.require_target_joint(traces):.2g}"


CONTROLLER_CHECKS: tuple[Callable[[ControllerCase], str | None], ...] = (
    check_declarations,
    check_limits,
    check_states_are_independent,
    check_state_is_explicit,
    check_stop,
    check_non_anticipation,
    check_batch_invariance,
    check_greedy_losslessness,
    check_sampled_losslessness,
)
