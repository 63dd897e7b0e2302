"""Is this setup lossless? Asked of any target, drafter, verifier and cache, and answered with evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from specdec.audit import questions
from specdec.audit.findings import Answer, Audit, Finding
from specdec.audit.questions import Plan, Setup
from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine, NewCache, preferred_cache
from specdec.drafters.base import Drafter
from specdec.drafters.none import NoDrafter
from specdec.errors import UsageError
from specdec.measurement.lossless import exact_logits
from specdec.models.loading import LoadedModel
from specdec.testing.probes import Recorder
from specdec.testing.report import ConformanceError
from specdec.types import Request, SamplingParams
from specdec.verifiers.base import Verifier
from specdec.verifiers.rejection import RejectionVerifier

__all__ = ["Answer", "Audit", "Finding", "Plan", "audit"]


def audit(
    target: LoadedModel,
    make_drafter: Callable[[], Drafter],
    verifier: Verifier,
    controller: Controller,
    requests: Sequence[Request],
    *,
    sampling: SamplingParams | None = None,
    plan: Plan | None = None,
    new_cache: NewCache = preferred_cache,
    batch_size: int = 1,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Audit:
    """Ask whether decoding with these parts emits what plain decoding does.

    requests: real prompts, of which `plan` says how many are used; their sampling options are replaced, at temperature
    0 for the first question and by `sampling` (None: temperature 1) for the second. batch_size: of the greedy requests.

    Four questions: *greedy output* against plain decoding token for token (`specdec.measurement.lossless`); *sampled
    output*, the joint of the next tokens, by a permutation test (`specdec.audit.two_sample`), and whether drafts
    come from their declared probabilities; the *verification rule*, enumerated exactly; the *drafter* on a tiny target.
    """
    plan, sampling = plan or Plan(), sampling or SamplingParams(temperature=1.0)
    plain_engine = Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0), new_cache=new_cache)
    arm = Engine(target.model, make_drafter(), verifier, controller, tokenizer=target.tokenizer, new_cache=new_cache)
    arm.drafter = recorder = Recorder(arm.drafter)  # once the engine has found that the parts fit
    setup = Setup(plain_engine, arm, recorder)
    if not requests:
        raise UsageError("there are no requests to audit with; give at least one prompt")
    chosen = _greedy(requests, plan)
    batches = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
    plain = [trace for batch in batches for trace in setup.plain.generate(batch)]
    for trace in plain:
        recorder.reveal(trace.request_id, trace.token_ids)
    texts = [(*request.prompt_ids, *trace.token_ids[:-1]) for request, trace in zip(chosen, plain, strict=True)]
    contexts = [text[-plan.context_tokens :] for text in texts[: plan.sampled_prompts]]

    findings: list[Finding] = []

    def ask(question: str, answer: Callable[[], list[Finding]]) -> None:
        try:
            new = answer()
        except ConformanceError as broken:
            new = [Finding(question, Answer.FAULT, f"the drafter breaks its contract: {broken}")]
        findings.extend(new)
        for finding in new:
            on_finding(finding)

    exact = exact_logits(target.in_float64)
    ask("greedy output", lambda: [questions.greedy(setup, batches, plain, exact)])
    ask("sampled output", lambda: questions.sampled(setup, contexts, sampling, plan))
    ask("verification rule", lambda: [questions.rule(verifier)])
    ask("drafter on a tiny target", lambda: [questions.drafter(make_drafter)])
    cache = new_cache(target.model, 1, 1)
    parts = {"drafter": recorder.inner, "verifier": verifier, "controller": controller, "cache": cache}
    return Audit(_described(target, parts), tuple(findings))


def _greedy(requests: Sequence[Request], plan: Plan) -> list[Request]:
    """As many as the plan says, at temperature 0, as long as it says."""
    return [
        replace(request, sampling=SamplingParams(), max_new_tokens=plan.tokens, stop=(), id=f"audit-{number}")
        for number, request in enumerate(requests[: plan.prompts])
    ]


def _described(target: LoadedModel, parts: Mapping[str, object]) -> dict[str, str]:
    dtype, device = str(target.model.dtype).removeprefix("torch."), target.model.device
    return {"target": f"{target.name} ({dtype} on {device})"} | {
        name: type(part).__name__ for name, part in parts.items()
    }
