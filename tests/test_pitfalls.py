"""Where others fell: every kind of fault reported in public against speculative decoders, and the tests that hold it.

Kinds that a part's own tests hold are only named here, as `file::test`, files below tests/; the others follow below.

Ending a sequence
- EOS accepted in the middle of a block, and generation went on
    decoding/test_engine::test_eos_inside_an_accepted_block_ends_it_there
- lookup drafts overshoot a limit of 2 new tokens
    test_pitfalls::test_no_more_is_drafted_than_may_be_emitted_less_one
- lookup crashes when the model has no EOS at all
    test_pitfalls::test_lookup_without_any_eos_decodes_to_the_limit
- a prompt of one token three times: lookup drafts from the overlap, and its one wrong token is kept
    test_pitfalls::test_a_prompt_of_one_token_three_times_and_a_wrong_draft_of_one
- a stop string inside a block, or astride two: text trimmed, ids and log-probabilities not
    decoding/test_engine::test_a_stop_string_is_cut_from_text_tokens_and_records_alike
    decoding/test_stopping::test_a_stop_string_that_straddles_tokens_and_blocks_is_cut_from_text_and_tokens
    test_fuzz::test_a_stop_string_beside_half_a_character_is_found_at_the_end

The distribution
- the probability reported for a draft is not the one it was drawn from
    test_pitfalls::test_a_draft_token_is_what_its_reported_distribution_gives
    drafters/test_draft_model::test_reported_probabilities_are_those_drawn_from_through_acceptance_rejection_and_ragged_rows
- NaN when target and draft distributions are equal, or anywhere else
    verifiers/test_rejection::test_empty_residual_falls_back_to_the_target
    test_pitfalls::test_nan_never_passes_a_comparison_by_luck
- the residual goes through softmax or top-k again
    verifiers/test_rejection::test_emitted_joint_is_the_targets
- verification skips the options that plain sampling applies
    test_lossless::test_sampled_output_has_the_targets_distribution
    test_options::test_top_p
- probabilities dropped on the way, so that sampled drafts are verified as one-hot
    test_pitfalls::test_a_draft_token_is_what_its_reported_distribution_gives
- a rule with another rule's threshold or residual
    verifiers/test_exact::test_every_lossless_rule_is_exact
    verifiers/test_exact::test_wrong_last_tokens_of_block_verification
    verifiers/test_rejection::test_oracle_catches_a_wrong_last_token
- at temperature 0 an untempered softmax lets a draft through that is not the argmax
    verifiers/test_rejection::test_at_temperature_zero_it_is_greedy
- the accept mask is not cumulative
    verifiers/test_rejection::test_nothing_after_the_first_rejection_survives
- a draft with made-up probabilities is always accepted
    test_pitfalls::test_a_lookup_draft_is_kept_with_the_probability_the_target_gives_it
    verifiers/test_rejection::test_deterministic_drafts_are_one_hot

Cache and batch
- after a fully accepted step the drafter's own cache lacks the last draft token
    drafters/test_draft_model::test_reported_probabilities_are_those_drawn_from_through_acceptance_rejection_and_ragged_rows
- ragged batches: rejected entries zeroed instead of masked, one offset for all rows
    test_contracts::test_a_ragged_batch_of_three_gives_what_each_gives_alone
    models/native/test_attention::test_ragged_rows_hide_what_is_stale
- sliding windows: once passed, nothing is rolled back
    test_pitfalls::test_a_sliding_window_long_passed_still_rolls_back
    models/test_hf::test_any_appends_and_rollbacks_leave_no_trace
- recurrent and hybrid models: rejected drafts stay in the state
    models/test_architectures::test_plain_and_drafted_tokens_are_transformers_own
    models/test_architectures::test_drafts_are_transformers_own_tokens
    models/test_hf::test_state_is_put_back_and_goes_on_with_what_was_kept
    decoding/test_engine::test_a_model_that_cannot_roll_back_is_refused_when_the_engine_is_built
    test_bad_input::test_a_draft_that_cannot_roll_back_is_refused_when_the_engine_is_built
- a draft model with a shorter context crashes at its end
    drafters/test_draft_model::test_a_draft_with_a_shorter_window_stops_drafting_and_decoding_goes_on
- padding ids of short drafts counted or emitted
    verifiers/test_rejection::test_padding_is_neither_counted_nor_emitted_nor_read

Vocabulary, processors, state
- same tokenizer, differently padded vocabulary
    drafters/test_draft_model::test_padded_vocabularies_are_aligned_and_padding_is_never_drafted
- different tokenizers
    models/vocabulary/test_translation::test_what_only_one_has_is_never_proposed
    models/vocabulary/test_translation::test_a_hopeless_overlap_is_refused_with_its_size
    drafters/test_autoregressive::test_sampled_output_has_the_targets_distribution
- penalties computed once per block
    test_options::test_repetition_penalty
    test_options::test_presence_penalty
    test_options::test_frequency_penalty
- what was learned on one request changes the next one
    test_pitfalls::test_nothing_learned_on_one_request_reaches_the_next
- per-request seeds ignored
    test_options::test_seed
- greedy differs from plain decoding in low precision
    test_pitfalls::test_low_precision_differs_by_ties_alone_and_says_how_far
    test_lossless::test_a_flip_between_two_equal_logits_is_a_tie

Measuring
- tokens of the baseline counted otherwise, a mean of ratios
    test_pitfalls::test_tokens_are_counted_as_emitted_and_never_from_text
    measurement/test_statistics::test_totals_come_before_ratios
- a failed generation enters the table with another one's time
    decoding/test_engine::test_a_failed_request_is_a_failure_and_not_a_row
- random prompts, set acceptance that is not named so
    workloads/test_shipped::test_ids_and_texts_are_unique_across_workloads
    plots/test_plots::test_synthetic_arms_are_hollow_and_named
- acceptance with another denominator
    measurement/test_metrics::test_counts_and_ratios_by_hand
- draft cost left out of the speedup
    test_pitfalls::test_more_accepted_tokens_may_be_slower_and_the_speedup_says_so
- acceptance that accumulates over calls, skips empty drafts, ignores the cut, or counts tree nodes
    test_pitfalls::test_nothing_learned_on_one_request_reaches_the_next
    measurement/test_metrics::test_counts_and_ratios_by_hand
    measurement/test_metrics::test_cut_steps_count_no_rejection
    measurement/test_metrics::test_a_tree_counts_depths_not_nodes
- floored p99, prefill as a decode step, batched counts averaged
    measurement/test_statistics::test_p99_is_never_floored
    measurement/test_metrics::test_counts_and_ratios_by_hand
    measurement/test_metrics::test_a_batch_counts_its_wall_clock_once
- a sampling option accepted and ignored
    test_options::test_every_option_has_its_test
- EOS defaults to nothing
    test_options::test_eos_defaults_to_the_models_generation_config
- an unbounded requirement
    test_pitfalls::test_requirements_are_bounded_at_both_ends
- runs one after the other, the last repeat only, a baseline of other code
    decoding/test_engine::test_arms_are_interleaved_request_by_request_plain_first
    test_pitfalls::test_plain_decoding_is_the_same_loop_without_drafts
- lookup forwards all gamma slots though it found nothing
    decoding/test_engine::test_the_verify_pass_is_as_long_as_the_longest_draft_and_no_longer
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import Tensor

from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import ModelError
from specdec.measurement import traces
from specdec.measurement.lossless import TIE_TOLERANCE, Outcome, compare_all, exact_logits, first_difference
from specdec.models.loading import LoadedModel, load_model
from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms, request_key
from specdec.types import Draft, Request, TokenKind, Verdict
from specdec.verifiers.rejection import RejectionVerifier
from tests.conftest import make_model
from tests.fakes import SpoilingController, StoppingController, make_request
from tests.measurement.test_metrics import by_hand, plain_trace, summary_of

TESTS = Path(__file__).parent
KIND = re.compile(r"^- (.+)\n((?: {4}\S+::\S+\n)+)", re.MULTILINE)


def test_every_kind_is_held_by_tests_that_exist() -> None:
    assert __doc__ is not None
    kinds = KIND.findall(__doc__)
    assert len(kinds) == __doc__.count("\n- "), "a kind without a test"
    named = {tuple(name.split("::")) for _, listed in kinds for name in listed.split()}
    missing = [f"{file}::{test}" for file, test in sorted(named) if test not in defined_in(file)]
    assert not missing
    ours = {test for file, test in named if file == "test_pitfalls"}
    assert ours | {"test_every_kind_is_held_by_tests_that_exist"} == defined_in("test_pitfalls")


def defined_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def engine(target: LoadedModel, drafter: Drafter | None = None, gamma: int = 4) -> Engine:
    """Plain decoding without a drafter."""
    controller = FixedController(gamma if drafter else 0)
    return Engine(target.model, drafter or NoDrafter(), RejectionVerifier(), controller, tokenizer=target.tokenizer)


# --- Ending a sequence ------------------------------------------------------------------------------------------------


class Asked(PromptLookupDrafter):
    """Remembers how much it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    def propose(self, context: DraftContext, max_tokens: Sequence[int], *rest: Any) -> Draft:
        self.limits += max_tokens
        return super().propose(context, max_tokens, *rest)


