"""The oracle itself: volumes are right, edges are exact, and what should be caught is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.sampling.distributions import sample, token_probs
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.testing.boxes import STEPS, integrate
from specdec.testing.exact import TREES, emission, largest_error, total_variation
from specdec.testing.languages import (
    Language,
    constant,
    joint,
    lattice_language,
    random_language,
    top_k,
    with_replacement,
    without_replacement,
)
from specdec.types import Draft, Verdict
from specdec.verifiers import block, multi_draft, multi_draft_k_seq, traversal
from specdec.verifiers.base import SiblingDraws, Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.multi_draft_k_seq import KSeqVerifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.multi_draft_without_replacement import WithoutReplacementVerifier
from specdec.verifiers.rejection import RejectionVerifier, accepted_prefix, chain_verdict, recovered_or_bonus_probs
from specdec.verifiers.synthetic import SyntheticVerifier
from specdec.verifiers.traversal import TraversalVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from specdec.verifiers.typical import TypicalVerifier

EXACT = 1e-12
LOSSLESS: list[Verifier] = [
    GreedyVerifier(),
    RejectionVerifier(),
    BlockVerifier(),
    CoupledVerifier(),
    GreedyTreeVerifier(),
    WithReplacementVerifier(),
    WithoutReplacementVerifier(),
    TopKVerifier(),
    KSeqVerifier(),
    TraversalVerifier(),
]
TARGET, DRAFT = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)


@pytest.mark.parametrize("rule", LOSSLESS, ids=lambda rule: type(rule).__name__)
def test_every_lossless_rule_is_exact(rule: Verifier) -> None:
    assert rule.lossless
    assert largest_error(rule) < EXACT


@pytest.mark.parametrize("rule", [TypicalVerifier(), SyntheticVerifier(0.5)], ids=lambda rule: type(rule).__name__)
def test_a_declared_loss_is_measured(rule: Verifier) -> None:
    assert not rule.lossless
    assert largest_error(rule) > 0.05


# --- Integration ------------------------------------------------------------------------------------------------------


def test_boxes_of_a_staircase() -> None:
    edges = torch.tensor([0.1, 1 / 3, 0.9999], dtype=torch.float64)

    def outcome(case: Tensor, lattice: Tensor) -> Tensor:
        first, second = (lattice.double() / STEPS).unbind(1)
        steps = torch.searchsorted(edges, first.contiguous(), right=True)
        return torch.stack([case, torch.where(second < first.round(), steps, -1)], dim=1)

    leaves = integrate(outcome, 2, 2)
    assert leaves.case.tolist().count(0) == leaves.case.tolist().count(1)
    volumes: dict[tuple[int, ...], float] = {}
    for key, volume in zip(leaves.outcome.tolist(), leaves.volume.tolist(), strict=True):
        volumes[tuple(key)] = volumes.get(tuple(key), 0.0) + volume
    for case in (0, 1):
        assert volumes[case, -1] == pytest.approx(0.5, abs=EXACT)  # second < round(first) only where first > 1/2
        assert volumes[case, 2] == pytest.approx(0.9999 - 0.5, abs=EXACT)
        assert volumes[case, 3] == pytest.approx(0.0001, abs=EXACT)


def test_an_edge_at_one_lattice_point_is_found() -> None:
    leaves = integrate(lambda case, lattice: (lattice == 0).long(), 1, 1)
    assert sorted(leaves.volume.tolist()) == [1 / STEPS, 1 - 1 / STEPS]


def test_a_language_and_its_joint() -> None:
    language = random_language(3, 4)
    table = joint(language, 3)
    assert table.sum() == pytest.approx(1, abs=EXACT)
    assert table[2, 0, 1] == pytest.approx(language(())[2] * language((2,))[0] * language((2, 0))[1], abs=EXACT)
    assert not np.allclose(language((0,)), language((1,)))
    assert {round(4 * p, 9) for p in lattice_language(3, 4)((1, 2))} <= {0, 1, 2, 3, 4}


def test_siblings_are_drawn_as_named() -> None:
    probs = np.array([0.5, 0.3, 0.2, 0.0])
    np.testing.assert_allclose(with_replacement(probs, (0,)), probs)
    np.testing.assert_allclose(without_replacement(probs, (0,)), [0, 0.6, 0.4, 0])
    np.testing.assert_allclose(without_replacement(probs, (0, 1, 2)), [0, 0, 0, 1])  # exhausted: uniform over the rest
    np.testing.assert_allclose(without_replacement(np.array([1.0, 0, 0]), (0,)), [0, 0.5, 0.5])
    np.testing.assert_allclose(top_k(probs, (0,)), [0, 1, 0, 0])


# --- Closed forms -----------------------------------------------------------------------------------------------------


def test_expected_accepted_tokens_token_wise_and_block() -> None:
    assert emission(RejectionVerifier(), TARGET, DRAFT, 2).mean_accepted == pytest.approx(10 / 9, abs=EXACT)
    assert emission(BlockVerifier(), TARGET, DRAFT, 2).mean_accepted == pytest.approx(11 / 9, abs=EXACT)
    assert emission(TraversalVerifier(), TARGET, DRAFT, 2).mean_accepted == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize(("vocab_size", "gamma"), [(2, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_block_never_accepts_less_than_token_wise(vocab_size: int, gamma: int, seed: int) -> None:
    target, draft = random_language(vocab_size, seed), random_language(vocab_size, 50 + seed)
    wise, whole = (emission(rule, target, draft, gamma) for rule in (RejectionVerifier(), BlockVerifier()))
    assert whole.mean_accepted > wise.mean_accepted - EXACT
    if gamma == 1:
        assert whole.mean_accepted == pytest.approx(wise.mean_accepted, abs=EXACT)


P4, Q4 = constant(0.5, 0.3, 0.15, 0.05), constant(0.1, 0.2, 0.3, 0.4)
TABLE = [
    (WithReplacementVerifier(), with_replacement, (0.5, 0.650, 0.685)),
    (WithoutReplacementVerifier(), without_replacement, (0.5, 0.679762, 0.780905)),
    (KSeqVerifier(), with_replacement, (0.5, 0.658443, 0.710003)),
    (TopKVerifier(), top_k, (0.05, 0.2, 0.5)),
]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("rule", "siblings", "accepted"), TABLE, ids=lambda value: type(value).__name__)
def test_acceptance_at_one_node(
    rule: Verifier, siblings: Callable[..., np.ndarray], accepted: tuple[float, ...], count: int
) -> None:
    found = emission(rule, P4, Q4, 0, parents=[-1] * count, siblings=siblings)
    assert found.mean_accepted == pytest.approx(accepted[count - 1], abs=5e-7)
    assert total_variation(found.joint, joint(P4, 2)) < EXACT


@pytest.mark.parametrize("parents", [(-1, -1), (-1, 0, -1, 2), (-1, 0, 0, 1)])
@pytest.mark.parametrize("siblings", [with_replacement, without_replacement])
def test_traversal_never_accepts_less_than_node_by_node(
    parents: tuple[int, ...], siblings: Callable[..., np.ndarray]
) -> None:
    gains = []
    for seed in range(2):
        target, draft = random_language(2, seed), random_language(2, 50 + seed)
        wise, whole = (
            emission(rule, target, draft, 0, parents=parents, siblings=siblings).mean_accepted
            for rule in (WithReplacementVerifier(), TraversalVerifier())
        )
        gains.append(whole - wise)
    assert min(gains) > -EXACT
    assert max(gains) > (1e-3 if len(parents) > 2 else -EXACT)  # a single depth leaves nothing to gain


def test_non_anticipation() -> None:
    """Withholding a token after having seen it costs the distribution, whatever the rule."""
    target, draft = constant(0.7, 0.3), constant(0.5, 0.5)
    for rule in (RejectionVerifier(), BlockVerifier(), TraversalVerifier(), WithReplacementVerifier()):
        found = emission(rule, target, draft, 1, submit=lambda chain: 1 - chain[0])
        np.testing.assert_allclose(found.joint.sum(1), [0.85, 0.15], atol=EXACT)
    keeping = emission(BlockVerifier(), target, draft, 2, submit=lambda chain: 1 + chain[0])  # only what comes after
    np.testing.assert_allclose(keeping.joint.sum((1, 2)), [0.7, 0.3], atol=EXACT)


# --- Mutants ----------------------------------------------------------------------------------------------------------


def error(rule: Verifier, target: Language = TARGET, draft: Language = DRAFT) -> float:
    found = emission(rule, target, draft, 2)
    return total_variation(found.joint, joint(target, 3))


def block_error(rule: Verifier) -> float:
    """On languages where prefixes owe something before the chain's end."""
    return error(rule, random_language(3, 1), random_language(3, 2))


