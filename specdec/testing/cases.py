"""What the checks of a kit share: the part that is checked, a target, and how to decode with the two."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.none import NoDrafter
from specdec.errors import UsageError
from specdec.measurement.lossless import TIE_TOLERANCE, Outcome, compare_all, exact_logits
from specdec.models.loading import LoadedModel
from specdec.testing.fit import exact_joint, joint_p_value
from specdec.testing.probes import Recorder
from specdec.testing.report import Inapplicable, require
from specdec.testing.tiny import tiny_target
from specdec.types import Request, SamplingParams, Trace
from specdec.verifiers.base import Verifier
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier

FALSE_ALARM = 1e-4
"""Chance that a statistical check fails a part without fault. Seeds are fixed, so a check repeats exactly."""

_ENUMERABLE = 16  # tokens: up to here joints of four are enumerated over the whole vocabulary
_TOGETHER = 500  # sampled requests decoded as one batch
_LENGTHS = (9, 23, 4)  # prompts, in tokens


def as_factory(part: Any, kind: type[Any]) -> Callable[[], Any]:
    """What makes the part anew for every check: itself, or deep copies of an instance."""
    if isinstance(part, kind):
        return lambda: copy.deepcopy(part)
    if not callable(part):
        raise UsageError(f"{part!r} is neither a {kind.__name__} nor a function that makes one")
    make: Callable[[], Any] = part
    return make


@dataclass
class Bench:
    """A target to decode with.

    num_samples: requests of the statistical checks. verifier: the rule drafts are judged by; None: by what they are.
    """

    target: LoadedModel = field(default_factory=tiny_target)
    num_samples: int = 2000
    verifier: Verifier | None = None

    def __post_init__(self) -> None:
        computing = self.target.model.compute_dtype
        if computing not in (torch.float32, torch.float64):
            raise UsageError(f"{self.target.name} computes in {computing}; check against dtype=float32")
        self._plain: dict[Request, Trace] = {}

    def request(
        self, name: str, length: int = 9, *, max_new_tokens: int = 12, temperature: float = 0.0, seed: int = 0
    ) -> Request:
        """A prompt of random tokens that repeats itself, so that lookup finds something. It never ends early."""
        generator = np.random.default_rng([length, seed, *name.encode()])
        half = generator.integers(0, min(self.target.real_vocab_size, 200), size=length - length // 2).tolist()
        return Request(name, tuple((half + half)[:length]), self.sampling(temperature), max_new_tokens)

    def requests(self, temperature: float = 0.0) -> list[Request]:
        """Three of unequal length."""
        return [self.request(f"r{length}", length, temperature=temperature) for length in _LENGTHS]

    def sampling(self, temperature: float) -> SamplingParams:
        """Truncated where the vocabulary is too large to enumerate joints over."""
        small = temperature == 0 or self.target.model.vocab_size <= _ENUMERABLE
        return SamplingParams(temperature=temperature, top_k=0 if small else 4)

    def plain(self, requests: Sequence[Request]) -> list[Trace]:
        """The requests decoded without drafts, each alone."""
        for request in requests:
            if request not in self._plain:
                engine = self._engine(NoDrafter(), FixedController(0), RejectionVerifier())
                self._plain[request] = engine.generate([request])[0]
        return [self._plain[request] for request in requests]

    def decode(
        self,
        drafter: Drafter,
        requests: Sequence[Request],
        controller: Controller,
        verifier: Verifier | None = None,
        together: bool = True,
    ) -> list[Trace]:
        """The requests decoded with a drafter, as one batch where the parts allow it."""
        rule = verifier or self.rule(drafter, greedy=requests[0].sampling.greedy)
        if drafter.synthetic:
            for trace in self.plain([replace(request, sampling=SamplingParams()) for request in requests]):
                drafter.reveal(trace.request_id, trace.token_ids)
        engine = self._engine(drafter, controller, rule)
        groups = [requests] if together else [[request] for request in requests]
        return [trace for group in groups for trace in engine.generate(group)]

    def rule(self, drafter: Drafter, *, greedy: bool) -> Verifier:
        """A verifier for what the drafter proposes, right for whatever probabilities it declares."""
        if self.verifier is not None:
            return self.verifier
        if not drafter.proposes_trees:
            return RejectionVerifier()
        return GreedyTreeVerifier() if greedy else WithReplacementVerifier()

    def _engine(self, drafter: Drafter, controller: Controller, verifier: Verifier) -> Engine:
        return Engine(self.target.model, drafter, verifier, controller, tokenizer=self.target.tokenizer)

    def require_plain_output(self, requests: Sequence[Request], found: Sequence[Trace], setting: str) -> None:
        """Greedy output is plain decoding's, token for token, or parts from it at a numeric tie."""
        plain = self.plain(requests)
        tolerance = TIE_TOLERANCE[self.target.model.compute_dtype]
        worst = compare_all(requests, plain, found, exact_logits(self.target.in_float64), tolerance)
        require(worst.outcome is not Outcome.FAULT, f"with {setting}, greedy output is not plain decoding's: {worst}")
        for one, other in zip(plain, found, strict=True):
            same = one.finish_reason == other.finish_reason
            require(same, f"with {setting}, {one.request_id} ends by {other.finish_reason}, not {one.finish_reason}")

    def sampled_requests(self) -> list[list[Request]]:
        """Many of the same prompt, each with uniforms of its own, in batches. Four tokens each."""
        prompt = self.request("sampled", 7).prompt_ids
        size = min(_TOGETHER, self.target.model.max_batch or _TOGETHER)
        sampling = self.sampling(1.0)
        requests = [Request(f"sample-{i}", prompt, sampling, max_new_tokens=4) for i in range(self.num_samples)]
        return [requests[start : start + size] for start in range(0, len(requests), size)]

    @cached_property
    def sampled_joint(self) -> dict[tuple[int, ...], float]:
        """The exact distribution of the four tokens."""
        prompt = self.request("sampled", 7).prompt_ids
        return exact_joint(self.target.model, prompt, self.sampling(1.0), 4)

    def require_target_joint(self, traces: Sequence[Trace]) -> float:
        """The tokens after the first, those that steps emit, alone and two and three in a row, are the target's.

        Short runs show a wrong rule with the fewest samples, long ones also what is wrong only further on. Returns the
        smallest p-value; the false alarm is shared among the three.
        """
        p_values = []
        for end in (2, 3, 4):
            counts = Counter(trace.token_ids[1:end] for trace in traces)
            wanted: dict[tuple[int, ...], float] = {}
            for tokens, chance in self.sampled_joint.items():
                wanted[tokens[1:end]] = wanted.get(tokens[1:end], 0.0) + chance
            p_values.append(joint_p_value(counts, wanted))
        worst = min(p_values)
        require(
            worst >= FALSE_ALARM / len(p_values),
            f"{len(traces)} sampled continuations do not have the target's distribution (p = {worst:.2g})",
        )
        return worst