@pytest.mark.parametrize("limit", [1, 2, 3, 12])
def test_no_more_is_drafted_than_may_be_emitted_less_one(target: LoadedModel, limit: int) -> None:
    drafter, request = Asked(), make_request("a", max_new_tokens=limit)
    (trace,) = engine(target, drafter, gamma=100).generate([request])
    assert len(trace.token_ids) == limit
    emitted = [sum(step.num_emitted for step in trace.steps[:index]) for index in range(1, len(trace.steps))]
    assert drafter.limits == [limit - count - 1 for count in emitted if limit - count > 1]


class Insisting(PromptLookupDrafter):
    """Lookup over the prompt alone, so that a text that has left the prompt's one token is drafted wrong."""

    def propose(self, context: DraftContext, *rest: Any) -> Draft:
        prompts = tuple(tokens[:count] for tokens, count in zip(context.tokens, context.num_prompt, strict=True))
        return super().propose(replace(context, tokens=prompts), *rest)


def test_lookup_without_any_eos_decodes_to_the_limit(target: LoadedModel) -> None:
    request = Request("a", (5, 6, 7, 8, 9, 10, 11, 7, 8), max_new_tokens=20, eos_ids=frozenset())
    (trace,) = engine(target, PromptLookupDrafter(), gamma=8).generate([request])
    assert len(trace.token_ids) == 20
    assert trace.token_ids == engine(target).generate([request])[0].token_ids


