"""Every kind of cache, saved to disk: what transformers generates is decoded plainly, with drafts, and as a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext, StopDrafting
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel, load_model
from specdec.sampling.uniforms import Uniforms
from specdec.types import Draft, Request
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.fakes import TreeDrafter, make_request

WINDOW = 6  # of every model here that has one
SLIDING = ["mistral_window", "gemma2", "gemma3", "gpt_oss"]
RECURRENT = ["qwen3_next", "lfm2", "jamba", "mamba", "falcon_h1"]


def generated(reference: Any, tokens: Sequence[int], count: int) -> list[int]:
    """What transformers itself goes on with, greedily."""
    prompt = torch.tensor([list(tokens)])
    ids = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    found: list[int] = ids[0, prompt.shape[1] :].tolist()
    return found


def revealed(accuracy: float, request: Request, tokens: Sequence[int]) -> OracleDrafter:
    oracle = OracleDrafter(accuracy)
    oracle.reveal(request.id, tuple(tokens))
    return oracle


@pytest.mark.parametrize("num_prompt", [WINDOW - 2, 3 * WINDOW])  # crossed inside the first draft; long passed
@pytest.mark.parametrize("kind", [*SLIDING, *RECURRENT])
def test_plain_and_drafted_tokens_are_transformers_own(
    tiny_checkpoint: Callable[..., Path], kind: str, num_prompt: int
) -> None:
    directory, request = tiny_checkpoint(kind), make_request("a", num_prompt)
    loaded = load_model(str(directory))
    assert loaded.implementation == "hf"
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = generated(reference, request.prompt_ids, request.max_new_tokens)
    assert len(set(expected)) > 4, "tokens too uniform to tell right from wrong"

    def decoded(drafter: Any, gamma: int) -> Any:
        engine = Engine(loaded.model, drafter, RejectionVerifier(), FixedController(gamma))
        (trace,) = engine.generate([request])
        assert list(trace.token_ids) == expected
        return trace.steps

    decoded(NoDrafter(), 0)
    decoded(PromptLookupDrafter(), 6)
    right = decoded(revealed(1.0, request, expected), 6)
    assert [step.num_accepted for step in right[1:4]] == [6, 6, 6]
    mixed = decoded(revealed(0.6, request, expected), 6)
    assert sum(step.num_examined > step.num_accepted for step in mixed) > 2, "hardly anything was rolled back"


class Compared(DraftModelDrafter):
    """Holds every draft against what transformers goes on with after the same text."""

    def __init__(self, draft: LoadedModel, reference: Any) -> None:
        super().__init__(draft)
        self._reference = reference

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        draft = super().propose(context, max_tokens, stop, uniforms)
        if draft.width:
            assert draft.tokens[0].tolist() == generated(self._reference, context.tokens[0], draft.width)
        return draft


@pytest.mark.parametrize("kind", [*SLIDING, *RECURRENT])
def test_drafts_are_transformers_own_tokens(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path], kind: str
) -> None:
    directory, request = tiny_checkpoint(kind), make_request("a", max_new_tokens=12)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    drafter = Compared(load_model(str(directory)), reference)
    (plain,) = Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0)).generate([request])
    (found,) = Engine(target.model, drafter, RejectionVerifier(), FixedController(3)).generate([request])
    assert found.token_ids == plain.token_ids
    assert any(step.num_examined > step.num_accepted for step in found.steps), "nothing was ever rolled back"


def test_state_outside_the_cache_is_decoded_plainly_and_nothing_else(tiny_checkpoint: Callable[..., Path]) -> None:
    directory, requests = tiny_checkpoint("recurrent_gemma"), [make_request(name) for name in "ab"]
    model = load_model(str(directory)).model
    assert any("because of RecurrentGemmaForCausalLM's recurrent state" in said for said in model.limitations)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = Engine(model, NoDrafter(), RejectionVerifier(), FixedController(0))
    for request in requests:
        (trace,) = engine.generate([request])
        assert list(trace.token_ids) == generated(reference, request.prompt_ids, request.max_new_tokens)
    with pytest.raises(UsageError, match=r"cannot roll back rejected tokens \(RecurrentGemmaForCausalLM's recurrent"):
        Engine(model, PromptLookupDrafter(), RejectionVerifier(), FixedController(2))


@pytest.mark.parametrize("kind", ["mistral_window", "qwen3_next"])
def test_trees_are_refused(tiny_checkpoint: Callable[..., Path], kind: str) -> None:
    model = load_model(str(tiny_checkpoint(kind))).model
    with pytest.raises(UsageError, match=rf"TreeDrafter proposes trees, which .*{kind}.* cannot verify; use chains"):
        Engine(model, TreeDrafter(1.0), GreedyTreeVerifier(), FixedController(2))
