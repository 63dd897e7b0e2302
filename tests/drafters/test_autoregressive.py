"""What every drafter with a language model owes: an exact draft distribution, its own cache, window and ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.base import DraftContext
from specdec.drafters.distilled import DistilledDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.none import NoDrafter
from specdec.models.base import LanguageModel, Tables
from specdec.models.loading import LoadedModel
from specdec.models.native.transformer import Transformer, TransformerConfig
from specdec.models.vocabulary.draft_vocabulary import DraftVocabulary
from specdec.models.vocabulary.lexicon import Lexicon
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.models.vocabulary.translation import Translation
from specdec.models.vocabulary.vocab import ReducedIds, SameIds, TokenMap
from specdec.sampling.distributions import probabilities
from specdec.types import Draft, Request, SamplingParams, Trace, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier
from tests.conftest import REAL_VOCAB_SIZE, SPECIAL_TOKENS, make_model, make_tokenizer
from tests.drafts import write_shallow
from tests.fakes import SpoilingController, StoppingController, make_request
from tests.test_lossless import FALSE_ALARM, SAMPLINGS, exact_joint, five_token_model, p_value, sampled_counts

REQUESTS = [make_request("a", 9), make_request("b", 30), make_request("c", 3, max_new_tokens=40)]
CONTROLLERS = [FixedController(4), SpoilingController(), StoppingController()]
KINDS = ["translated", "permuted", "distilled", "copied", "early_exit"]


def loaded(hf: Any, tokenizer: Any, name: str = "tiny") -> LoadedModel:
    """A tiny model that is on no disk."""
    model = Transformer.from_state_dict(TransformerConfig.from_hf(hf.config), dict(hf.state_dict()), name=name)
    own = Tokenizer(tokenizer, name)
    return LoadedModel(model, own, name, frozenset(), "", own.vocab_size, "native", lambda: model)


def pairs_tokenizer(special_tokens: tuple[str, ...] = ("</s>", "<s>")) -> transformers.PreTrainedTokenizerFast:
    """Bytes in another order, then pairs of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    merges = [("Ġ", "a"), ("Ã", "©"), ("a", "b"), ("0", "0")]
    tokens = [*alphabet, *map("".join, merges)]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def target_hf() -> Any:
    """Weights that float16 holds exactly, as a draft checkpoint stores them; every id is a token."""
    hf = make_model("llama", vocab_size=REAL_VOCAB_SIZE)
    for weight in hf.parameters():
        weight.data = weight.data.half().float()
    return hf


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return loaded(target_hf(), make_tokenizer(), "target")


def permuted() -> DraftModelDrafter:
    """The target under other ids: what a perfect translation would accept throughout."""
    tokenizer, hf = pairs_tokenizer(SPECIAL_TOKENS), target_hf()
    draft, theirs = tokenizer.get_vocab(), make_tokenizer().get_vocab()
    hf.resize_token_embeddings(len(draft), mean_resizing=False)
    before = {name: weight.clone() for name, weight in hf.state_dict().items()}
    for token, index in theirs.items():
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            hf.state_dict()[name][draft[token]] = before[name][index]
    return DraftModelDrafter(loaded(hf, tokenizer, "permuted"))


def distilled(directory: Path, target: LoadedModel, num_layers: int, vocabulary: Tensor) -> DistilledDrafter:
    """The target's own first layers, as if trained."""
    write_shallow(directory, target.model, target_hf(), num_layers, vocabulary)
    return DistilledDrafter(str(directory))


@pytest.fixture(scope="module")
def drafters(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, AutoregressiveDrafter]:
    directory, everything = tmp_path_factory.mktemp("drafts"), torch.arange(REAL_VOCAB_SIZE)
    other = loaded(make_model("llama", 1, vocab_size=264), pairs_tokenizer(), "translated")
    return {
        "translated": DraftModelDrafter(other),
        "permuted": permuted(),
        "distilled": distilled(directory / "shallow", target, 1, everything.flip(0)[:100]),
        "copied": distilled(directory / "whole", target, 3, everything.roll(7)),
        "early_exit": EarlyExitDrafter(2),
    }