@dataclass
class DrafterCase:
    """A drafter under check. together: whether it takes several requests at once, found out once."""

    make: Callable[[], Drafter]
    bench: Bench

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Where it works."""
        return (0.0,) if self.fresh().greedy_only else (0.0, 1.0)

    def fresh(self) -> Recorder:
        """A new drafter, watched."""
        return Recorder(self.make())

    @cached_property
    def together(self) -> bool:
        """Whether it, and the target, take three requests at once."""
        drafter, model = self.fresh(), self.bench.target.model
        drafter.bind(model, self.bench.target.tokenizer)
        try:
            drafter.reserve(3, 256)
        except UsageError:
            return False
        return model.max_batch is None or model.max_batch >= 3

    def run(
        self, requests: Sequence[Request], controller: Controller, verifier: Verifier | None = None
    ) -> tuple[Recorder, list[Trace]]:
        """A fresh drafter through the requests, as one batch where it takes one."""
        drafter = self.fresh()
        return drafter, self.bench.decode(drafter, requests, controller, verifier, self.together)

    @cached_property
    def sampled(self) -> tuple[list[Recorder], list[Trace]]:
        """The statistical checks' common run: two drafts a step at temperature 1."""
        if self.fresh().greedy_only:
            raise Inapplicable("it drafts at temperature 0 only")
        runs = [self.run(batch, FixedController(2)) for batch in self.bench.sampled_requests()]
        return [drafter for drafter, _ in runs], [trace for _, traces in runs for trace in traces]
