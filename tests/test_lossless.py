"""Nothing is lost: greedy output equals plain decoding, sampled output has the target's distribution.

Greedy: drafter × verifier × controller on tiny random models in float32, token for token. Sampling: the running
engine's next three tokens against the exactly enumerated joint of a target with five tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.eagle_tree import EagleTreeDrafter, JointTree
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.measurement.lossless import TIE_TOLERANCE, Outcome, compare_all, exact_logits, first_difference
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel, load_model
from specdec.models.native.transformer import Transformer, TransformerConfig
from specdec.sampling.distributions import probabilities
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import FinishReason, Request, SamplingParams, Trace, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.synthetic import SyntheticVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.conftest import make_model
from tests.fakes import SpoilingController, StoppingController, make_request

REQUESTS = [make_request("a", 9), make_request("b", 30), make_request("c", 3, max_new_tokens=40)]
CONTROLLERS = [FixedController(1), FixedController(4), FixedController(9), SpoilingController(), StoppingController()]


@pytest.fixture(scope="module")
def plain(target: LoadedModel) -> list[Trace]:
    return Engine(target.model, NoDrafter(), RejectionVerifier(), FixedController(0)).generate(REQUESTS)


def drafters(target: LoadedModel, other: LoadedModel, plain: list[Trace]) -> dict[str, Drafter]:
    oracle = OracleDrafter(0.7)
    for trace in plain:
        oracle.reveal(trace.request_id, trace.token_ids)
    return {
        "prompt_lookup": PromptLookupDrafter(),
        "draft_model": DraftModelDrafter(other),
        "self": DraftModelDrafter(target),
        "oracle": oracle,
    }


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda controller: type(controller).__name__)
@pytest.mark.parametrize("verifier", [GreedyVerifier(), RejectionVerifier()], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model", "self", "oracle"])
def test_greedy_output_equals_plain_decoding(
    target: LoadedModel,
    other: LoadedModel,
    plain: list[Trace],
    drafter: str,
    verifier: Verifier,
    controller: Controller,
) -> None:
    engine = Engine(target.model, drafters(target, other, plain)[drafter], verifier, controller)
    traces = engine.generate(REQUESTS)
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in plain]
    assert [trace.finish_reason for trace in traces] == [trace.finish_reason for trace in plain]


@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model", "self", "oracle"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_stored_in_half_the_bytes_lose_nothing_either(
    tiny_checkpoint: Callable[..., Path], other: LoadedModel, drafter: str, stored: str
) -> None:
    """On a CPU they are computed with in float32, so a tie is no excuse. The draft's dtype is its own."""
    target = load_model(str(tiny_checkpoint("llama")), dtype=stored, implementation="native", device="cpu")
    plain = Engine(target.model, NoDrafter(), GreedyVerifier(), FixedController(0)).generate(REQUESTS)
    engine = Engine(target.model, drafters(target, other, plain)[drafter], GreedyVerifier(), FixedController(4))
    found = engine.generate(REQUESTS)
    assert [trace.token_ids for trace in found] == [trace.token_ids for trace in plain]


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_trees_and_chains_on_the_embedded_model_equal_plain_decoding(stored: str) -> None:
    target = load_model("smollm2-135m", dtype=stored, device="cpu")
    prompts = ("def add(a, b):\n    return a + b\n\ndef", "Once upon a time there was a king who")
    requests = [
        Request(str(number), tuple(target.tokenizer.encode(text)), SamplingParams(), max_new_tokens=60)
        for number, text in enumerate(prompts)
    ]
    plain = Engine(target.model, NoDrafter(), GreedyTreeVerifier(), FixedController(0)).generate(requests)
    tree = EagleTreeDrafter("smollm2-135m-eagle", tree=JointTree(top_k=4, depth=4, num_nodes=16))
    for drafter in (PromptLookupDrafter(), tree):
        found = Engine(target.model, drafter, GreedyTreeVerifier(), FixedController(4)).generate(requests)
        assert [trace.token_ids for trace in found] == [trace.token_ids for trace in plain]


