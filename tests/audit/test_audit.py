"""An audit finds what is lost and says so with evidence, and calls nothing a fault that is none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.audit import main
from specdec.audit import Answer, Audit, Finding, Plan, audit
from specdec.audit.two_sample import Continuation, coded, homogeneity_test, smallest_detectable, total_variation
from specdec.controllers.fixed import FixedController
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.errors import UsageError
from specdec.testing import tiny_target
from specdec.types import Request
from specdec.verifiers.base import Verifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.synthetic import SyntheticVerifier
from specdec.verifiers.typical import TypicalVerifier
from tests.commands import PROMPTS, run
from tests.fakes import TreeDrafter
from tests.testing.test_drafters import DeclaresHalf, SharperThanItSays
from tests.testing.test_verifiers import AcceptsEverything, BonusFromTheDraft, ResamplesFromTheTarget

PLAN = Plan(prompts=3, tokens=16, sampled_prompts=2, samples=600, context_tokens=12, batch_size=600)
REQUESTS = [Request(f"r{seed}", tuple(np.random.default_rng(seed).integers(0, 8, 10).tolist())) for seed in range(4)]


def draft() -> Drafter:
    return DraftModelDrafter(tiny_target(noise=0.3))


def asked(verifier: Verifier, make: Callable[[], Drafter] = draft, plan: Plan = PLAN) -> Audit:
    return audit(tiny_target(), make, verifier, FixedController(2), REQUESTS, plan=plan)


@pytest.fixture
def without_kits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks of the setup alone: the kits have tests of their own, and take a second each."""
    for question in ("rule", "drafter"):
        monkeypatch.setattr(f"specdec.audit.questions.{question}", lambda _: Finding("kit", Answer.LOSSLESS, ""))


def answers(found: Audit) -> dict[str, Answer]:
    return {finding.question: finding.answer for finding in found.findings}


def test_a_lossless_setup_is_lossless_in_every_question() -> None:
    found = asked(RejectionVerifier())
    assert set(answers(found).values()) == {Answer.LOSSLESS}
    assert list(answers(found)) == [
        "greedy output",
        "sampled output",
        "draft probabilities",
        "verification rule",
        "drafter on a tiny target",
    ]
    assert (found.answer, found.exit_status) == (Answer.LOSSLESS, 0)
    assert found.setup["drafter"] == "DraftModelDrafter"
    sampled = found.findings[1]
    assert 0.1 < sampled.values["smallest_detectable_total_variation"] < 0.3
    assert "would have been found with probability 0.9" in sampled.evidence


@pytest.mark.parametrize("mutant", [ResamplesFromTheTarget, BonusFromTheDraft])
def test_a_wrong_rule_is_a_fault(mutant: type[Verifier]) -> None:
    found = asked(mutant())
    assert answers(found)["verification rule"] is Answer.FAULT
    assert answers(found)["greedy output"] is Answer.LOSSLESS, "these two are wrong only where something is drawn"
    assert answers(found)["draft probabilities"] is Answer.LOSSLESS
    assert found.exit_status == 1


@pytest.mark.usefixtures("without_kits")
def test_what_a_setup_samples_is_tested_in_the_setup_itself() -> None:
    found = asked(AcceptsEverything())
    assert answers(found)["sampled output"] is Answer.FAULT
    assert answers(found)["greedy output"] is Answer.FAULT
    values = found.findings[1].values
    assert values["tests"]["3"]["p_value"] < 1e-4
    assert values["total_variation"]["3"]["low"] > 0.05
    (parted, *_) = found.findings[0].values["parted"]
    assert parted["gap"] == pytest.approx(max(parted["logits"]) - min(parted["logits"]), abs=0.5)
    assert len(parted["tokens"]) == 2
    assert "float64 logit gap" in found.findings[0].evidence


def test_a_drafter_that_lies_about_its_probabilities_is_a_fault() -> None:
    found = asked(RejectionVerifier(), SharperThanItSays)
    assert answers(found)["draft probabilities"] is Answer.FAULT
    assert answers(found)["verification rule"] is Answer.LOSSLESS
    assert answers(found)["drafter on a tiny target"] is Answer.FAULT
    assert found.exit_status == 1


