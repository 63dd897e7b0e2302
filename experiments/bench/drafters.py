"""What drafting costs: one draft token ÷ one plain decode step (c), and what of it is not the draft's own network."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from experiments.bench import drafts
from experiments.bench.generation import PARTS, step_seconds
from experiments.bench.plan import NGRAM, Plan
from experiments.bench.rounds import rotated, rounds, timed
from experiments.bench.subject import Subject
from experiments.bench.systems import DRAFT, LOOKUP, OURS, PLAIN, engine
from experiments.bench.tables import Row, groups, spread
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.distilled import DistilledDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_tree import EagleTreeDrafter, JointTree
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter, SuffixTreeDrafter
from specdec.errors import UsageError
from specdec.types import Request, StepRecord

BUILDERS: Mapping[str, Callable[[Subject], Drafter]] = {
    LOOKUP: lambda subject: PromptLookupDrafter(max_ngram=NGRAM),
    "suffix": lambda subject: SuffixDrafter(),
    "suffix tree": lambda subject: SuffixTreeDrafter(),
    "early exit": lambda subject: EarlyExitDrafter(drafts.depth(subject.target.model.num_layers)),
    DRAFT: lambda subject: DraftModelDrafter(subject.draft),
    "distilled": lambda subject: DistilledDrafter(drafts.shipped(subject.setting.model, "draft_model")),
    "EAGLE": lambda subject: EagleDrafter(drafts.shipped(subject.setting.model, "eagle")),
    "EAGLE tree": lambda subject: EagleTreeDrafter(
        drafts.shipped(subject.setting.model, "eagle"), tree=JointTree(top_k=4, depth=5, num_nodes=16)
    ),
}
"""A drafter that does not fit the target raises `UsageError`, and is left out."""

_WARM_UP_TOKENS = 8
_NETWORKS = {"model": ("forward",), "head": ("forward", "logits")}


def available(subject: Subject) -> tuple[dict[str, Engine], dict[str, str]]:
    """An engine for every drafter that this target has, and why the others are left out."""
    engines, missing = {PLAIN: engine(subject.target, NoDrafter(), 0)}, {}
    for name, build in BUILDERS.items():
        try:
            engines[name] = engine(subject.target, build(subject), subject.setting.draft_tokens)
        except UsageError as error:
            missing[name] = str(error)
    return engines, missing


def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Every drafter on every request, one request a round. Columns: see `_record`."""
    engines, missing = available(subject)
    for name, reason in missing.items():
        print(f"drafters: without {name}: {reason}", file=sys.stderr)
    requests = subject.requests(plan.max_new_tokens)[: plan.drafters.rounds]
    for decoding in engines.values():
        decoding.generate([replace(requests[0], max_new_tokens=min(_WARM_UP_TOKENS, plan.max_new_tokens))])
    records = []
    for number in rounds(replace(plan.drafters, rounds=len(requests)), f"{subject.dtype} drafters"):
        for name in rotated(list(engines), number):
            records.append({"system": OURS, "arm": name, "round": number, **_record(engines[name], requests[number])})
    return pd.DataFrame(records)


def _record(decoding: Engine, request: Request) -> dict[str, Any]:
    """One request: seconds of its decode steps by part, steps, draft tokens, and seconds inside the draft's network."""
    start = time.perf_counter()
    with metered(decoding.drafter) as calls:
        ((trace,), seconds) = timed(decoding.target.device, lambda: decoding.generate([request]))
    steps = [step for step in trace.steps if step.step > 0]
    begun = start + trace.steps[0].end_seconds  # the drafter reads the prompt before, and drafts after
    inside = math.fsum(call.seconds for call in calls if call.start >= begun)
    return {
        "request_id": request.id,
        "seconds": seconds,
        "num_steps": len(steps),
        "num_drafted": _drafted(decoding, steps),
        "model_seconds": inside,
        **step_seconds([trace]),
    }


def _drafted(decoding: Engine, steps: list[StepRecord]) -> int:
    """Draft tokens one after another; in a tree that is its depth, as asked for."""
    if decoding.drafter.proposes_trees:
        return decoding.controller.max_draft_tokens * sum(step.num_drafted > 0 for step in steps)
    return sum(step.num_drafted for step in steps)


class _Call(NamedTuple):
    start: float
    seconds: float


@contextmanager
def metered(drafter: Drafter) -> Iterator[list[_Call]]:
    """Notes what the drafter's own network computes: a `model`'s forward, or an EAGLE `head`'s and its logits."""
    calls: list[_Call] = []
    with ExitStack() as stack:
        for owner, names in _NETWORKS.items():
            for name in names if hasattr(drafter, owner) else ():
                stack.enter_context(_noted(getattr(drafter, owner), name, calls))
        yield calls


@contextmanager
def _noted(network: Any, name: str, calls: list[_Call]) -> Iterator[None]:
    computed = getattr(network, name)

    def noting(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        output, seconds = timed(network.device, lambda: computed(*arguments, **keywords))
        calls.append(_Call(start, seconds))
        return output

    vars(network)[name] = noting
    try:
        yield
    finally:
        del vars(network)[name]


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Per request: seconds a draft token, that ÷ the plain arm's forward, and drafting outside the draft's network
    (trees, masks, probabilities, looking up) as a share of all step time."""
    tables = {str(arm): rows.set_index("round") for (arm,), rows in groups(raw, "arm")}
    plain = tables.pop(PLAIN)
    target_step = plain["forward_seconds"] / plain["num_steps"]
    each, cost, outside = [], [], []
    for arm, table in tables.items():
        draft_step = (table["draft_seconds"] / table["num_drafted"]).where(table["num_drafted"] > 0)
        each.append(spread("draft_seconds", draft_step, system=OURS, arm=arm))
        cost.append(spread("cost_ratio", draft_step / target_step, system=OURS, arm=arm))
        steps = sum(table[f"{part}_seconds"] for part in PARTS)
        share = (table["draft_seconds"] - table["model_seconds"]) / steps
        outside.append(spread("bookkeeping_share", share, system=OURS, arm=arm))
    return [*each, *cost, *outside]
