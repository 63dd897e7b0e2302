"""The questions of an audit, each answered with evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specdec.audit.findings import Answer, Finding
from specdec.audit.two_sample import (
    Continuation,
    Pair,
    coded,
    homogeneity_test,
    smallest_detectable,
    total_variation,
)
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.errors import UsageError
from specdec.measurement.lossless import TIE_TOLERANCE, ExactLogits, Outcome, compare_each, worst_of
from specdec.testing.drafters import check_drafter
from specdec.testing.fit import declared_p_value
from specdec.testing.probes import Recorder
from specdec.testing.report import ConformanceError
from specdec.testing.verifiers import check_verifier
from specdec.types import Request, SamplingParams, Trace
from specdec.verifiers.base import Verifier

_ANSWERS = {Outcome.EQUAL: Answer.LOSSLESS, Outcome.TIE: Answer.TIE, Outcome.FAULT: Answer.FAULT}
_RULE_CHECKS = ("check_verdict_form", "check_purity", "check_randomness", "check_exactness")
_DRAFTER_CHECKS = (
    "check_form",
    "check_randomness",
    "check_declared_probabilities",
    "check_rollback",
    "check_greedy_losslessness",
    "check_sampled_losslessness",
)


@dataclass(frozen=True)
class Plan:
    """How much is asked.

    prompts, tokens: decoded at temperature 0, tokens each. sampled_prompts, samples: contexts that are continued many
    times by either side, and how often. joint_tokens: whose joint is compared, those after a continuation's first.
    context_tokens: of a prompt's plain continuation, what is continued. alpha: chance that an audit calls a lossless
    setup a fault in its sampled part. batch_size: continuations decoded together.
    """

    prompts: int = 8
    tokens: int = 48
    sampled_prompts: int = 4
    samples: int = 128
    joint_tokens: int = 3
    context_tokens: int = 24
    alpha: float = 0.001
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("prompts", "tokens", "sampled_prompts", "joint_tokens", "context_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"audit.{name}={getattr(self, name)} is not possible; it must be at least 1")
        if self.samples < 2:
            raise UsageError(f"audit.samples={self.samples} compares nothing; use 100 or more")
        if not 0 < self.alpha < 1:
            raise UsageError(f"audit.alpha={self.alpha} is not a probability of a false alarm; use 0.001, say")


@dataclass(frozen=True)
class Setup:
    """What is audited: the same target with plain decoding and with an arm, whose drafter is watched."""

    plain: Engine
    arm: Engine
    recorder: Recorder

    @property
    def lossless(self) -> bool:
        """What the rule says of itself."""
        return self.arm.verifier.lossless

    def greedy_only(self) -> str | None:
        """The part that cannot sample, if there is one."""
        parts = (self.recorder.inner, self.arm.verifier)
        return next((type(part).__name__ for part in parts if part.greedy_only), None)


def greedy(setup: Setup, batches: Sequence[Sequence[Request]], plain: Sequence[Trace], exact: ExactLogits) -> Finding:
    """Token for token against plain decoding at temperature 0; where they part, is it a numeric tie?"""
    arm = [trace for batch in batches for trace in _generate(setup, batch)]
    requests = [request for batch in batches for request in batch]
    found = compare_each(requests, plain, arm, exact, TIE_TOLERANCE[setup.arm.target.compute_dtype])
    counts = {outcome: sum(one.outcome is outcome for one in found) for outcome in _ANSWERS}
    worst, tokens = worst_of(found), sum(len(trace.token_ids) for trace in arm)
    evidence = f"{counts[Outcome.EQUAL]} of {len(found)} requests equal, {tokens} tokens"
    if worst.position is not None:
        evidence += f"; {worst}"
    answer = _ANSWERS[worst.outcome] if setup.lossless else Answer.LOSSY
    parted = [asdict(one) for one in found if one.outcome is not Outcome.EQUAL]
    return Finding("greedy output", answer, evidence, {"requests": len(found), "tokens": tokens, "parted": parted})


def sampled(setup: Setup, contexts: Sequence[Sequence[int]], sampling: SamplingParams, plan: Plan) -> list[Finding]:
    """Joint distribution of the next tokens, against plain sampling; and whether drafts come from what they declare."""
    if (part := setup.greedy_only()) is not None:
        return [Finding("sampled output", Answer.NOT_ASKED, f"{part} works at temperature 0 only")]
    sides: list[Pair] = []
    declared, most = Declared(), min(plan.batch_size, setup.arm.target.max_batch or plan.batch_size)
    for number, context in enumerate(contexts):
        requests = [_continuations(f"{side}-{number}", context, sampling, plan, most) for side in ("plain", "arm")]
        plain = [_emitted(trace) for batch in requests[0] for trace in setup.plain.generate(batch)]
        arm: list[Continuation] = []
        for batch in requests[1]:
            arm += [_emitted(trace) for trace in _generate(setup, batch)]
            declared.take(setup.recorder)
        sides.append(coded(context, plain, arm))
    if not declared.drafted:
        return [Finding("sampled output", Answer.NOT_ASKED, "nothing was ever drafted in these contexts")]
    return [_joint(setup, sides, plan, declared.drafted), *declared.finding(plan.alpha)]


def _joint(setup: Setup, sides: Sequence[Pair], plan: Plan, drafted: int) -> Finding:
    """The test at every length: short joints show most with few samples, long ones what goes wrong further on."""
    lengths = range(1, plan.joint_tokens + 1)
    cut = {length: [([t[:length] for t in one], [t[:length] for t in two]) for one, two in sides] for length in lengths}
    tests = {length: homogeneity_test(pairs) for length, pairs in cut.items()}
    level, total = plan.alpha / len(tests), plan.samples * len(sides)
    worst = min(tests, key=lambda length: tests[length].p_value)
    detectable = smallest_detectable(total, tests[worst].degrees, level)
    distances = {length: total_variation(cut[length]) for length in sorted({min(cut), max(cut)})}
    evidence = (
        f"p = {tests[worst].p_value:.2g} for the joint of {_tokens(worst)} (false alarm {plan.alpha:g}, shared by "
        f"{len(tests)} tests; {total} continuations a side in {len(sides)} contexts, {drafted} draft tokens); a total "
        f"variation of {detectable:.2f} would have been found with probability 0.9"
    )
    measured = "; ".join(
        f"TV over {_tokens(length)} at least {found.held_out:.3f} (95 %: {found.low:.3f} to {found.high:.3f})"
        for length, found in distances.items()
    )
    values = {
        "tests": {str(length): asdict(test) for length, test in tests.items()},
        "false_alarm": plan.alpha,
        "smallest_detectable_total_variation": detectable,
        "total_variation": {str(length): asdict(found) for length, found in distances.items()},
        "samples_per_side": total,
        "draft_tokens": drafted,
    }
    if not setup.lossless:
        return Finding("sampled output", Answer.LOSSY, f"{measured}; {evidence}", values)
    if tests[worst].p_value <= level:
        return Finding("sampled output", Answer.FAULT, f"{evidence}; {measured}", values)
    if detectable >= 1:
        return Finding(
            "sampled output", Answer.NOT_ASKED, f"too few continuations to tell anything: {evidence}", values
        )
    return Finding("sampled output", Answer.LOSSLESS, evidence, values)


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


def _emitted(trace: Trace) -> Continuation:
    """All but the first token, which comes from the prompt's forward and no rule has touched."""
    records = [record for record in trace.tokens if record.emitted][1:]
    return Continuation(trace.token_ids[1:], tuple(record.target_prob or 0.0 for record in records))


