"""The draft model: its own cache, window and vocabulary, and the distribution it reports."""

from __future__ import annotations

import pytest
import torch

from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.errors import ModelError, UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel
from specdec.models.native.transformer import Transformer, TransformerConfig
from specdec.sampling.distributions import probabilities
from specdec.types import Draft, Request, Trace, Verdict
from specdec.verifiers.rejection import RejectionVerifier
from tests.conftest import PADDED_VOCAB_SIZE, REAL_VOCAB_SIZE, make_model, make_tokenizer
from tests.fakes import make_request


class Watched(DraftModelDrafter):
    """Recomputes, from nothing, what every draft should have been drawn from."""

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: object) -> None:
        for row, length in enumerate(draft.lengths.tolist()):
            if draft.probs is not None and length:
                ids = [*context.tokens[row].tolist(), *draft.tokens[row, :length].tolist()]
                logits = full_logits(self.model, ids)[:, len(ids) - length - 1 : -1]
                logits[..., REAL_VOCAB_SIZE:] = -torch.inf
                expected = probabilities(logits, [context.sampling[row]])[0]
                torch.testing.assert_close(draft.probs[row, :length], expected, atol=1e-5, rtol=1e-4)
                self.num_checked = getattr(self, "num_checked", 0) + length
        super().observe(context, draft, verdict, None)


def full_logits(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    cache = model.new_cache(1, len(ids))
    with torch.inference_mode():
        return model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], cache.view([0])).logits.clone()


def native(hf: object, **changes: object) -> LoadedModel:
    """A tiny model that is on no disk, with the usual tokenizer."""
    from specdec.models.vocabulary.tokenizer import Tokenizer

    config = TransformerConfig.from_hf(hf.config)  # type: ignore[attr-defined]
    model = Transformer.from_state_dict(config, dict(hf.state_dict()))  # type: ignore[attr-defined]
    tokenizer = Tokenizer(make_tokenizer(), "tiny")
    return LoadedModel(model, tokenizer, "tiny", frozenset(), "", REAL_VOCAB_SIZE, "native", lambda: model)


def decode(target: LoadedModel, drafter: DraftModelDrafter, requests: list[Request], gamma: int = 4) -> list[Trace]:
    engine = Engine(target.model, drafter, RejectionVerifier(), FixedController(gamma), tokenizer=target.tokenizer)
    return engine.generate(requests)


def plain(target: LoadedModel, requests: list[Request]) -> list[Trace]:
    return Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0)).generate(requests)


def test_reported_probabilities_are_those_drawn_from_through_acceptance_rejection_and_ragged_rows(
    target: LoadedModel,
) -> None:
    requests = [make_request(name, length, temperature=1.0) for name, length in [("a", 4), ("b", 25), ("c", 11)]]
    # The target drafting for itself accepts whole drafts; another model is rejected at every position.
    for draft in (target, native(make_model("llama", 1))):
        drafter = Watched(draft)
        traces = decode(target, drafter, requests)
        assert drafter.num_checked > 50
        assert any(step.num_accepted == step.num_drafted > 0 for trace in traces for step in trace.steps)


def test_a_draft_with_a_shorter_window_stops_drafting_and_decoding_goes_on(target: LoadedModel) -> None:
    short = native(make_model("llama", 0, max_position_embeddings=20))
    requests = [make_request("a", 10, max_new_tokens=40), make_request("b", 25, max_new_tokens=20)]
    traces = decode(target, DraftModelDrafter(short), requests)
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in plain(target, requests)]
    for step in (step for trace in traces for step in trace.steps[1:]):
        assert step.context_length + step.num_drafted <= 20 or step.num_drafted == 0
    assert any(step.num_drafted for step in traces[0].steps)
    assert not any(step.num_drafted for step in traces[1].steps)


@pytest.mark.parametrize("vocab_size", [REAL_VOCAB_SIZE, PADDED_VOCAB_SIZE, 272])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies_are_aligned_and_padding_is_never_drafted(
    target: LoadedModel, vocab_size: int, temperature: float
) -> None:
    draft = native(make_model("llama", 1, vocab_size=vocab_size))
    request = make_request("a", temperature=temperature)
    (trace,) = decode(target, DraftModelDrafter(draft), [request])
    drafted = [record.token_id for record in trace.tokens if record.kind in ("accepted", "rejected")]
    assert drafted
    assert max(drafted) < REAL_VOCAB_SIZE
    if temperature == 0:
        assert trace.token_ids == plain(target, [request])[0].token_ids


def test_a_draft_without_a_tokenizer_must_have_as_many_ids(target: LoadedModel) -> None:
    draft = DraftModelDrafter(native(make_model("llama", 1, vocab_size=272)))
    with pytest.raises(UsageError, match=r"draft tiny has 272 token ids and target .* 264; pass the tokenizer"):
        Engine(target.model, draft, RejectionVerifier(), FixedController(2))


def test_broken_draft_logits_are_named(target: LoadedModel) -> None:
    broken = make_model("llama", 1)
    broken.model.norm.weight.data[:] = float("nan")
    with pytest.raises(ModelError, match=r"draft tiny gave NaN or infinite logits .*'a'"):
        decode(target, DraftModelDrafter(native(broken)), [make_request("a")])


def test_nothing_leaks_from_one_request_to_the_next(target: LoadedModel) -> None:
    draft = native(make_model("llama", 1))
    drafter = DraftModelDrafter(draft)
    first, second = make_request("a", 30, temperature=1.0), make_request("b", 8, temperature=1.0)
    engine = Engine(target.model, drafter, RejectionVerifier(), FixedController(4), tokenizer=target.tokenizer)
    engine.generate([first])
    after = engine.generate([second])[0]
    fresh = decode(target, DraftModelDrafter(draft), [second])[0]
    assert after.token_ids == fresh.token_ids
    assert [step.num_accepted for step in after.steps] == [step.num_accepted for step in fresh.steps]