@pytest.mark.usefixtures("without_kits")
def test_a_drafter_that_breaks_its_contract_is_a_fault_and_no_crash() -> None:
    found = asked(RejectionVerifier(), DeclaresHalf)
    assert answers(found)["sampled output"] is Answer.FAULT
    assert (
        "the drafter breaks its contract: the probabilities of node 0 of row 0 sum to 0.5" in found.findings[1].evidence
    )


@pytest.mark.parametrize("verifier", [TypicalVerifier(), SyntheticVerifier(0.9)], ids=lambda rule: type(rule).__name__)
def test_a_lossy_rule_is_declared_and_its_loss_measured(verifier: Verifier) -> None:
    found = asked(verifier)
    assert (found.answer, found.exit_status) == (Answer.LOSSY, 3)
    sampled = found.findings[1]
    assert sampled.evidence.startswith("TV over one token at least 0.")
    assert sampled.values["total_variation"]["3"]["low"] > 0.03
    assert answers(found)["verification rule"] is Answer.LOSSY


@pytest.mark.usefixtures("without_kits")
def test_what_cannot_be_asked_says_why() -> None:
    found = asked(GreedyVerifier())
    assert answers(found)["sampled output"] is Answer.NOT_ASKED
    assert "GreedyVerifier works at temperature 0 only" in str(found)
    assert found.exit_status == 0
    silent = asked(RejectionVerifier(), lambda: PromptLookupDrafter(max_ngram=12, min_ngram=12))
    assert answers(silent)["sampled output"] is Answer.NOT_ASKED
    assert "nothing was ever drafted" in str(silent)
    few = asked(RejectionVerifier(), plan=replace(PLAN, samples=4))
    assert answers(few)["sampled output"] is Answer.NOT_ASKED
    assert "too few continuations" in few.findings[1].evidence


def test_parts_that_do_not_fit_are_refused_by_their_own_names() -> None:
    with pytest.raises(UsageError, match="TreeDrafter proposes trees, which RejectionVerifier cannot verify"):
        asked(RejectionVerifier(), TreeDrafter)
    with pytest.raises(UsageError, match="give at least one prompt"):
        audit(tiny_target(), draft, RejectionVerifier(), FixedController(2), [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"prompts": 0}, "audit.prompts=0"), ({"samples": 1}, "audit.samples=1"), ({"alpha": 0.0}, "audit.alpha=0.0")],
)
def test_impossible_plans_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Plan(**settings)  # type: ignore[arg-type]


# --- Statistics -------------------------------------------------------------------------------------------------------


def sample(probs: list[float], size: int, seed: int) -> list[tuple[int]]:
    return [(int(token),) for token in np.random.default_rng(seed).choice(len(probs), size=size, p=probs)]


EVEN = [0.4, 0.3, 0.2, 0.1]


def test_the_permutation_test_keeps_its_false_alarm_rate() -> None:
    p_values = [
        homogeneity_test([(sample(EVEN, 80, 2 * seed), sample(EVEN, 80, 2 * seed + 1))], seed).p_value
        for seed in range(200)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    assert sum(p < 0.05 for p in p_values) < 25  # Binomial(200, .05): more with probability 4e-5


def test_the_permutation_test_agrees_with_chi_square_where_counts_are_large() -> None:
    pair = (sample(EVEN, 2000, 1), sample([0.36, 0.32, 0.21, 0.11], 2000, 2))
    found = homogeneity_test([pair])
    table = np.array([[Counter(side)[(token,)] for token in range(4)] for side in pair])
    expected = stats.chi2_contingency(table, correction=False)
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.degrees == expected.dof == 3
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)