def decode(
    target: LoadedModel,
    drafter: AutoregressiveDrafter | NoDrafter,
    requests: list[Request],
    controller: Controller | None = None,
    verifier: Verifier | None = None,
) -> list[Trace]:
    engine = Engine(
        target.model,
        drafter,
        verifier or RejectionVerifier(),
        controller or FixedController(4),
        tokenizer=target.tokenizer,
    )
    return engine.generate(requests)


def tokens(traces: list[Trace]) -> list[tuple[int, ...]]:
    return [trace.token_ids for trace in traces]


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda controller: type(controller).__name__)
@pytest.mark.parametrize("verifier", [GreedyVerifier(), RejectionVerifier()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_of_a_ragged_batch_equals_plain_decoding(
    target: LoadedModel,
    drafters: dict[str, AutoregressiveDrafter],
    kind: str,
    verifier: Verifier,
    controller: Controller,
) -> None:
    traces = decode(target, drafters[kind], REQUESTS, controller, verifier)
    assert tokens(traces) == tokens(decode(target, NoDrafter(), REQUESTS, FixedController(0)))
    steps = [step for trace in traces for step in trace.steps]
    assert sum(step.num_drafted for step in steps) > 0
    if kind in ("permuted", "copied"):  # the target itself, under other ids
        assert all(step.num_accepted == step.num_examined for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_reported_probabilities_are_those_drawn_from(
    target: LoadedModel, drafters: dict[str, AutoregressiveDrafter], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed from nothing, through acceptance, rejection and ragged rows."""
    drafter, checked = drafters[kind], []
    observe = drafter.observe

    def watch(context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        for row, length in enumerate(draft.lengths.tolist()):
            for i in range(length):
                text = np.array([*context.tokens[row], *draft.tokens[row, :i].tolist()])
                logits = drafter._token_map.expand(last_logits(drafter.model, drafter._token_map.read(text)))
                expected = probabilities(logits, [context.sampling[row]])[0, 0]
                assert draft.probs is not None
                torch.testing.assert_close(draft.probs[row, i], expected, atol=1e-5, rtol=1e-4)
                checked.append((row, i))
        observe(context, draft, verdict, hidden)

    monkeypatch.setattr(drafter, "observe", watch)
    sampling = {"temperature": 1.0, "top_p": 0.95}
    requests = [make_request(name, length, **sampling) for name, length in [("a", 4), ("b", 25), ("c", 11)]]
    traces = decode(target, drafter, requests)
    assert len(checked) > 50
    if kind in ("permuted", "copied"):
        assert all(step.num_accepted == step.num_examined for trace in traces for step in trace.steps)


def last_logits(model: LanguageModel, text: np.ndarray) -> Tensor:
    """[1, 1, W]"""
    cache = model.new_cache(1, len(text))
    positions = torch.arange(len(text))[None]
    with torch.inference_mode():
        return model.forward(torch.from_numpy(text)[None], positions, cache.view([0])).logits[:, -1:].clone()


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_are_the_same_alone_batched_and_reordered(
    target: LoadedModel, drafters: dict[str, AutoregressiveDrafter], kind: str
) -> None:
    requests = [
        make_request(name, length, temperature=temperature, top_p=top_p)
        for name, length, temperature, top_p in [("a", 9, 1.0, 1.0), ("b", 30, 0.7, 0.9), ("c", 3, 0.0, 1.0)]
    ]
    batched = decode(target, drafters[kind], requests, StoppingController())
    reordered = decode(target, drafters[kind], requests[::-1], StoppingController())[::-1]
    alone = [decode(target, drafters[kind], [request], StoppingController())[0] for request in requests]
    assert tokens(batched) == tokens(reordered) == tokens(alone)


@pytest.mark.parametrize("kind", KINDS)
def test_at_temperature_0_nothing_as_wide_as_the_targets_vocabulary_is_made(
    target: LoadedModel, drafters: dict[str, AutoregressiveDrafter], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ids in (SameIds, ReducedIds, Translation):
        monkeypatch.setattr(ids, "expand", None)
    assert tokens(decode(target, drafters[kind], REQUESTS)) == tokens(
        decode(target, NoDrafter(), REQUESTS, FixedController(0))
    )


# --- Sampling, exactly ------------------------------------------------------------------------------------------------


class Given(AutoregressiveDrafter):
    """A model and what its ids mean."""

    def __init__(self, model: LanguageModel, token_map: TokenMap) -> None:
        self.name, self.model, self._token_map = "given", model, token_map


def letters(*spellings: bytes) -> Lexicon:
    return Lexicon(dict(enumerate(spellings)), {}, {}, 0, lambda text: [])


def five_token_drafter(kind: str, target: LanguageModel) -> Given:
    """Of the target's five tokens, a, b, c, ab and x, three can be proposed."""
    if kind == "translated":
        draft = make_model("llama", 1, vocab_size=6, bos_token_id=0, eos_token_id=0)
        own, theirs = letters(b"c", b"y", b"b", b"a", b"bb", b"z"), letters(b"a", b"b", b"c", b"ab", b"x")
        return Given(loaded(draft, make_tokenizer()).model, Translation(own, theirs, 5, "cpu"))
    hf, ids = make_model("llama", 1, vocab_size=5, bos_token_id=0, eos_token_id=0), torch.tensor([4, 1, 2])
    weights, tables = dict(hf.state_dict()), target.tables()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        del weights[name]
    shared = Tables(tables.embedding, tables.head[ids])
    model = Transformer.from_state_dict(TransformerConfig.from_hf(hf.config), weights, shared=shared)
    return Given(model, ReducedIds(DraftVocabulary(ids), 5))


@pytest.mark.parametrize(("kind", "options"), [("translated", "truncated"), ("reduced", "penalised")])
def test_sampled_output_has_the_targets_distribution(kind: str, options: str) -> None:
    target, prompt = five_token_model(0), (1, 2, 3, 1, 2)
    drafter = five_token_drafter(kind, target)
    counts = sampled_counts(
        Engine(target, drafter, RejectionVerifier(), FixedController(2)), prompt, SAMPLINGS[options]
    )
    assert p_value(counts, exact_joint(target, prompt, SAMPLINGS[options])) > FALSE_ALARM


# --- Texts that are longer for the draft ------------------------------------------------------------------------------


def long_request(name: str, num_specials: int, max_new_tokens: int = 20) -> Request:
    """<|im_start|> is 12 bytes for a draft that has no such token."""
    return Request(name, (*([257] * num_specials), 65, 66), SamplingParams(), max_new_tokens)


def test_a_text_that_outgrows_the_draft_cache_is_read_again_in_a_larger_one(target: LoadedModel) -> None:
    hf = make_model("llama", 1, vocab_size=264, max_position_embeddings=2048)
    drafter = DraftModelDrafter(loaded(hf, pairs_tokenizer(), "long"))
    requests = [long_request("a", 40), make_request("b", 7), long_request("c", 21)]
    traces = decode(target, drafter, requests)
    assert drafter._cache.capacity > 40 * 12
    assert all(step.num_drafted for trace in traces for step in trace.steps[1:-1])
    assert tokens(traces) == tokens(decode(target, NoDrafter(), requests, FixedController(0)))


def test_a_draft_counts_its_window_in_its_own_tokens(target: LoadedModel) -> None:
    hf = make_model("llama", 1, vocab_size=264, max_position_embeddings=64)
    drafter = DraftModelDrafter(loaded(hf, pairs_tokenizer(), "short"))
    requests = [long_request("over", 6, 30), long_request("under", 3, 30), make_request("plain", 40, max_new_tokens=30)]
    traces = decode(target, drafter, requests)
    assert tokens(traces) == tokens(decode(target, NoDrafter(), requests, FixedController(0)))
    over, under, plain = ([step.num_drafted for step in trace.steps[1:]] for trace in traces)
    assert not any(over)
    assert all(under[:4])
    assert not any(under[-2:])
    assert all(plain[:4])


def test_nothing_leaks_from_one_request_to_the_next(
    target: LoadedModel, drafters: dict[str, AutoregressiveDrafter]
) -> None:
    for drafter in drafters.values():
        engine = Engine(target.model, drafter, RejectionVerifier(), FixedController(4), tokenizer=target.tokenizer)
        second = make_request("b", 8, temperature=1.0)
        (fresh,) = engine.generate([second])
        engine.generate([make_request("a", 30, temperature=1.0)])
        (after,) = engine.generate([second])
        assert after.token_ids == fresh.token_ids
        assert [step.num_accepted for step in after.steps] == [step.num_accepted for step in fresh.steps]