class Declared:
    """Drafted tokens beside the probabilities declared for them: the first two nodes of each request's first draft."""

    def __init__(self) -> None:
        self.drafted = 0
        self._nodes: dict[int, list[tuple[int, Tensor]]] = {0: [], 1: []}

    def take(self, recorder: Recorder) -> None:
        """Read what a drafter has just proposed to one batch, and let the recorder forget it."""
        self.drafted += recorder.num_drafted
        for proposal in recorder.proposals[:1]:
            for row in (proposal.row(index) for index in range(proposal.context.batch_size)):
                if row.probs is not None:
                    for node, (token, probs) in enumerate(zip(row.tokens, row.probs, strict=True)):
                        self._nodes.get(node, []).append((token, probs))
        recorder.forget()

    def finding(self, alpha: float) -> list[Finding]:
        """One finding, or none where drafts have no probabilities. See `declared_p_value`."""
        nodes = {node: drawn for node, drawn in self._nodes.items() if drawn}
        if not nodes:
            return []
        p_values = [
            declared_p_value(torch.tensor([token for token, _ in drawn]), torch.stack([probs for _, probs in drawn]))
            for drawn in nodes.values()
        ]
        fault = min(p_values) < alpha / len(nodes)
        count = sum(map(len, nodes.values()))
        evidence = f"p = {min(p_values):.2g} that {count} draft tokens come from what was declared (chi-square)"
        return [Finding("draft probabilities", Answer.FAULT if fault else Answer.LOSSLESS, evidence)]


def rule(verifier: Verifier) -> Finding:
    """Everything one step can emit on vocabularies of two to four tokens, enumerated. See `specdec.testing.exact`."""
    try:
        report = check_verifier(verifier, only=_RULE_CHECKS)
    except ConformanceError as error:
        return Finding("verification rule", Answer.FAULT, str(error))
    (note,) = [finding.note or "" for finding in report.findings if finding.check == "check_exactness"]
    answer = Answer.LOSSLESS if verifier.lossless else Answer.LOSSY
    return Finding("verification rule", answer, f"{note}, enumerated exactly")


def drafter(make: Callable[[], Drafter]) -> Finding:
    """The drafter on the tiny target of `specdec.testing`, with a rule known to be right, where it fits that target."""
    question = "drafter on a tiny target"
    try:
        report = check_drafter(make, num_samples=500, only=_DRAFTER_CHECKS)
    except UsageError as error:
        return Finding(question, Answer.NOT_ASKED, f"it does not fit one: {error}")
    except ConformanceError as error:
        return Finding(question, Answer.FAULT, str(error))
    return Finding(question, Answer.LOSSLESS, f"{len(report.checked)} checks passed: {', '.join(report.checked)}")


def _generate(setup: Setup, batch: Sequence[Request]) -> list[Trace]:
    """With the arm; nothing is kept of what is not asked for."""
    setup.recorder.forget()
    return setup.arm.generate(batch)


def _continuations(
    name: str, context: Sequence[int], sampling: SamplingParams, plan: Plan, batch_size: int
) -> list[list[Request]]:
    """The same context many times, in batches, every time with uniforms of its own."""
    requests = [
        Request(f"{name}-{index}", tuple(context), sampling, max_new_tokens=plan.joint_tokens + 1)
        for index in range(plan.samples)
    ]
    return [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