@pytest.mark.parametrize(("size", "degrees", "alpha"), [(500, 11, 1e-3), (128, 3, 0.05), (4000, 80, 1e-4)])
def test_the_smallest_detectable_distance_has_the_power_it_says(size: int, degrees: int, alpha: float) -> None:
    distance = smallest_detectable(size, degrees, alpha, power=0.9)
    critical = stats.chi2.isf(alpha, degrees)
    assert stats.ncx2.sf(critical, degrees, 2 * size * distance**2) == pytest.approx(0.9, abs=1e-3)


def test_a_distance_that_should_be_found_is_found() -> None:
    size, alpha = 1000, 1e-3
    distance = smallest_detectable(size, 3, alpha)
    # The least visible difference of this size: every probability off by the same share of itself.
    base, more, less = [0.4, 0.1, 0.3, 0.2], 1 + 2 * distance, 1 - 2 * distance
    shifted = [0.4 * more, 0.1 * more, 0.3 * less, 0.2 * less]
    found = [
        homogeneity_test([(sample(base, size, 2 * seed), sample(shifted, size, 2 * seed + 1))], seed).p_value
        for seed in range(60)
    ]
    assert 0.5 * sum(abs(a - b) for a, b in zip(base, shifted, strict=True)) == pytest.approx(distance)
    assert sum(p <= alpha for p in found) >= 45  # Binomial(60, .9): fewer with probability 2e-4


def test_total_variation_is_bounded_from_below_without_bias() -> None:
    other = [0.2, 0.3, 0.2, 0.3]  # total variation 0.2
    found = [total_variation([(sample(EVEN, 400, 2 * s), sample(other, 400, 2 * s + 1))], s) for s in range(40)]
    assert np.mean([distance.held_out for distance in found]) == pytest.approx(0.2, abs=0.02)
    assert sum(distance.low <= 0.2 <= distance.high for distance in found) >= 33
    none = [total_variation([(sample(EVEN, 400, 2 * s), sample(EVEN, 400, 2 * s + 1))], s) for s in range(40)]
    assert np.mean([distance.held_out for distance in none]) < 0.03
    assert np.mean([distance.plug_in - distance.noise for distance in none]) == pytest.approx(0, abs=0.01)


def test_codes_know_tokens_likelihood_and_context() -> None:
    rng = np.random.default_rng(0)
    tokens = [*[7] * 40, *rng.permutation(np.arange(100, 140)).tolist()]
    plain = [Continuation((token,), (0.9 if token == 7 else 0.001 * token,)) for token in tokens]
    ours, theirs = coded([7, 101, 102], plain, plain)
    assert ours == theirs
    assert ours[0] == (7,)
    kinds = {code[0] for code in ours} - {7}
    assert {known for kind in kinds if isinstance(kind, tuple) for known in kind[1:]} == {True, False}


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_writes_json_and_exits_with_the_answer(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    settings = [
        f"results_dir={tmp_path}",
        f"target.model={tiny_checkpoint('llama')}",
        "target.device=cpu",
        "workload=file",
        f"workload.name={tmp_path / 'prompts.jsonl'}",
        "audit.prompts=3",
        "audit.tokens=12",
        "audit.samples=20",
        "audit.sampled_prompts=1",
    ]
    done = run(main, *settings)
    assert done.status == 0, done.stderr
    assert "Is this setup lossless?" in done.stdout
    assert "answer: lossless" in done.stdout
    written = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert written["answer"] == "lossless"
    assert written["config"]["drafter"]["_target_"].endswith("PromptLookupDrafter")
    lossy = run(main, *settings, "verifier=typical")
    assert lossy.status == 3, lossy.stderr
    assert "answer: declared lossy" in lossy.stdout


def test_the_command_says_what_cannot_be_audited(tmp_path: Path) -> None:
    unknown = run(main, "drafter=nonsense", f"results_dir={tmp_path}")
    assert unknown.status == 2
    assert "prompt_lookup" in unknown.stderr, "the known ones are listed"
    wrong = run(main, "audit.alpha=2", f"results_dir={tmp_path}")
    assert wrong.status == 2
    assert wrong.stderr.startswith("error: audit.alpha=2")
