"""What a draft learns from: the target's own continuations, and the features of every token on the way.

Continuations come from the engine in large batches. Features are taken from the forwards that decode them, so that
nothing is computed twice. Everything lies on disk in shards, one per batch; a harvest that was interrupted goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.backends.native import to_request
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.errors import UsageError
from specdec.measurement.traces import replacing
from specdec.models.loading import LoadedModel
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Prompt, Request, SamplingParams, Verdict
from specdec.verifiers.rejection import RejectionVerifier

STORED_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class HarvestPlan:
    """What is to be harvested.

    hidden_layers: features kept of every token; the last layer must be among them, for it yields the target's own
    distribution. temperatures: each request takes one of them, in turn. max_new_tokens: per continuation.
    """

    hidden_layers: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0, 0.0, 1.0)
    max_new_tokens: int = 128
    max_prompt_tokens: int = 512
    batch_size: int = 48
    seed: int = 0

    def fingerprint(self, target: LoadedModel, prompts: Sequence[Prompt]) -> str:
        """Of everything that decides what is harvested."""
        dtypes = [str(dtype) for dtype in (target.model.dtype, target.model.compute_dtype)]
        described = [asdict(self), target.fingerprint, *dtypes, [asdict(prompt) for prompt in prompts]]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Continuation:
    """One harvested sequence. tokens: [T]; the first `num_prompt` are the prompt. features: [T - 1, layers, d], those
    of every token but the last, which no forward has seen."""

    tokens: Tensor
    num_prompt: int
    features: Tensor


class FeatureRecorder(Drafter):
    """Proposes nothing and keeps the features that pass by."""

    def __init__(self, hidden_layers: Sequence[int]) -> None:
        self.hidden_layers = tuple(hidden_layers)
        self._features: dict[str, list[Tensor]] = {}

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        """Keep the prompts' features."""
        assert hidden is not None, "features were asked for"
        for request_id, features in zip(context.request_ids, hidden, strict=True):
            self._features[request_id] = [features.to("cpu", STORED_DTYPE)]

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        """Nothing."""
        return Draft.empty(context.batch_size, context.device)

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        """Keep the features of the token that was just read."""
        assert hidden is not None, "features were asked for"
        stored = hidden[:, :1].to("cpu", STORED_DTYPE)
        for row, request_id in enumerate(context.request_ids):
            self._features[request_id].append(stored[row])

    def take(self, request_id: str) -> Tensor:
        """[T, layers, d], and forget them."""
        return torch.cat(self._features.pop(request_id))


def harvest(target: LoadedModel, prompts: Sequence[Prompt], plan: HarvestPlan, folder: Path) -> Iterator[int]:
    """Fill `folder` with shards; yields the number of tokens of each batch, those already there included.

    Raises `UsageError` for no prompts, and where the last layer is not among the plan's.
    """
    if not prompts:
        raise UsageError("there are no prompts to harvest continuations of; give at least one")
    if target.model.num_layers not in plan.hidden_layers:
        raise UsageError(
            f"hidden_layers={list(plan.hidden_layers)} lacks the last layer {target.model.num_layers}, from which the "
            "target's distribution is made; add it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    recorder = FeatureRecorder(plan.hidden_layers)
    engine = Engine(target.model, recorder, RejectionVerifier(), FixedController(0), tokenizer=target.tokenizer)
    for number, batch in enumerate(_batches(target, prompts, plan)):
        shard = folder / f"{number:05d}.safetensors"
        if not shard.exists():
            _write(shard, _continuations(engine, recorder, batch))
        yield shard_sizes(shard)[1]


def _batches(target: LoadedModel, prompts: Sequence[Prompt], plan: HarvestPlan) -> list[list[Request]]:
    """Requests of similar length together, in an order that mixes kinds again."""
    limit = min(plan.max_prompt_tokens, target.model.max_positions - 1)
    requests = []
    for index, prompt in enumerate(prompts):
        temperature = plan.temperatures[index % len(plan.temperatures)]
        sampling = SamplingParams(temperature=temperature, seed=plan.seed)
        request = to_request(replace(prompt, max_new_tokens=plan.max_new_tokens, stop=()), sampling, target)
        if len(request.prompt_ids) <= limit:
            requests.append(request)
    if not requests:
        raise UsageError(f"every prompt is longer than max_prompt_tokens={limit}; raise it, or take another target")
    requests.sort(key=lambda request: len(request.prompt_ids))
    batches = [requests[start : start + plan.batch_size] for start in range(0, len(requests), plan.batch_size)]
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(plan.seed)).tolist()
    return [batches[index] for index in order]


def _continuations(engine: Engine, recorder: FeatureRecorder, batch: Sequence[Request]) -> list[Continuation]:
    traces = engine.generate(batch)
    found = []
    for request, trace in zip(batch, traces, strict=True):
        tokens = torch.tensor([*request.prompt_ids, *trace.token_ids])
        found.append(Continuation(tokens, len(request.prompt_ids), recorder.take(request.id)[: len(tokens) - 1]))
    return found


def _write(shard: Path, found: Sequence[Continuation]) -> None:
    tensors = {
        "tokens": torch.cat([one.tokens for one in found]).int(),
        "lengths": torch.tensor([len(one.tokens) for one in found]),
        "num_prompt": torch.tensor([one.num_prompt for one in found]),
        "features": torch.cat([one.features for one in found]),
    }
    with replacing(shard) as temporary:
        save_file(tensors, temporary)


def shard_sizes(shard: Path) -> tuple[int, int]:
    """Continuations in a shard, and their tokens, prompts included."""
    with safe_open(shard, "pt") as opened:
        return tuple(int(opened.get_slice(name).get_shape()[0]) for name in ("lengths", "tokens"))  # type: ignore[return-value]


def load_shard(shard: Path) -> list[Continuation]:
    """The continuations of one batch."""
    with safe_open(shard, "pt") as opened:
        tokens, lengths, num_prompt = (opened.get_tensor(name) for name in ("tokens", "lengths", "num_prompt"))
        features = opened.get_tensor("features")
    parts = zip(
        tokens.long().split(lengths.tolist()), num_prompt.tolist(), features.split((lengths - 1).tolist()), strict=True
    )
    return [Continuation(*part) for part in parts]