class _NotStrict(RejectionVerifier):
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        thresholds = uniforms.draw(Purpose.ACCEPT, 0, draft.width)
        if draft.probs is not None:
            thresholds = thresholds * token_probs(draft.probs, draft.tokens)
        accepted = accepted_prefix(draft, thresholds <= token_probs(target_probs[:, : draft.width], draft.tokens))
        probs = recovered_or_bonus_probs(draft, target_probs, accepted)
        return chain_verdict(draft, accepted, sample(probs, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]))


class _ReusesTheCoin(RejectionVerifier):
    """The recovered token is drawn with the uniform that decided the first draft."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        verdict = super().verify(draft, target_probs, uniforms)
        probs = recovered_or_bonus_probs(draft, target_probs, verdict.num_accepted)
        return replace(verdict, next_token=sample(probs, uniforms.draw(Purpose.ACCEPT, 0, 1)[:, 0]))


def test_strictness_is_seen_at_a_single_lattice_point() -> None:
    target, draft = constant(0.0, 0.5, 0.5), constant(0.5, 0.25, 0.25)
    assert emission(_NotStrict(), target, draft, 1).forbidden
    assert not emission(RejectionVerifier(), target, draft, 1).forbidden
    assert largest_error(_NotStrict()) == float("inf")


def test_a_reused_coin_is_caught() -> None:
    assert error(_ReusesTheCoin()) > 0.05


def _target_for(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Recovered tokens come from the target."""
    return lambda draft, target_probs, num_accepted, *_: target_probs[torch.arange(len(target_probs)), num_accepted]


