"""Would a step run on a device that is not the CPU, and how often would it wait for it? No such device is needed.

The engine decodes with everything on torch's `meta` device, where tensors have shapes and no numbers. Whoever wants to
know a number has to ask the host for it: that is noticed, and answered with zeros.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.decoding.sequence import Sequence_
from specdec.drafters.base import DraftContext, Drafter
from specdec.machine.timing import Stopwatch
from specdec.models.loading import LoadedModel
from specdec.sampling.uniforms import Uniforms
from specdec.testing.cases import as_factory
from specdec.testing.report import ConformanceError, Inapplicable, Report, require, run_checks
from specdec.testing.tiny import tiny_target
from specdec.types import Draft, Request, SamplingParams
from specdec.verifiers.base import Verifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier

_aten = torch.ops.aten
_READING = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_SCALARS = (_aten.item.default, _aten.is_nonzero.default, _aten._local_scalar_dense.default)
_MASKED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_COPIES = (_aten.to, _aten._to_copy, _aten.copy_)
_OUTSIDE = (str(Path(torch.__file__).parent), __file__)


class DeviceWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts reads of `meta` tensors by call site in `reads`, and refuses operators that mix them with the host's.

    A read is a copy to the host, a scalar, and every operator whose result has a shape that depends on numbers. Copies
    to the device are none. Raises `ConformanceError` for a mixed operator; scalars of the host may come along.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled; torch's guard against it takes longer than the rest."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        kwargs = kwargs or {}
        if not any(tensor.is_meta for tensor in _tensors(args, kwargs)):
            return func(*args, **kwargs)
        if func.overloadpacket not in _COPIES:
            _refuse_mixed(func, args, kwargs)
        if _is_read(func, args, kwargs):
            return self._answer(func, args, kwargs)
        try:
            return _computed(func, args, kwargs)
        except NotImplementedError as error:
            if not func._can_decompose():
                raise ConformanceError(f"{_call_site()} calls {func}, which needs numbers to run: {error}") from error
        with self:  # made of other operators, one of which reads
            return func.decompose(*args, **kwargs)

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As if all numbers on the device were zeros."""
        self.reads[_call_site()] += 1
        copies = _leads_to_host(func, args, kwargs)
        if func in (_aten.index_put.default, _aten.index_put_.default):
            return args[0]
        args, kwargs = tree_map(_zeros, (args, kwargs))
        found = func(*args, **kwargs)
        return found if copies else tree_map(_away, found)


_made: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
"""Size, stride and dtype of what an operator made of arguments like these. torch finds them out in Python, every time
anew, which is most of what decoding on its meta device takes.
"""


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operator makes of meta tensors."""
    if func.is_view or func._schema.is_mutable:
        return func(*args, **kwargs)
    call = (func, _described(args), _described(tuple(kwargs.items())))
    if call in _made:
        size, stride, dtype = _made[call]
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")
    found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        _made[call] = (found.size(), found.stride(), found.dtype)
    return found


def _described(value: Any) -> Any:
    """All that the shape of a result may depend on. With its type: 1 and True are equal, and make different dtypes."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Those among an operator's arguments, and in lists among them."""
    for value in (*args, *kwargs.values()):
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Tensor):
                yield part


def _is_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _MASKED:
        masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and (func is _aten.index.Tensor or args[2].numel() > 1)
    reading = func in _SCALARS or any(tag in func.tags for tag in _READING)
    return reading or _leads_to_host(func, args, kwargs)


def _leads_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it copies a tensor of the device, and not to another place there."""
    if func is _aten.copy_.default:
        return not args[0].is_meta
    devices = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.device)]
    others = [value.device for value in args[1:] if isinstance(value, Tensor)]
    return func.overloadpacket in _COPIES and args[0].is_meta and any(d.type == "cpu" for d in (*devices, *others))


def _refuse_mixed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = list(_tensors(args, kwargs))
    for tensor in tensors:
        if not tensor.is_meta and tensor.dim() > 0:
            raise ConformanceError(
                f"{_call_site()} mixes tensors of the host and of the device in {func}: shapes "
                f"{[(list(t.shape), str(t.device)) for t in tensors]}; make them with device=..., or move them"
            )


def _zeros(value: Any) -> Any:
    away = isinstance(value, Tensor) and value.is_meta
    return torch.zeros(value.shape, dtype=value.dtype) if away else value


def _away(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _call_site() -> str:
    """The innermost line that is neither torch's nor of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


@dataclass
class Step:
    """Reads of one decode step by call site; `drafting` are those of them made while the draft was."""

    reads: Counter[str] = field(default_factory=Counter)
    drafting: Counter[str] = field(default_factory=Counter)


