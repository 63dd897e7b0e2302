"""`check_device` names what would wait for a device, or not run there at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.controllers.base import Controller
from specdec.controllers.confidence import ConfidenceController
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.sampling.uniforms import Uniforms
from specdec.testing import ConformanceError, check_device, tiny_target
from specdec.testing.device import DeviceWatch
from specdec.types import Draft, Verdict
from specdec.verifiers.rejection import RejectionVerifier


def away(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


READS: dict[str, tuple[Callable[[], Any], Any]] = {
    "item": (lambda: away(1).item(), 0),
    "int": (lambda: int(away(1, dtype=torch.long)), 0),
    "if": (lambda: bool(away(3, dtype=torch.bool).any()), False),
    "tolist": (lambda: away(2, 2).tolist(), [[0, 0], [0, 0]]),
    "cpu": (lambda: away(2).cpu().numpy().tolist(), [0, 0]),
    "to": (lambda: away(2).to("cpu", torch.int32).tolist(), [0, 0]),
    "copy_": (lambda: torch.ones(2).copy_(away(2)).tolist(), [0, 0]),
    "nonzero": (lambda: len(away(3).nonzero()), 0),
    "where": (lambda: len(torch.where(away(3))[0]), 0),
    "a mask": (lambda: away(3)[away(3, dtype=torch.bool)].shape, (0,)),
    "unique": (lambda: away(3).unique().shape, (1,)),
    "equal": (lambda: torch.equal(away(3), away(3)), True),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_read_is_counted_where_it_is_made_and_answered_as_by_zeros(name: str, inference: bool) -> None:
    ask, answer = READS[name]
    with torch.inference_mode(inference), DeviceWatch() as watch:
        assert ask() == answer
    ((site, count),) = watch.reads.items()
    assert site.startswith("testing/test_device.py:")
    assert count == 1


SILENT: dict[str, Callable[[], Any]] = {
    "a copy to the device": lambda: torch.ones(3).to("meta") + torch.tensor([1.0, 2, 3], device="meta"),
    "a number of the host": lambda: away(3) * 2 + torch.tensor(1.0),
    "a list of indices": lambda: away(3)[[0, 1]],
    "a masked number": lambda: away(3).__setitem__(away(3, dtype=torch.bool), 1.0),
    "rows": lambda: [row + 1 for row in away(3, 2)],
    "everything of the host": lambda: torch.ones(3).sum().item(),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_reads_nothing_is_not_counted(name: str) -> None:
    with torch.inference_mode(), DeviceWatch() as watch:
        SILENT[name]()
    assert not watch.reads


@pytest.mark.parametrize("mixed", [lambda: away(3) + torch.ones(3), lambda: away(3)[torch.tensor([0, 1])]])
def test_an_operator_that_mixes_devices_is_refused(mixed: Callable[[], Any]) -> None:
    with DeviceWatch(), pytest.raises(ConformanceError, match=r"testing/test_device\.py:\d+ mixes tensors"):
        mixed()


class Mixes(PromptLookupDrafter):
    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        return replace(draft, tokens=draft.tokens + torch.zeros_like(draft.tokens, device="cpu"))


class ReadsAToken(PromptLookupDrafter):
    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert int(draft.tokens.sum()) == 0
        return draft


class ReadsTheVerdict(RejectionVerifier):
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        verdict = super().verify(draft, target_probs, uniforms)
        assert not verdict.num_accepted.any()
        return verdict


class ReadsEveryAnswer(ConfidenceController):
    def stop(self, states: Sequence[Any], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return torch.tensor(super().stop(states, draft_probs, tokens, depth).tolist())


def small_draft() -> Drafter:
    return DraftModelDrafter(tiny_target(noise=0.3, device="meta"))


def test_a_drafter_that_mixes_devices_is_caught() -> None:
    with pytest.raises(ConformanceError, match=r"Mixes fails check_greedy_steps: .*test_device.py:\d+ mixes"):
        check_device(Mixes)


def test_a_drafter_that_reads_is_caught() -> None:
    with pytest.raises(ConformanceError, match=r"drafting in step 1 waits .* 1 times, not 0: .*test_dev"):
        check_device(ReadsAToken)


def test_a_rule_that_reads_is_caught() -> None:
    with pytest.raises(ConformanceError, match=r"step 1 waits for the device 2 times, not 1: .*test_dev"):
        check_device(PromptLookupDrafter, verifier=ReadsTheVerdict(), only=["check_sampled_steps"])


def test_a_controller_that_reads_is_caught() -> None:
    controller: Controller = ReadsEveryAnswer(max_draft_tokens=3)
    with pytest.raises(ConformanceError, match=r"drafting in step 1 waits for the device 3 times, not 1"):
        check_device(small_draft, controller=controller)
    check_device(small_draft, controller=ConfidenceController(max_draft_tokens=3))