@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_a_prompt_of_one_token_three_times_and_a_wrong_draft_of_one(
    tiny_checkpoint: Callable[..., Path], implementation: str
) -> None:
    loaded = load_model(str(tiny_checkpoint("llama")), implementation=implementation)
    request = Request("a", (1, 1, 1), max_new_tokens=20)
    (found,) = engine(loaded, Insisting(), gamma=1).generate([request])
    (plain,) = engine(loaded).generate([request])
    assert found.token_ids == plain.token_ids
    first = found.steps[1]
    assert (first.num_drafted, first.num_examined, first.num_accepted) == (1, 1, 0)
    (looked_up,) = engine(loaded, PromptLookupDrafter(), gamma=1).generate([request])
    assert looked_up.token_ids == plain.token_ids


# --- The distribution -------------------------------------------------------------------------------------------------


class Drawing(RejectionVerifier):
    """Draws every draft token again, from the distribution it is shown with the uniform it was drawn by."""

    def __init__(self) -> None:
        self.num_checked = 0

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        if draft.width:
            assert draft.probs is not None, "the probabilities were lost on the way"
            assert draft.probs.dtype == target_probs.dtype == torch.float32
            again = [
                sample(draft.probs[:, node], uniforms.draw(Purpose.DRAFT, node, 1)[:, 0]) for node in range(draft.width)
            ]
            drafted = torch.arange(draft.width) < draft.lengths[:, None]
            assert torch.equal(torch.stack(again, 1)[drafted], draft.tokens[drafted])
            self.num_checked += int(drafted.sum())
        return super().verify(draft, target_probs, uniforms)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_token_is_what_its_reported_distribution_gives(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path], dtype: str
) -> None:
    draft = load_model(str(tiny_checkpoint("llama", seed=1)), dtype=dtype, implementation="native")
    requests = [
        make_request("top-k", 20, temperature=1.0, top_k=2),
        make_request("top-p", 9, temperature=1.5, top_p=0.6),
        make_request("penalised", 14, temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.5),
        make_request("greedy", 12, max_new_tokens=4),  # beside sampled rows, and done before they are
    ]
    verifier = Drawing()
    Engine(target.model, DraftModelDrafter(draft), verifier, FixedController(4)).generate(requests)
    assert verifier.num_checked > 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_never_passes_a_comparison_by_luck(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, temperature: float, speculative: bool, value: float
) -> None:
    """The target drafts for itself, so every position of the first draft would be accepted."""
    decoding = engine(target, DraftModelDrafter(load_model(target.name)) if speculative else None)
    forward, calls = target.model.forward, []

    def breaking(tokens: Tensor, *given: Any, **named: Any) -> Any:
        output = forward(tokens, *given, **named)
        calls.append(1)
        if len(calls) > 1:  # from the first decode step on, at its last position
            output.logits[:, -1, 5] = value
        return output

    monkeypatch.setattr(target.model, "forward", breaking)
    with pytest.raises(ModelError, match="gave NaN or infinite logits at step 1 of request 'a'"):
        decoding.generate([make_request("a", temperature=temperature)])