def _bonus_from_draft(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def probs(draft: Draft, target_probs: Tensor, num_accepted: Tensor, *weights: Tensor) -> Tensor:
        assert draft.probs is not None
        right = original(draft, target_probs, num_accepted, *weights)
        return torch.where((num_accepted == draft.lengths)[:, None], draft.probs[:, -1], right)

    return probs


def _unweighted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The residual of token-wise rejection."""
    return lambda draft, target_probs, num_accepted, *_: original(draft, target_probs, num_accepted)


@pytest.mark.parametrize("mutation", [_target_for, _bonus_from_draft, _unweighted])
def test_wrong_last_tokens_of_block_verification(
    mutation: Callable[..., Callable[..., Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "recovered_or_bonus_probs", mutation(recovered_or_bonus_probs))
    assert block_error(BlockVerifier()) > 1e-3


class _BreaksEarly(BlockVerifier):
    """Stops at the first prefix that its coin refuses."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        cut = super().verify(draft, target_probs, uniforms).num_accepted
        for length in range(draft.width - 1, 0, -1):
            shorter = Draft(draft.tokens, draft.lengths.clamp(max=length), draft.probs)
            kept = self._kept_before_the_end(draft, shorter, target_probs, uniforms, length)
            cut = torch.where(kept, cut, cut.clamp(max=length - 1))
        weights = block._prefix_weights(draft, target_probs)
        probs = recovered_or_bonus_probs(draft, target_probs, cut, weights.gather(1, cut[:, None])[:, 0])
        return chain_verdict(draft, cut, sample(probs, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]))

    def _kept_before_the_end(
        self, draft: Draft, shorter: Draft, target_probs: Tensor, uniforms: Uniforms, length: int
    ) -> Tensor:
        weights = block._prefix_weights(draft, target_probs)[:, length]
        everyone = torch.arange(len(weights))
        chance = block._chance(draft, target_probs, weights, everyone, length)
        return (weights == 1) | (uniforms.draw(Purpose.ACCEPT, length - 1, 1)[:, 0] < chance)


def test_an_early_break_in_block_verification_is_caught() -> None:
    assert block_error(_BreaksEarly()) > 1e-3


