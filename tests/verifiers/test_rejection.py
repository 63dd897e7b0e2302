from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.sampling.distributions import one_hot, probabilities, sample
from specdec.sampling.uniforms import Purpose, Uniforms, request_key
from specdec.testing.exact import (
    LatticeUniforms,
    build_draft,
    build_target,
    chi_square_p_value,
    emission,
    emitted_tokens,
    total_variation,
)
from specdec.testing.languages import constant, joint, lattice_language
from specdec.types import PADDING, Draft, SamplingParams, Verdict
from specdec.verifiers import rejection
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.rejection import RejectionVerifier, accepted_prefix, chain_verdict

EXACT = 1e-12
P3, Q3 = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)
TARGET, DRAFT = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)


@pytest.mark.parametrize(("vocab_size", "gamma"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_emitted_joint_is_the_targets(vocab_size: int, gamma: int, seed: int) -> None:
    target, draft = lattice_language(vocab_size, seed), lattice_language(vocab_size, 100 + seed)
    emitted = emission(RejectionVerifier(), target, draft, gamma)
    assert total_variation(emitted.joint, joint(target, gamma + 1)) < EXACT


def test_expected_accepted_closed_form() -> None:
    emitted = emission(RejectionVerifier(), TARGET, DRAFT, 2)
    assert emitted.mean_accepted == pytest.approx(10 / 9, abs=EXACT)
    assert emitted.mean_examined == pytest.approx(1 + 2 / 3, abs=EXACT)  # the second only after the first was accepted


@pytest.mark.parametrize("chain", [(0, 0), (1, 0), (1, 2)])
def test_deterministic_drafts_are_one_hot(chain: tuple[int, ...]) -> None:
    target = lattice_language(3, 5)
    emitted = emission(RejectionVerifier(), target, target, 2, deterministic=chain)
    assert total_variation(emitted.joint, joint(target, 3)) < EXACT
    first, second = target(())[chain[0]], target(chain[:1])[chain[1]]
    assert emitted.mean_accepted == pytest.approx(first + first * second, abs=EXACT)


def test_ragged_drafts_that_look_only_back_keep_the_distribution() -> None:
    target, draft = lattice_language(2, 7), lattice_language(2, 8)
    emitted = emission(RejectionVerifier(), target, draft, 3, submit=lambda chain: 1 + chain[0] + chain[0] * chain[1])
    assert total_variation(emitted.joint, joint(target, 4)) < EXACT


def test_dropping_a_token_after_seeing_it_is_caught() -> None:
    target, draft = constant(0.7, 0.3), constant(0.5, 0.5)
    emitted = emission(RejectionVerifier(), target, draft, 1, submit=lambda chain: 1 - chain[0])
    np.testing.assert_allclose(emitted.joint.sum(1), [0.85, 0.15], atol=EXACT)


def _recovered_from_target(draft: Draft, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    return target_probs[torch.arange(len(target_probs)), num_accepted]


def _bonus_from_draft(draft: Draft, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    right = rejection_probs(draft, target_probs, num_accepted)
    assert draft.probs is not None
    complete = (num_accepted == draft.lengths)[:, None]
    return torch.where(complete, draft.probs[:, -1], right)


def _softmaxed_residual(draft: Draft, target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    return rejection_probs(draft, target_probs, num_accepted).softmax(-1)


rejection_probs = rejection.recovered_or_bonus_probs


@pytest.mark.parametrize(
    ("mutant", "distance"), [(_recovered_from_target, 1 / 9), (_bonus_from_draft, 4 / 27), (_softmaxed_residual, None)]
)
def test_oracle_catches_a_wrong_last_token(
    mutant: Callable[[Draft, Tensor, Tensor], Tensor], distance: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "recovered_or_bonus_probs", mutant)
    found = total_variation(emission(RejectionVerifier(), TARGET, DRAFT, 2).joint, joint(TARGET, 3))
    assert found > 0.05
    if distance is not None:
        assert found == pytest.approx(distance, abs=EXACT)


class _SurvivesRejection(RejectionVerifier):
    """The accept mask is counted instead of cut at its first refusal."""

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        kept = [self._alone(draft, target_probs, uniforms, node) for node in range(draft.width)]
        num_accepted = torch.stack(kept).sum(0)
        probs = rejection_probs(draft, target_probs, num_accepted)
        return chain_verdict(draft, num_accepted, sample(probs, uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]))

    def _alone(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms, node: int) -> Tensor:
        assert draft.probs is not None
        token = draft.tokens[:, node, None]
        ratio = target_probs[:, node].gather(1, token) / draft.probs[:, node].gather(1, token)
        return (uniforms.draw(Purpose.ACCEPT, node, 1) < ratio)[:, 0]


def test_oracle_catches_drafts_surviving_a_rejection() -> None:
    found = emission(_SurvivesRejection(), TARGET, DRAFT, 2)
    assert total_variation(found.joint, joint(TARGET, 3)) > 0.05


def test_nothing_after_the_first_rejection_survives() -> None:
    target = one_hot(torch.tensor([[0, 1, 0, 1]]), 2)
    verdict = RejectionVerifier().verify(Draft.from_chains([[0, 0, 0]]), target, Uniforms([1], [1]))
    assert verdict.path.tolist() == [[0, PADDING, PADDING]]
    assert (int(verdict.num_accepted), int(verdict.num_examined), int(verdict.next_token)) == (1, 2, 1)


def _fixed(batch: int, accept: float, target: float = 0.5, width: int = 4) -> LatticeUniforms:
    shape = (batch, width)
    return LatticeUniforms(
        {
            Purpose.ACCEPT: torch.full(shape, accept, dtype=torch.float64),
            Purpose.TARGET: torch.full((batch, 1), target, dtype=torch.float64),
        }
    )


@pytest.mark.parametrize("sampled", [True, False])
def test_token_the_target_cannot_emit_is_refused_even_at_zero(sampled: bool) -> None:
    draft_language = constant(0.5, 0.5, 0.0) if sampled else None
    draft = build_draft([(1,)], draft_language, 3)
    verdict = RejectionVerifier().verify(draft, build_target([(1,)], constant(0.5, 0.0, 0.5), 1), _fixed(1, 0.0, 0.0))
    assert int(verdict.num_accepted) == 0
    assert int(verdict.next_token) in (0, 2)


def test_draft_equal_to_target_is_always_accepted() -> None:
    language = lattice_language(3, 3)
    emitted = emission(RejectionVerifier(), language, language, 2)
    assert emitted.mean_accepted == pytest.approx(2, abs=EXACT)
    assert np.isfinite(emitted.joint).all()


def test_empty_residual_falls_back_to_the_target() -> None:
    # Equal up to rounding: the drafted token is refused by a hair, and nothing is left to recover from.
    target = torch.tensor([[[0.5 - 1e-16, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    draft = Draft(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[[0.5, 0.5]]], dtype=torch.float64))
    verdict = RejectionVerifier().verify(draft, target, _fixed(1, 1 - 2**-53, 0.75))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (0, 1)


def test_padding_is_neither_counted_nor_emitted_nor_read() -> None:
    chains = [(0, 1, 0), (1,), ()]
    draft, target = build_draft(chains, TARGET, 2), build_target(chains, TARGET, 3)  # NaN past each row's length
    verdict = RejectionVerifier().verify(draft, target, _fixed(3, 0.0))
    assert verdict.num_accepted.tolist() == verdict.num_examined.tolist() == [3, 1, 0]
    assert verdict.path.tolist() == [[0, 1, 2], [0, PADDING, PADDING], [PADDING] * 3]
    assert [tokens[:-1] for tokens in emitted_tokens(draft, verdict)] == chains
    assert set(verdict.next_token.tolist()) <= {0, 1}


def test_no_draft_is_plain_sampling() -> None:
    target = torch.rand(50, 1, 7)
    uniforms = Uniforms(range(50), [0] * 50)
    verdict = RejectionVerifier().verify(Draft.empty(50), target, uniforms)
    assert torch.equal(verdict.next_token, sample(target[:, 0], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0]))
    assert verdict.path.shape == (50, 0)
    assert verdict.num_accepted.sum() == verdict.num_examined.sum() == 0


@pytest.mark.parametrize("with_probs", [True, False])
def test_at_temperature_zero_it_is_greedy(with_probs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (200, 4, 3), generator=generator).float()  # many ties
    target = probabilities(logits, [SamplingParams()] * 200)
    lengths = torch.randint(0, 4, (200,), generator=generator)
    tokens = torch.randint(0, 3, (200, 3), generator=generator).masked_fill(
        torch.arange(3) >= lengths[:, None], PADDING
    )
    draft = Draft(tokens, lengths, one_hot(tokens.clamp(min=0), 3) if with_probs else None)
    uniforms = Uniforms(range(200), range(200))
    sampled, greedy = (rule.verify(draft, target, uniforms) for rule in (RejectionVerifier(), GreedyVerifier()))
    for field in ("path", "num_accepted", "num_examined", "next_token"):
        assert torch.equal(getattr(sampled, field), getattr(greedy, field))


def test_arguments_are_left_alone() -> None:
    chains = [(0, 1), (1,)]
    draft, target = build_draft(chains, DRAFT, 2), build_target(chains, TARGET, 2)
    assert draft.probs is not None
    copies = [tensor.clone() for tensor in (draft.tokens, draft.lengths, draft.probs, target)]
    RejectionVerifier().verify(draft, target, Uniforms([1, 2], [3, 4]))
    for tensor, copy in zip((draft.tokens, draft.lengths, draft.probs, target), copies, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_rows_are_judged_alone() -> None:
    chains = [(0, 1, 1), (1,), (), (0, 0)]
    keys, target = [11, 12, 13, 14], lattice_language(2, 21)
    together = RejectionVerifier().verify(
        build_draft(chains, DRAFT, 2), build_target(chains, target, 3), Uniforms(keys, [1, 2, 3, 4])
    )
    for row, chain in enumerate(chains):
        draft = build_draft([chain], DRAFT, 2)
        alone = RejectionVerifier().verify(
            draft, build_target([chain], target, len(chain)), Uniforms([keys[row]], [row + 1])
        )
        assert int(alone.num_accepted) == together.num_accepted[row]
        assert int(alone.next_token) == together.next_token[row]


def test_trees_are_refused() -> None:
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([2]), parents=torch.tensor([[-1, -1]]))
    with pytest.raises(UsageError, match="accepts trees"):
        accepted_prefix(draft, draft.tokens >= 0)


def _emitted_pairs(draft_purpose: Purpose, batch: int = 30_000) -> np.ndarray:
    """Counts of the first two emitted tokens, with the toolkit's own uniforms all the way through."""
    uniforms = Uniforms([request_key(0, str(i)) for i in range(batch)], [1] * batch)
    draws = uniforms.draw(draft_purpose, 0, 2)
    probs = torch.tensor(P3).expand(batch, 3, -1)
    draft_probs = torch.tensor(Q3).expand(batch, 2, -1)
    tokens = torch.stack([sample(draft_probs[:, i], draws[:, i]) for i in range(2)], 1)
    draft = Draft(tokens, torch.full((batch,), 2), draft_probs)
    verdict = RejectionVerifier().verify(draft, probs, uniforms)
    completion = np.random.default_rng(0).choice(3, size=batch, p=P3).tolist()
    counts = np.zeros((3, 3))
    for emitted, rest in zip(emitted_tokens(draft, verdict), completion, strict=True):
        counts[(*emitted, rest)[:2]] += 1
    return counts.ravel()


def test_own_uniforms_give_the_joint() -> None:
    expected = joint(constant(*P3), 2).ravel()
    assert chi_square_p_value(_emitted_pairs(Purpose.DRAFT), expected) > 1e-6  # the false-failure probability


def test_reusing_the_drafts_randomness_is_caught() -> None:
    expected = joint(constant(*P3), 2).ravel()
    assert chi_square_p_value(_emitted_pairs(Purpose.ACCEPT), expected) < 1e-6