def test_a_lookup_draft_is_kept_with_the_probability_the_target_gives_it(target: LoadedModel) -> None:
    requests = [make_request(name, 24, max_new_tokens=60, temperature=0.3) for name in "abc"]
    found = engine(target, PromptLookupDrafter()).generate(requests)
    kinds = set()
    for record in (record for trace in found for record in trace.tokens):
        if record.kind in (TokenKind.ACCEPTED, TokenKind.REJECTED):
            uniforms = Uniforms([request_key(0, record.request_id)], [record.step])
            threshold = float(uniforms.draw(Purpose.ACCEPT, record.draft_position - 1, 1))
            assert record.draft_prob == 1.0
            assert record.expected_acceptance == record.target_prob
            assert record.target_prob is not None
            assert (threshold < record.target_prob) == (record.kind is TokenKind.ACCEPTED)
            kinds.add(record.kind)
    assert len(kinds) == 2


# --- Cache and batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", ["prompt_lookup", "draft_model", "oracle"])
def test_a_sliding_window_long_passed_still_rolls_back(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path], drafting: str
) -> None:
    windowed = load_model(str(tiny_checkpoint("mistral_window")))
    request = make_request("a", 12, max_new_tokens=30)  # the window is 6 tokens
    reference = make_model("mistral_window").generate(
        torch.tensor([request.prompt_ids]), max_new_tokens=30, do_sample=False, eos_token_id=None
    )
    tokens = tuple(reference[0, 12:].tolist())
    oracle = OracleDrafter(0.6)
    oracle.reveal("a", tokens)
    drafters = {"prompt_lookup": PromptLookupDrafter(), "draft_model": DraftModelDrafter(target), "oracle": oracle}
    found = Engine(windowed.model, drafters[drafting], RejectionVerifier(), SpoilingController()).generate([request])[0]
    assert found.token_ids == tokens
    assert any(step.num_examined > step.num_accepted for step in found.steps), "nothing was ever rolled back"


# --- Vocabulary, processors, state ------------------------------------------------------------------------------------


def test_nothing_learned_on_one_request_reaches_the_next(target: LoadedModel, other: LoadedModel) -> None:
    def fresh() -> Engine:
        drafter, controller = DraftModelDrafter(other), StoppingController()
        return Engine(target.model, drafter, RejectionVerifier(), controller, tokenizer=target.tokenizer)

    first, second = make_request("a", 30, temperature=1.0), make_request("b", 8, temperature=1.0)
    used = fresh()
    used.generate([first])
    after, alone, again = used.generate([second])[0], fresh().generate([second])[0], used.generate([second])[0]
    assert after.token_ids == alone.token_ids == again.token_ids
    counts = [
        [(step.step, step.num_drafted, step.num_examined, step.num_accepted) for step in trace.steps]
        for trace in (after, alone, again)
    ]
    assert counts[0] == counts[1] == counts[2]


