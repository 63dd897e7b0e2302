"""Time several decoding setups fairly: same target, same process, interleaved batch by batch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

from specdec.decoding.engine import Engine
from specdec.errors import ModelError, UsageError
from specdec.machine.timing import no_garbage
from specdec.types import Request, Trace

MIN_TIMED_BATCHES = 2
"""Measured whatever the time limit: a ratio over a single prompt has no interval."""
_BRIEF_TOKENS = 8  # touch what an engine allocates, and no more


NextTurn = Callable[[Request, Trace], Request | None]
"""What a conversation goes on with after an answer; None at its end."""


@dataclass
class Measured:
    """Per arm the requests it has answered and their traces, in the same order, and what failed: arm → request → why.

    The first turns are the same in all arms; a later one holds the arm's own answers.
    """

    traces: dict[str, list[Trace]]
    requests: dict[str, list[Request]]
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def fail(self, arm: str, request: Request, error: Exception) -> None:
        """Note what failed, and why."""
        self.failures.setdefault(arm, {})[request.id] = str(error)


def interleave(
    arms: Mapping[str, Engine],
    batches: Sequence[Sequence[Request]],
    on_batch: Callable[[str, Sequence[Trace]], None] = lambda arm, traces: None,
    warmup_tokens: int = 16,
    time_limit: float | None = None,
    warm: Collection[str] = (),
    next_turn: NextTurn = lambda request, answer: None,
) -> Measured:
    """Decode every batch with every arm, the first arm (plain decoding) first, the others in rotating order.

    Rotation keeps an arm from always running on the caches another one left warm. The first batch is decoded once
    untimed by every arm, `warmup_tokens` a request, but a few tokens only by arms in `warm`: those decoded with before
    in this process, whose controller is `request_local`, others begin to learn there. A batch that fails
    in an arm is listed under `failures` and has no trace there; one that fails in the first arm is not tried in the
    others, for lack of a baseline. What cannot be decoded at all is refused (`UsageError`) before the first batch, not
    after hours.

    A conversation's later turns (`next_turn`) are decoded right after its first, by every arm with its own answers; one
    that no longer fits the window is a failure.

    With a `time_limit` (seconds, warm-up not counted) it ends before the batch that would go past it, judged by the
    batches before, but not before the second has been decoded: every arm has decoded the same ones.
    """
    plain, *others = arms
    for engine in arms.values():
        for batch in batches:
            engine.check(batch)
    measured = Measured({name: [] for name in arms}, {name: [] for name in arms})
    _warm_up(arms, batches[0], warmup_tokens, warm)
    with no_garbage():
        start = perf_counter()
        for index, batch in enumerate(batches):
            if time_limit is not None and index >= MIN_TIMED_BATCHES:
                expected = (perf_counter() - start) * (index + 1) / index
                if expected > time_limit:
                    break
            turn = index % len(others) if others else 0
            for name in [plain, *others[turn:], *others[:turn]]:
                traces = _decode(arms[name], name, batch, measured, next_turn)
                on_batch(name, traces)
                if not traces and name == plain:
                    break
                if name == plain:
                    _reveal(arms, traces)
    return measured


def _warm_up(arms: Mapping[str, Engine], batch: Sequence[Request], num_tokens: int, warm: Collection[str]) -> None:
    """Run every arm once, so that allocations and first-call costs are not timed."""
    briefly = [name for name in arms if name in warm and arms[name].controller.request_local]
    short = [_cut(request, len(request.prompt_ids), num_tokens) for request in batch]
    _untimed(arms, [name for name in arms if name not in briefly], short)
    _untimed(arms, briefly, [_cut(request, _BRIEF_TOKENS, _BRIEF_TOKENS) for request in short])


def _cut(request: Request, num_prompt: int, num_tokens: int) -> Request:
    """The end of a prompt, continued for a few tokens."""
    kept = request.prompt_ids[-num_prompt:]
    return replace(request, prompt_ids=kept, max_new_tokens=min(num_tokens, request.max_new_tokens))


def _untimed(arms: Mapping[str, Engine], names: Sequence[str], batch: Sequence[Request]) -> None:
    """Decode a batch with some arms, the plain one first in any case. What fails will fail again, timed."""
    plain = next(iter(arms))
    if names:
        with suppress(ModelError):
            _reveal(arms, arms[plain].generate(batch))
    for name in names:
        if name != plain:
            with suppress(ModelError):
                arms[name].generate(batch)


def _reveal(arms: Mapping[str, Engine], traces: Sequence[Trace]) -> None:
    """Show synthetic drafters what the target itself said."""
    for engine in arms.values():
        for trace in traces:
            engine.drafter.reveal(trace.request_id, trace.token_ids)


def following(batch: Sequence[Request], answers: Sequence[Trace], next_turn: NextTurn) -> list[Request]:
    """The next turns of a batch's conversations, of those that go on."""
    turns = (next_turn(request, answer) for request, answer in zip(batch, answers, strict=True))
    return [turn for turn in turns if turn is not None]


def _decode(
    engine: Engine, name: str, batch: Sequence[Request], measured: Measured, next_turn: NextTurn
) -> list[Trace]:
    """The batch and its conversations' later turns; what fails is noted, and a conversation ends there."""
    traces: list[Trace] = []
    while batch:
        gc.collect()  # here, not in the middle of a step, where it would be a latency spike of Python's
        try:
            answers = engine.generate(batch)
        except ModelError as error:
            for request in batch:
                measured.fail(name, request, error)
            break
        traces += answers
        measured.requests[name] += batch
        batch = [turn for turn in following(batch, answers, next_turn) if _fits(engine, name, turn, measured)]
    measured.traces[name] += traces
    return traces


def _fits(engine: Engine, name: str, turn: Request, measured: Measured) -> bool:
    try:
        engine.check([turn])
    except UsageError as error:
        measured.fail(name, turn, error)
        return False
    return True
