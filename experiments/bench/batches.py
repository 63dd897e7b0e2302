"""Tokens per second by batch size, once every row has its first token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from experiments.bench.plan import LOOKUP_TOKENS, NGRAM, Plan
from experiments.bench.rounds import rotated, rounds
from experiments.bench.subject import Subject
from experiments.bench.systems import (
    LOOKUP,
    OURS,
    PLAIN,
    THEIRS,
    Decoder,
    engine,
    native,
    through_transformers,
)
from experiments.bench.tables import Row, groups, spread
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.types import Request

_PROMPT_TOKENS = 128
_WARM_UP_TOKENS = 4


def measure(subject: Subject, plan: Plan) -> pd.DataFrame:
    """Columns: system, arm, batch, round, num_tokens (without each row's first), seconds (since all had it)."""
    limit = subject.target.model.max_batch
    sizes = [size for size in plan.batch_sizes if limit is None or size <= limit]
    if len(sizes) < len(plan.batch_sizes):
        print(f"batches: {subject.target.name} takes at most {limit} sequences at once", file=sys.stderr)
    requests = equal_length(subject.requests(plan.batch_tokens), max(sizes), _PROMPT_TOKENS)
    decoders = _decoders(subject)
    work = [(size, *key) for size in sizes for key in decoders]
    for decode in decoders.values():
        decode([replace(request, max_new_tokens=_WARM_UP_TOKENS) for request in requests])
    records = []
    for number in rounds(plan.batches, f"{subject.dtype} batches"):
        for size, system, arm in rotated(work, number):
            decoded = decoders[system, arm](requests[:size])
            tokens, seconds = decoded.num_tokens - size, decoded.seconds - decoded.first_seconds
            cell = {"system": system, "arm": arm, "batch": size, "round": number}
            records.append({**cell, "num_tokens": tokens, "seconds": seconds})
    return pd.DataFrame(records)


def _decoders(subject: Subject) -> dict[tuple[str, str], Decoder]:
    """transformers speculates for single sequences only, so it decodes plainly here."""
    target = subject.target
    return {
        (OURS, PLAIN): native(engine(target, NoDrafter(), 0)),
        (OURS, LOOKUP): native(engine(target, PromptLookupDrafter(max_ngram=NGRAM), LOOKUP_TOKENS)),
        (THEIRS, PLAIN): through_transformers(subject.transformers),
    }


def equal_length(requests: Sequence[Request], count: int, at_most: int) -> list[Request]:
    """`count` requests of one prompt length that run to max_new_tokens, so that all do the same work.

    Each keeps the end of its prompt; where there are fewer prompts than wanted, they are taken again.
    """
    length = min(at_most, *(len(request.prompt_ids) for request in requests))
    chosen = [requests[index % len(requests)] for index in range(count)]
    return [
        replace(request, id=f"row-{index}", prompt_ids=request.prompt_ids[-length:], eos_ids=frozenset())
        for index, request in enumerate(chosen)
    ]


def summarise(raw: pd.DataFrame) -> list[Row]:
    """Tokens per second of each arm at each size, and their ratio to one sequence's of the same round."""
    rows = []
    for (system, arm), found in groups(raw, "system", "arm"):
        rates = found.assign(rate=found["num_tokens"] / found["seconds"]).pivot(
            index="round", columns="batch", values="rate"
        )
        labels, sizes = {"system": system, "arm": arm}, sorted(found["batch"].unique().tolist())
        rows += [spread("batch_tokens_per_second", rates[size], **labels, x=size) for size in sizes]
        rows += [spread("batch_speedup", rates[size] / rates[1], **labels, x=size) for size in sizes if size > 1]
    return rows