def test_block_verification_without_its_denominator_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = block._chance
    monkeypatch.setattr(block, "_chance", lambda *a: right(*a).sqrt())
    assert block_error(BlockVerifier()) > 1e-3
    monkeypatch.setattr(block, "_chance", lambda *a: a[2])  # the weight itself, as at the end of the chain
    assert block_error(BlockVerifier()) > 1e-3


def _tree_error(rule: Verifier) -> float:
    siblings = without_replacement if rule.siblings is SiblingDraws.DISTINCT else with_replacement
    found = emission(rule, P4, Q4, 0, parents=(-1, -1, 0), siblings=siblings)
    return total_variation(found.joint, joint(P4, 3))


def test_siblings_tried_against_the_unchanged_target_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tree_error(WithReplacementVerifier()) < EXACT
    monkeypatch.setattr(multi_draft, "_residual", lambda owed, mass, *_: (owed, mass))
    assert _tree_error(WithReplacementVerifier()) > 0.01


def test_a_residual_that_forgets_its_mass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = multi_draft._residual
    monkeypatch.setattr(multi_draft, "_residual", lambda *a: (right(*a)[0], torch.ones_like(a[1])))
    assert _tree_error(WithReplacementVerifier()) > 0.01


def test_distinct_siblings_judged_as_independent_ones_are_caught() -> None:
    class Unstruck(WithReplacementVerifier):
        """Takes every child for a draw from what the eldest was drawn from."""

        def drawn_from(self, siblings: object, index: int, which: Tensor) -> Tensor | None:
            return super().drawn_from(siblings, 0, which)  # type: ignore[arg-type]

    found = emission(Unstruck(), P4, Q4, 0, parents=(-1, -1), siblings=without_replacement)
    assert total_variation(found.joint, joint(P4, 2)) > 0.01


@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_a_k_seq_threshold_below_the_solution_is_caught(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = multi_draft_k_seq.k_seq_threshold

    def lower(target: Tensor, draft_probs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        rho = right(target, draft_probs, count)[0] * factor
        return rho, torch.minimum(draft_probs, target / rho[:, None]).sum(-1)

    monkeypatch.setattr(multi_draft_k_seq, "k_seq_threshold", lower)
    assert _tree_error(KSeqVerifier()) > 1e-3


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_a_k_seq_threshold_above_the_solution_is_lossless(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = multi_draft_k_seq.k_seq_threshold

    def higher(target: Tensor, draft_probs: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        rho = right(target, draft_probs, count)[0] * factor
        return rho, torch.minimum(draft_probs, target / rho[:, None]).sum(-1)

    monkeypatch.setattr(multi_draft_k_seq, "k_seq_threshold", higher)
    assert _tree_error(KSeqVerifier()) < EXACT


def test_traversal_that_keeps_a_parents_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(traversal._State):
        def leave(self, rows: Tensor, nodes: Tensor, above: Tensor) -> Tensor:
            before = self._weights.clone()
            kept = super().leave(rows, nodes, above)
            self._weights.copy_(before)
            return kept

    assert _tree_error(TraversalVerifier()) < EXACT
    monkeypatch.setattr(traversal, "_State", Keeps)
    assert _tree_error(TraversalVerifier()) > 0.01


def test_a_coupled_rule_that_skips_a_position_is_caught() -> None:
    class Shifted(CoupledVerifier):
        def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
            verdict = super().verify(draft, target_probs, uniforms)
            first = uniforms.choose(target_probs[:, 0], 0)  # the noise of a position that has been decided
            return replace(verdict, next_token=torch.where(verdict.num_accepted > 0, first, verdict.next_token))

    assert error(Shifted()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("parents", [parents for _, parents in TREES])
@pytest.mark.parametrize(
    "rule",
    [rule for rule in LOSSLESS if rule.accepts_trees and not rule.greedy_only],
    ids=lambda rule: type(rule).__name__,
)
def test_trees_on_larger_vocabularies(rule: Verifier, parents: tuple[int, ...]) -> None:
    target, draft = random_language(3, 31), random_language(3, 32)
    siblings = without_replacement if rule.siblings is SiblingDraws.DISTINCT else with_replacement
    found = emission(rule, target, draft, 0, parents=parents, siblings=siblings)
    assert total_variation(found.joint, joint(target, found.joint.ndim)) < EXACT
