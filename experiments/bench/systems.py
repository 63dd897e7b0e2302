"""Who is compared: this engine and transformers' `generate`, behind one signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.bench.plan import LOOKUP_TOKENS, NGRAM
from experiments.bench.rounds import timed
from experiments.bench.subject import Subject
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.machine.timing import Stopwatch
from specdec.models.loading import LoadedModel
from specdec.types import Request, Trace
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier

OURS, THEIRS = "specdec", "transformers"
PLAIN, LOOKUP, DRAFT = "plain", "prompt lookup", "draft model"


@dataclass(frozen=True)
class Decoded:
    """One batch, decoded. first_seconds: until every row had its first token. traces: empty where none are made."""

    token_ids: list[list[int]]
    seconds: float
    first_seconds: float
    traces: tuple[Trace, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all rows."""
        return sum(map(len, self.token_ids))


Decoder = Callable[[Sequence[Request]], Decoded]
"""A batch of requests of one prompt length → what came out, and when. Greedy."""


def engine(target: LoadedModel, drafter: Drafter, num_draft_tokens: int) -> Engine:
    """The native engine as every part here uses it."""
    verifier = GreedyTreeVerifier() if drafter.proposes_trees else RejectionVerifier()
    return Engine(target.model, drafter, verifier, FixedController(num_draft_tokens), tokenizer=target.tokenizer)


def native(decoding: Engine) -> Decoder:
    """This engine."""

    def decode(batch: Sequence[Request]) -> Decoded:
        traces, seconds = timed(decoding.target.device, lambda: decoding.generate(batch))
        first = max(trace.steps[0].end_seconds for trace in traces)
        return Decoded([list(trace.token_ids) for trace in traces], seconds, first, tuple(traces))

    return decode


def through_transformers(model: Any, **how: Any) -> Decoder:
    """`generate` of a transformers model, with whatever makes it speculate."""

    @torch.inference_mode()
    def decode(batch: Sequence[Request]) -> Decoded:
        ids = torch.tensor([request.prompt_ids for request in batch], device=model.device)
        eos_ids = sorted(batch[0].eos_ids)
        watch = _FirstToken(model.device)
        output, seconds = timed(
            model.device,
            lambda: model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=batch[0].max_new_tokens,
                do_sample=False,
                eos_token_id=eos_ids or None,
                pad_token_id=min(eos_ids, default=0),
                stopping_criteria=[watch],
                **how,
            ),
        )
        return Decoded(output[:, ids.shape[1] :].tolist(), seconds, watch.seconds or seconds)

    return decode


class _FirstToken:
    """Asked by `generate` after each step whether to stop; notes when the first was done, and never stops."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Stopwatch(device)
        self.seconds: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if self.seconds is None:
            self.seconds = self._clock.lap()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def native_decoders(subject: Subject) -> dict[str, Decoder]:
    """Plain, prompt lookup and the draft model on this engine."""
    target, gamma = subject.target, subject.setting.draft_tokens
    return {
        PLAIN: native(engine(target, NoDrafter(), 0)),
        LOOKUP: native(engine(target, PromptLookupDrafter(max_ngram=NGRAM), LOOKUP_TOKENS)),
        DRAFT: native(engine(target, DraftModelDrafter(subject.draft), gamma)),
    }


def transformers_decoders(subject: Subject) -> dict[str, Decoder]:
    """The same through `generate`, at equal gamma, n-gram size and draft weights."""
    model = subject.transformers
    return {
        PLAIN: through_transformers(model),
        LOOKUP: through_transformers(model, prompt_lookup_num_tokens=LOOKUP_TOKENS, max_matching_ngram_size=NGRAM),
        DRAFT: through_transformers(model, assistant_model=subject.assistant),
    }