def test_plain_decoding_equals_transformers(target: LoadedModel, plain: list[Trace]) -> None:
    reference = make_model("llama")
    for request, trace in zip(REQUESTS, plain, strict=True):
        expected = reference.generate(
            torch.tensor([request.prompt_ids]),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        assert trace.token_ids == tuple(expected[0, len(request.prompt_ids) :].tolist())


# --- Sampling ---------------------------------------------------------------------------------------------------------

VOCABULARY = 5
FALSE_ALARM = 1e-4
"""Chance that a correct engine fails one of the tests below. Uniforms are counter-based, so a run repeats exactly."""
NUM_SAMPLES = 2_000
"""At this false alarm, and 124 degrees of freedom, a total variation of 0.11 is found nine times in ten, wherever it
lies: chi-square exceeds 4 NUM_SAMPLES TV². The rules themselves are enumerated to 1e-12 in `verifiers/test_exact`; here
it is about how the engine, the drafters and the options put them together, and mutants show what that costs."""


def five_token_model(seed: int) -> LanguageModel:
    hf = make_model("llama", seed, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    config = TransformerConfig.from_hf(hf.config)
    return Transformer.from_state_dict(config, dict(hf.state_dict()), device=torch.device("cpu"), dtype=torch.float32)


def exact_joint(model: LanguageModel, prompt: tuple[int, ...], sampling: SamplingParams) -> np.ndarray:
    """Probability of every triple of tokens after the prompt, enumerated."""
    joint = np.ones((VOCABULARY,) * 3)
    for triple in itertools.product(range(VOCABULARY), repeat=3):
        ids = [*prompt, *triple]
        cache = model.new_cache(1, len(ids))
        with torch.inference_mode():
            logits = model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], cache.view([0])).logits
        for i, token in enumerate(triple):
            seen = (np.array(prompt), np.array(triple[:i], dtype=np.int64))
            at = len(prompt) + i - 1
            probs = probabilities(logits[:, at : at + 1], [sampling], lambda *_, seen=seen: seen)
            joint[triple] *= float(probs[0, 0, token])
    return joint


def sampled_counts(engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams) -> np.ndarray:
    """[V, V, V]. One token more is drawn than counted, so that drafts may be two tokens long."""
    requests = [Request(f"{i}", prompt, sampling, max_new_tokens=4) for i in range(NUM_SAMPLES)]
    counts = np.zeros((VOCABULARY,) * 3)
    for trace in engine.generate(requests):
        counts[trace.token_ids[:3]] += 1
    return counts


def p_value(counts: np.ndarray, joint: np.ndarray) -> float:
    """Chi-square of observed triples against the exact joint; cells expecting under 5 are pooled."""
    expected, observed = joint.ravel() / joint.sum() * counts.sum(), counts.ravel()
    assert observed[expected == 0].sum() == 0, "a token of probability zero was emitted"
    large = expected >= 5
    expected = np.append(expected[large], expected[~large].sum())
    observed = np.append(observed[large], observed[~large].sum())
    keep = expected > 0
    return float(stats.chisquare(observed[keep], expected[keep]).pvalue)


SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=1.3, top_k=4, top_p=0.9, min_p=0.05),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.3),
}


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("drafting", ["draft_model", "prompt_lookup"])
def test_sampled_output_has_the_targets_distribution(options: str, drafting: str) -> None:
    target, prompt = five_token_model(0), (1, 2, 3, 1, 2)
    drafter: Drafter = PromptLookupDrafter()
    if drafting == "draft_model":
        drafter = draft_model(five_token_model(1))
    engine = Engine(target, drafter, RejectionVerifier(), FixedController(2))
    counts = sampled_counts(engine, prompt, SAMPLINGS[options])
    assert p_value(counts, exact_joint(target, prompt, SAMPLINGS[options])) > FALSE_ALARM


class ResamplesFromTarget(RejectionVerifier):
    """A mutant: after a rejection it draws from the target instead of the residual."""

    def verify(self, draft: object, target_probs: torch.Tensor, uniforms: Uniforms) -> Verdict:
        verdict = super().verify(draft, target_probs, uniforms)  # type: ignore[arg-type]
        rows = torch.arange(len(target_probs))
        cumulative = target_probs[rows, verdict.num_accepted].cumsum(-1)
        wrong = torch.searchsorted(cumulative, uniforms.draw(Purpose.TARGET, 0, 1).float())[:, 0]
        return replace(verdict, next_token=wrong.clamp(max=VOCABULARY - 1))


