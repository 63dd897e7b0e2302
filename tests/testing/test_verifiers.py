"""`check_verifier` passes every rule that ships, and each of its checks catches a rule made to break it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.sampling.distributions import sample
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.testing import ConformanceError, check_verifier
from specdec.testing.verifiers import VERIFIER_CHECKS
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.rejection import RejectionVerifier, chain_verdict
from specdec.verifiers.synthetic import SyntheticVerifier

CHAINS = ["greedy.GreedyVerifier", "rejection.RejectionVerifier", "block.BlockVerifier", "coupled.CoupledVerifier"]
TREES = ["tree.GreedyTreeVerifier", "multi_draft_top_k.TopKVerifier"]


def rule(path: str) -> type[Verifier]:
    module, name = path.split(".")
    found: type[Verifier] = getattr(importlib.import_module(f"specdec.verifiers.{module}"), name)
    return found


@pytest.mark.parametrize("path", CHAINS + TREES)
def test_every_rule_that_ships_conforms(path: str) -> None:
    skip = {"check_exactness": "tests/verifiers enumerates every rule"}  # the longest check by far, made there already
    report = check_verifier(rule(path), num_samples=400, skip=skip)
    assert set(report.skipped) == {"check_exactness"} | ({"check_trees"} if path in TREES else set())
    assert len(report.checked) + len(report.skipped) == len(VERIFIER_CHECKS)


@pytest.mark.parametrize("new", [lambda: SyntheticVerifier(0.8), rule("typical.TypicalVerifier")])
def test_a_declared_loss_is_measured_and_reported(new: Callable[[], Verifier]) -> None:
    report = check_verifier(new)
    notes = {finding.check: finding.note for finding in report.findings}
    assert (notes["check_exactness"] or "").startswith("declared lossy: total variation up to 0.")
    lossy = {"check_greedy", "check_decoding"}
    assert set(report.skipped) == (lossy if new().greedy_when_certain else lossy | {"check_certain"})


# --- Mutants ----------------------------------------------------------------------------------------------------------


class Mutant(RejectionVerifier):
    """Token-wise rejection, but for what a subclass changes of the verdict."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return self.changed(super().verify(draft, target_probs, uniforms), draft, target_probs, uniforms)

    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return verdict


class SaysPerhaps(Mutant):
    lossless = "perhaps"  # type: ignore[assignment]


class CountsTooMany(Mutant):
    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return replace(verdict, num_accepted=verdict.num_accepted + 1)


class ExaminesEverything(Mutant):
    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return replace(verdict, num_examined=draft.lengths)


class Normalises(Mutant):
    """Writes to the target's probabilities, to tidy them up."""

    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        target_probs /= 2
        return verdict


class DrawsGlobally(Mutant):
    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return replace(verdict, next_token=torch.randint(0, target_probs.shape[-1], verdict.next_token.shape))


class PeeksAtTheDraftersUniforms(Mutant):
    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        rows = torch.arange(len(target_probs))
        token = sample(target_probs[rows, verdict.num_accepted], uniforms.draw(Purpose.DRAFT, 0, 1)[:, 0])
        return replace(verdict, next_token=token)


class OneForAll(Mutant):
    """As few accepted in every row as in the row with the fewest."""

    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        fewest = verdict.num_accepted.min().expand_as(verdict.num_accepted)
        return chain_verdict(draft, fewest, verdict.next_token)


class TakesTreesForChains(Mutant):
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        return super().verify(replace(draft, parents=None), target_probs, uniforms)


class BonusFromTheDraft(Mutant):
    """Leviathan with the bonus token drawn from Q: the mutant of ALGORITHMS.md, total variation 4/27."""

    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        if draft.probs is None or draft.width == 0:
            return verdict
        complete = (verdict.num_accepted == draft.lengths) & (draft.lengths > 0)
        last = draft.probs[torch.arange(len(target_probs)), (draft.lengths - 1).clamp(min=0)]
        token = sample(last, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return replace(verdict, next_token=torch.where(complete, token, verdict.next_token))


class ResamplesFromTheTarget(Mutant):
    """After a rejection it draws from P: the mutant of ALGORITHMS.md, total variation 1/9."""

    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        rows = torch.arange(len(target_probs))
        token = sample(target_probs[rows, verdict.num_accepted], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return replace(verdict, next_token=token)


class AcceptsEverything(Mutant):
    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        path = torch.arange(draft.width).expand_as(draft.tokens).masked_fill(draft.tokens < 0, PADDING)
        rows = torch.arange(len(target_probs))
        token = sample(target_probs[rows, draft.lengths], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
        return Verdict(path, draft.lengths, draft.lengths, token)


class SaysItIsGreedy(Mutant):
    greedy_when_certain = True

    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        nothing = torch.zeros_like(verdict.num_accepted)
        return chain_verdict(draft, nothing, target_probs[:, 0].argmax(-1))


class FirstTokenWithoutADraft(Mutant):
    def changed(self, verdict: Verdict, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        empty = draft.lengths == 0
        return replace(verdict, next_token=torch.where(empty, 0, verdict.next_token))


MUTANTS: list[tuple[str, type[Verifier], str]] = [
    ("check_declarations", SaysPerhaps, "lossless is 'perhaps', not True or False"),
    ("check_verdict_form", CountsTooMany, "row 0 accepts node -1, and its draft has 4"),
    ("check_verdict_form", ExaminesEverything, "everything up to and including the first rejection"),
    ("check_purity", Normalises, "it wrote to its arguments"),
    ("check_purity", DrawsGlobally, "asked twice the same, next_token was"),
    ("check_randomness", PeeksAtTheDraftersUniforms, "drew uniforms of DRAFT"),
    ("check_batch_invariance", OneForAll, "num_accepted of rows"),
    ("check_trees", TakesTreesForChains, "does not declare accepts_trees, and took a draft with parents"),
    ("check_empty_draft", FirstTokenWithoutADraft, r"\[10, 0\] emit each of two tokens, not \[3, 7\]"),
    ("check_greedy", AcceptsEverything, "at temperature 0 num_accepted is"),
    ("check_certain", SaysItIsGreedy, "it declares greedy_when_certain, and num_accepted is"),
    ("check_exactness", ResamplesFromTheTarget, "from the target in total variation"),
    ("check_exactness", BonusFromTheDraft, "from the target in total variation"),
    ("check_exactness", AcceptsEverything, "with 2 tokens and chains of 1"),
    ("check_decoding", AcceptsEverything, "greedy output is not plain decoding's"),
    ("check_decoding", ResamplesFromTheTarget, "do not have the target's distribution"),
    ("check_decoding", BonusFromTheDraft, "do not have the target's distribution"),
]


@pytest.mark.parametrize(("check", "mutant", "sentence"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_check_catches_what_it_is_for(check: str, mutant: type[Verifier], sentence: str) -> None:
    with pytest.raises(ConformanceError, match=sentence):
        check_verifier(mutant, only=[check])


def test_every_check_has_a_mutant() -> None:
    assert {check for check, _, _ in MUTANTS} == {check.__name__ for check in VERIFIER_CHECKS}