class _WatchedEngine(Engine):
    """Writes down what each of its steps has read."""

    def watched(self, requests: Sequence[Request]) -> list[Step]:
        self._steps: list[Step] = []
        with DeviceWatch() as self._watch:
            self.generate(requests)
        return self._steps

    def _step(self, batch: Sequence[Sequence_], clock: Stopwatch) -> None:
        self._steps.append(Step())
        before = self._watch.reads.copy()
        super()._step(batch, clock)
        self._steps[-1].reads = self._watch.reads - before

    def _propose(self, batch: Sequence[Sequence_], context: DraftContext, uniforms: Uniforms) -> Draft:
        before = self._watch.reads.copy()
        draft = super()._propose(batch, context, uniforms)
        self._steps[-1].drafting = self._watch.reads - before
        return draft


@dataclass
class DeviceCase:
    """Parts under check, and the target they decode with."""

    drafter: Callable[[], Drafter]
    verifier: Verifier | None
    controller: Callable[[], Controller]
    target: LoadedModel

    def decode(self, *options: SamplingParams) -> str:
        """One request for each of the options, as one batch. Raises `ConformanceError` for a read too many."""
        requests = [_request(index, sampling) for index, sampling in enumerate(options)]
        engine = self._engine(requests)
        watching = type(engine.controller).stop is not Controller.stop
        found = engine.watched(requests)
        for number, step in enumerate(found, start=1):
            _require_few(step.drafting, int(watching), f"drafting in step {number}")
            _require_few(step.reads, 1 + watching, f"step {number}")
        return f"{len(found)} steps"

    def _engine(self, requests: Sequence[Request]) -> _WatchedEngine:
        drafter, greedy = self.drafter(), all(request.sampling.greedy for request in requests)
        verifier = self.verifier or _usual(drafter, greedy)
        for part in (drafter, verifier):
            if part.greedy_only and not greedy:
                raise Inapplicable(f"{type(part).__name__} works at temperature 0 only")
        for request in requests:
            drafter.reveal(request.id, [0] * request.max_new_tokens)
        return _WatchedEngine(self.target.model, drafter, verifier, self.controller(), tokenizer=self.target.tokenizer)


def _usual(drafter: Drafter, greedy: bool) -> Verifier:
    if not drafter.proposes_trees:
        return RejectionVerifier()
    return GreedyTreeVerifier() if greedy else TopKVerifier()


def _request(index: int, sampling: SamplingParams) -> Request:
    """A prompt in which what follows the token 0 is not always the same: 0 is all that is ever decoded."""
    prompt = (0, 5, 0, 7, 0, 0, 9, 0, 5, 0)[index:]
    return Request(f"request {index}", prompt, sampling, max_new_tokens=7 - index)


def _require_few(reads: Counter[str], most: int, where: str) -> None:
    sites = ", ".join(f"{site} ({count})" for site, count in reads.items())
    require(reads.total() <= most, f"{where} waits for the device {reads.total()} times, not {most}: {sites}")


def check_device(
    drafter: Drafter | Callable[[], Drafter],
    *,
    verifier: Verifier | None = None,
    controller: Controller | Callable[[], Controller] | None = None,
    target: LoadedModel | None = None,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Whether a drafter, a rule and a controller would run on a GPU, and read from it once a step; seconds, on any CPU.

    A step may read twice where the controller looks at every draft token, and must not while drafting where it does
    not. drafter: what makes a fresh one, with models of its own on the meta device (`tiny_target(device="meta")`), or
    an instance, which is copied. verifier: None: rejection sampling, for trees a rule for trees. controller: None: four
    tokens. target: on the meta device; None: `tiny_target`. only, skip: names of checks.

    Raises `ConformanceError`, an `AssertionError`, naming the line that reads or mixes.
    """
    make: Callable[[], Drafter] = as_factory(drafter, Drafter)
    decide: Callable[[], Controller] = as_factory(controller or FixedController(4), Controller)
    case = DeviceCase(make, verifier, decide, target or tiny_target(device="meta"))
    return run_checks(type(make()).__name__, DEVICE_CHECKS, case, only, skip)


_GREEDY = SamplingParams()
_CUT = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02)
_PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)


def check_greedy_steps(case: DeviceCase) -> str:
    """At temperature 0 no operator mixes devices, and a step reads once."""
    return case.decode(_GREEDY)


def check_greedy_batch(case: DeviceCase) -> str:
    """The same for three requests that end one after another, one of them with penalties."""
    return case.decode(_GREEDY, _GREEDY, SamplingParams(repetition_penalty=1.2, frequency_penalty=0.2))


def check_sampled_steps(case: DeviceCase) -> str:
    """The same at temperature 0.8, with top-k, top-p and min-p."""
    return case.decode(_CUT)


def check_sampled_batch(case: DeviceCase) -> str:
    """The same for three requests, each with options of its own."""
    return case.decode(_PENALISED, _CUT, _GREEDY)


DEVICE_CHECKS: tuple[Callable[[DeviceCase], str | None], ...] = (
    check_greedy_steps,
    check_greedy_batch,
    check_sampled_steps,
    check_sampled_batch,
)