def test_the_chi_square_catches_a_wrong_rule() -> None:
    target, prompt = five_token_model(0), (1, 2, 3, 1, 2)
    engine = Engine(target, draft_model(five_token_model(1)), ResamplesFromTarget(), FixedController(2))
    sampling = SAMPLINGS["temperature"]
    assert p_value(sampled_counts(engine, prompt, sampling), exact_joint(target, prompt, sampling)) < 1e-12


def draft_model(model: LanguageModel) -> DraftModelDrafter:
    """A drafter for a model that has no tokenizer."""
    loaded = LoadedModel(model, None, "five tokens", frozenset(), "", VOCABULARY, "native", lambda: model)  # type: ignore[arg-type]
    return DraftModelDrafter(loaded)


def test_sampled_tokens_are_the_same_alone_batched_and_reordered(target: LoadedModel, other: LoadedModel) -> None:
    requests = [
        make_request(name, length, temperature=temperature, top_p=top_p)
        for name, length, temperature, top_p in [("a", 9, 1.0, 1.0), ("b", 30, 0.7, 0.9), ("c", 3, 0.0, 1.0)]
    ]
    engine = Engine(target.model, DraftModelDrafter(other), RejectionVerifier(), StoppingController())
    batched = engine.generate(requests)
    reordered = engine.generate(requests[::-1])[::-1]
    alone = [engine.generate([request])[0] for request in requests]
    assert [t.token_ids for t in batched] == [t.token_ids for t in reordered] == [t.token_ids for t in alone]


def test_another_seed_gives_another_sample(target: LoadedModel) -> None:
    engine = Engine(target.model, PromptLookupDrafter(), RejectionVerifier(), FixedController(3))
    one, same, two = (engine.generate([make_request("a", temperature=1.0, seed=seed)])[0] for seed in (1, 1, 2))
    assert one.token_ids == same.token_ids != two.token_ids


# --- The comparison a sweep makes -------------------------------------------------------------------------------------


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_a_lossy_rule_is_found_out(target: LoadedModel, plain: list[Trace]) -> None:
    drafter = PromptLookupDrafter()
    engine = Engine(target.model, drafter, SyntheticVerifier(1.0), FixedController(4))
    exact = exact_logits(target.in_float64)
    tolerance = TIE_TOLERANCE[torch.float32]
    found = compare_all(REQUESTS, plain, engine.generate(REQUESTS), exact, tolerance)
    assert found.outcome is Outcome.FAULT
    assert found.gap is not None
    assert found.gap > tolerance
    assert "is not" not in str(found)
    assert compare_all(REQUESTS, plain, plain, exact, tolerance).outcome is Outcome.EQUAL


def test_a_flip_between_two_equal_logits_is_a_tie(target: LoadedModel, plain: list[Trace]) -> None:
    request, trace = REQUESTS[0], plain[0]
    flipped = replace(trace, token_ids=(*trace.token_ids[:4], (trace.token_ids[4] + 1) % 256, *trace.token_ids[5:]))

    def exact(tokens: object) -> torch.Tensor:
        logits = torch.zeros(264, dtype=torch.float64)
        logits[trace.token_ids[4]], logits[flipped.token_ids[4]] = 10.0, 10.0 - 1e-5
        return logits

    found = compare_all([request], [trace], [flipped], exact, 1e-3)
    assert found.outcome is Outcome.TIE
    assert found.position == 4
    assert found.gap == pytest.approx(1e-5)


def test_an_output_that_only_ends_early_is_a_fault(target: LoadedModel, plain: list[Trace]) -> None:
    short = replace(plain[0], token_ids=plain[0].token_ids[:-1], finish_reason=FinishReason.LENGTH)
    found = compare_all(REQUESTS[:1], plain[:1], [short], lambda _: torch.zeros(1), 1e-3)
    assert found.outcome is Outcome.FAULT