def test_low_precision_differs_by_ties_alone_and_says_how_far(tiny_checkpoint: Callable[..., Path]) -> None:
    """In transformers' arithmetic; a native model on a CPU stores bfloat16, and computes in float32."""
    rounded = load_model(str(tiny_checkpoint("llama")), dtype="bfloat16", implementation="hf")
    requests = [make_request(str(index), 12, max_new_tokens=60) for index in range(8)]
    arms = engine(rounded), engine(rounded, PromptLookupDrafter(), gamma=6)
    plain, drafting = ([arm.generate([request])[0] for request in requests] for arm in arms)
    exact, tolerance = exact_logits(rounded.in_float64), TIE_TOLERANCE[rounded.model.compute_dtype]
    found = compare_all(requests, plain, drafting, exact, tolerance)
    assert found.outcome in (Outcome.EQUAL, Outcome.TIE), str(found)
    # A token that is not nearly as likely is a fault in bfloat16, too.
    one = plain[0].token_ids
    least = int(exact([*requests[0].prompt_ids, *one[:9]]).argmin())
    forged = replace(drafting[0], token_ids=(*one[:9], least, *one[10:]))
    found = compare_all(requests[:1], plain[:1], [forged], exact, tolerance)
    assert (found.outcome, found.position) == (Outcome.FAULT, first_difference(one, forged.token_ids))
    assert (found.gap or 0.0) > tolerance


# --- Measuring --------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_as_emitted_and_never_from_text(target: LoadedModel) -> None:
    found = engine(target, PromptLookupDrafter()).generate([make_request("a", max_new_tokens=40)])
    assert len(target.tokenizer.encode(found[0].text)) != 40, "text that would have told the difference"
    frames = traces.to_frames(found, "arm")
    assert frames.requests["num_tokens"].tolist() == [40]
    assert frames.steps["num_emitted"].sum() == frames.tokens["emitted"].sum() == 40


def test_more_accepted_tokens_may_be_slower_and_the_speedup_says_so() -> None:
    quick = by_hand(step_seconds=0.1)
    dear = [
        replace(step, draft_seconds=step.draft_seconds + 0.4, end_seconds=step.end_seconds + 0.4 * (step.step + 1))
        for step in quick.steps
    ]
    table = summary_of({"plain": [plain_trace()], "quick": [quick], "dear": [replace(quick, steps=tuple(dear))]})
    rows = table.to_dict("index")
    assert rows["dear"]["acceptance_rate"] == rows["quick"]["acceptance_rate"]
    assert rows["dear"]["block_efficiency"] == rows["quick"]["block_efficiency"] == 2
    assert rows["quick"]["speedup"] > 1 > rows["dear"]["speedup"]
    assert rows["dear"]["speedup"] == pytest.approx(0.56 / 2.0)
    assert rows["dear"]["draft_share"] == pytest.approx(0.403 / 0.5)


def test_requirements_are_bounded_at_both_ends() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = sum(project["optional-dependencies"].values(), project["dependencies"])
    ranges = {line: Requirement(line).specifier for line in listed}
    ranges["requires-python"] = SpecifierSet(project["requires-python"])
    unbounded = [line for line, asked in ranges.items() if not {"<", ">="} <= {one.operator for one in asked}]
    assert not unbounded


def test_plain_decoding_is_the_same_loop_without_drafts(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is never asked, and one that never finds anything, cost no wider forward and no other token."""
    forward, widths = target.model.forward, []

    def watched(tokens: Tensor, *given: Any, **named: Any) -> Any:
        widths.append(tuple(tokens.shape))
        return forward(tokens, *given, **named)

    class Silent(Drafter):
        def propose(self, context: DraftContext, max_tokens: Any, stop: StopDrafting, uniforms: Uniforms) -> Draft:
            return Draft.empty(context.batch_size)

    monkeypatch.setattr(target.model, "forward", watched)
    requests = [make_request("a", temperature=1.0), make_request("b", 30, max_new_tokens=9)]
    found = []
    for decoding in (engine(target), engine(target, PromptLookupDrafter(), gamma=0), engine(target, Silent(), gamma=5)):
        widths.clear()
        tokens = [trace.token_ids for trace in decoding.generate(requests)]
        found.append((tokens, list(widths)))
    assert found[0] == found[1] == found[2]
    assert found[0][1][1:] == [(2, 1)] * 8 + [(1, 1)] * 15
