"""What holds for every rule: rows are judged alone, arguments are left alone, nothing impossible is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.bench.rule_times import time_rules
from specdec.errors import UsageError
from specdec.sampling.distributions import one_hot, sample
from specdec.sampling.uniforms import Purpose, Uniforms, request_key
from specdec.testing.exact import LatticeUniforms
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import SiblingDraws, Verifier
from specdec.verifiers.block import BlockVerifier
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.multi_draft import WithReplacementVerifier
from specdec.verifiers.multi_draft_k_seq import KSeqVerifier, k_seq_threshold
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.multi_draft_without_replacement import WithoutReplacementVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.traversal import TraversalVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from specdec.verifiers.typical import TypicalVerifier

CHAIN_RULES: list[Verifier] = [RejectionVerifier(), BlockVerifier(), CoupledVerifier(), TypicalVerifier()]
TREE_RULES: list[Verifier] = [
    WithReplacementVerifier(),
    WithoutReplacementVerifier(),
    TopKVerifier(),
    KSeqVerifier(),
    TraversalVerifier(),
]
RULES = [*CHAIN_RULES, *TREE_RULES]
FIELDS = ("path", "num_accepted", "num_examined", "next_token")


def name(value: object) -> str:
    return type(value).__name__


def random_step(seed: int, rule: Verifier, *, with_probs: bool = True, sharp: float = 1.0) -> tuple[Draft, Tensor]:
    """Ragged drafts, trees where the rule takes them, over distributions with many zeros; padding is NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, width, vocab_size = 4, seed % 7, 3 + seed % 5
    logits = torch.randn(batch, width + 1, vocab_size, generator=generator) * sharp
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    logits[..., 0] = logits[..., 0].clamp(min=-3)
    target = logits.softmax(-1)
    by_parent = torch.rand(batch, width + 1, vocab_size, generator=generator)
    by_parent /= by_parent.sum(-1, keepdim=True)
    lengths = torch.randint(0, width + 1, (batch,), generator=generator)
    lengths[0] = width
    parents = torch.stack(
        [torch.randint(-1, max(node, 1), (batch,), generator=generator) for node in range(width)]
        or [torch.empty(batch, dtype=torch.long)],
        dim=1,
    )[:, :width]
    parents = torch.minimum(parents, torch.arange(width) - 1)
    if not rule.accepts_trees:
        parents = torch.arange(-1, width - 1).expand(batch, -1)
    tokens, probs = torch.full((batch, width), PADDING), torch.full((batch, width, vocab_size), torch.nan)
    for row in range(batch):
        for node in range(int(lengths[row])):
            own = by_parent[row, parents[row, node] + 1].clone()
            elder = tokens[row, :node][parents[row, :node] == parents[row, node]]
            if rule.siblings is SiblingDraws.DISTINCT:
                own[elder] = 0
                own = own / own.sum() if own.sum() > 0 else own.index_fill(0, torch.arange(vocab_size), 1 / vocab_size)
            probs[row, node] = own
            tokens[row, node] = sample(own[None], torch.rand(1, generator=generator, dtype=torch.float64))
    inside = torch.arange(width) < lengths[:, None]
    target[:, 1:][~inside] = torch.nan
    kept = parents.masked_fill(~inside, PADDING) if rule.accepts_trees else None
    return Draft(tokens, lengths, probs if with_probs else None, kept), target


def uniforms_for(rows: range, seed: int) -> Uniforms:
    keys = [request_key(seed, str(row)) for row in rows]
    return Uniforms(keys, [seed + row for row in rows], positions=[10 * row for row in rows])


def row_of(draft: Draft, row: int) -> Draft:
    length = int(draft.lengths[row])
    probs, parents = (None if part is None else part[row : row + 1, :length] for part in (draft.probs, draft.parents))
    return Draft(draft.tokens[row : row + 1, :length], draft.lengths[row : row + 1], probs, parents)


def decisions(verdict: Verdict, row: int) -> tuple[list[int], int, int, int]:
    path = [node for node in verdict.path[row].tolist() if node != PADDING]
    return path, int(verdict.num_accepted[row]), int(verdict.num_examined[row]), int(verdict.next_token[row])


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), with_probs=st.booleans())
@pytest.mark.parametrize("rule", RULES, ids=name)
def test_rows_are_judged_alone_and_nothing_impossible_is_kept(rule: Verifier, seed: int, with_probs: bool) -> None:
    draft, target = random_step(seed, rule, with_probs=with_probs)
    together = rule.verify(draft, target, uniforms_for(range(4), seed))
    for row in range(4):
        length = int(draft.lengths[row])
        alone = rule.verify(
            row_of(draft, row), target[row : row + 1, : length + 1], uniforms_for(range(row, row + 1), seed)
        )
        assert decisions(alone, 0) == decisions(together, row)
        path, accepted, examined, next_token = decisions(together, row)
        assert len(path) == accepted
        assert accepted <= examined <= min(accepted + 1, length)
        above = -1
        for node in path:
            assert draft.parents is None or int(draft.parents[row, node]) == above
            assert target[row, above + 1, draft.tokens[row, node]] > 0
            above = node
        assert target[row, above + 1, next_token] > 0


@pytest.mark.parametrize("rule", RULES, ids=name)
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_arguments_are_left_alone_and_the_verdict_repeats(rule: Verifier, seed: int) -> None:
    draft, target = random_step(seed, rule)
    parts = [part for part in (draft.tokens, draft.lengths, draft.probs, draft.parents, target) if part is not None]
    copies = [part.clone() for part in parts]
    first, second = (rule.verify(draft, target, uniforms_for(range(4), seed)) for _ in range(2))
    for part, copy in zip(parts, copies, strict=True):
        torch.testing.assert_close(part, copy, rtol=0, atol=0, equal_nan=True)
    for field in FIELDS:
        assert torch.equal(getattr(first, field), getattr(second, field))


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_a_token_that_the_target_cannot_emit_is_refused_even_at_zero(rule: Verifier) -> None:
    target = torch.tensor([[[0.5, 0.0, 0.5]] * 2]).double()
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    uniforms = LatticeUniforms(dict.fromkeys((Purpose.ACCEPT, Purpose.TARGET, Purpose.COUPLED), zeros))
    for probs in (None, torch.tensor([[[0.25, 0.5, 0.25]]]).double()):
        verdict = rule.verify(Draft(torch.tensor([[1]]), torch.tensor([1]), probs), target, uniforms)
        assert int(verdict.num_accepted) == 0
        assert int(verdict.next_token) in (0, 2)


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_empty_drafts_are_plain_sampling(rule: Verifier) -> None:
    target = torch.rand(30, 1, 7)
    uniforms = uniforms_for(range(30), 1)
    verdict = rule.verify(Draft.empty(30), target, uniforms)
    plain = sample(target[:, 0], uniforms.draw(Purpose.TARGET, 0, 1)[:, 0])
    wanted = uniforms.choose(target[:, 0], 0) if rule.coupled else plain
    assert torch.equal(verdict.next_token, wanted)
    assert verdict.path.shape == (30, 0)
    assert int(verdict.num_accepted.sum() + verdict.num_examined.sum()) == 0


@pytest.mark.parametrize("seed", range(4, 14))
@pytest.mark.parametrize("rule", RULES, ids=name)
def test_at_temperature_zero_it_is_greedy(rule: Verifier, seed: int) -> None:
    draft, target = random_step(seed, rule, with_probs=False)
    certain = one_hot(target.nan_to_num().argmax(-1), target.shape[-1])
    found = rule.verify(draft, certain, uniforms_for(range(4), seed))
    wanted = (GreedyTreeVerifier() if rule.accepts_trees else GreedyVerifier()).verify(draft, certain, Uniforms([], []))
    for row in range(4):
        assert decisions(found, row) == decisions(wanted, row)


@pytest.mark.parametrize("rule", [*CHAIN_RULES, GreedyVerifier()], ids=name)
def test_chain_rules_refuse_trees(rule: Verifier) -> None:
    draft = Draft(torch.tensor([[0, 1]]), torch.tensor([2]), parents=torch.tensor([[-1, -1]]))
    for vocab_size in (2, 100):
        with pytest.raises(UsageError, match="choose a verifier that accepts trees"):
            rule.verify(draft, one_hot(torch.tensor([[0, 0, 0]]), vocab_size), uniforms_for(range(1), 0))


@pytest.mark.parametrize("seed", range(3, 12))
@pytest.mark.parametrize("rule", [WithReplacementVerifier(), WithoutReplacementVerifier(), KSeqVerifier()], ids=name)
def test_on_a_chain_tree_rules_are_token_wise_rejection(rule: Verifier, seed: int) -> None:
    draft, target = random_step(seed, RejectionVerifier())
    found, wanted = (r.verify(draft, target, uniforms_for(range(4), seed)) for r in (rule, RejectionVerifier()))
    for row in range(4):
        assert decisions(found, row) == decisions(wanted, row)


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("seed", range(3, 30))
def test_on_a_chain_traversal_is_block_verification(seed: int, with_probs: bool) -> None:
    draft, target = random_step(seed, BlockVerifier(), with_probs=with_probs)
    found, wanted = (
        r.verify(draft, target, uniforms_for(range(4), seed)) for r in (TraversalVerifier(), BlockVerifier())
    )
    for row in range(4):
        assert decisions(found, row) == decisions(wanted, row)


@pytest.mark.parametrize("seed", [4, 5, 6, 12])
def test_no_more_than_three_tensors_as_wide_as_the_step(seed: int) -> None:
    """What a rule allocates, counted operation by operation; views are free."""
    counts = {}
    for rule in RULES:
        draft, target = random_step(seed, rule)
        vocab_size = 300
        wide = Draft(draft.tokens, draft.lengths, _widened(draft.probs, vocab_size), draft.parents)
        big = _widened(target, vocab_size)
        assert big is not None
        with _Allocations(threshold=draft.width * 4 * vocab_size) as seen:
            rule.verify(wide, big, uniforms_for(range(4), seed))
        counts[name(rule)] = seen.count
    assert max(counts.values()) <= 3, counts
    assert counts["TraversalVerifier"] >= 1  # its copy of the target, so that something is seen at all


def _widened(probs: Tensor | None, vocab_size: int) -> Tensor | None:
    return None if probs is None else torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[-1]))


class _Allocations(TorchDispatchMode):
    """Counts new tensors of at least `threshold` elements."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold, self.count = threshold, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        own = {part.untyped_storage().data_ptr() for part in args if isinstance(part, Tensor)}
        for part in out if isinstance(out, tuple) else (out,):
            new = isinstance(part, Tensor) and part.untyped_storage().data_ptr() not in own
            self.count += new and part.numel() >= self.threshold
        return out


# --- Rules for several drafts -----------------------------------------------------------------------------------------


def siblings_at_the_root(tokens: list[int], probs: list[list[float]] | None) -> Draft:
    parents = torch.full((1, len(tokens)), -1)
    table = None if probs is None else torch.tensor([probs], dtype=torch.float64)
    return Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), table, parents)


def test_without_replacement_takes_either_way_of_reporting() -> None:
    target = torch.rand(1, 4, 4, dtype=torch.float64)
    target /= target.sum(-1, keepdim=True)
    own = [0.1, 0.2, 0.3, 0.4]
    conditional = [own, [0.1 / 0.7, 0.2 / 0.7, 0, 0.4 / 0.7], [0, 0.2 / 0.6, 0, 0.4 / 0.6]]
    for step in range(200):
        uniforms = Uniforms([1], [step])
        node, each = (
            WithoutReplacementVerifier().verify(siblings_at_the_root([2, 0, 3], probs), target, uniforms)
            for probs in ([own] * 3, conditional)
        )
        assert decisions(node, 0) == decisions(each, 0)


def test_an_exhausted_draft_is_uniform_over_untried_tokens() -> None:
    """The second child of a one-hot draft: whatever is reported, it is judged as one of two equally likely tokens."""
    target = torch.tensor([[[0.2, 0.5, 0.3]] * 3], dtype=torch.float64)
    draft = siblings_at_the_root([0, 1], [[1.0, 0, 0], [1.0, 0, 0]])
    for second, accepted in [(0.9, 1), (1 - 1e-9, 1)]:  # residual (0, 5/8, 3/8) over (0, 1/2, 1/2): always kept
        coins = torch.tensor([[0.5, second]], dtype=torch.float64)
        verdict = WithoutReplacementVerifier().verify(
            draft, target, LatticeUniforms({Purpose.ACCEPT: coins, Purpose.TARGET: coins})
        )
        assert int(verdict.num_accepted) == accepted


@pytest.mark.parametrize(
    ("rule", "tokens", "probs", "message"),
    [
        (WithoutReplacementVerifier(), [1, 1], [[0.5, 0.5], [0.5, 0.5]], "one token twice"),
        (KSeqVerifier(), [0, 1], [[0.5, 0.5], [0.0, 1.0]], "drawn from different distributions"),
    ],
    ids=["twice", "different"],
)
def test_siblings_that_a_rule_cannot_judge_are_refused(
    rule: Verifier, tokens: list[int], probs: list[list[float]], message: str
) -> None:
    coins = torch.full((1, 2), 0.999, dtype=torch.float64)
    target = torch.tensor([[[0.5, 0.5]] * 3], dtype=torch.float64) * torch.tensor([1.0, 0.5])
    with pytest.raises(UsageError, match=message):
        rule.verify(
            siblings_at_the_root(tokens, probs), target, LatticeUniforms({Purpose.ACCEPT: coins, Purpose.TARGET: coins})
        )


def test_k_seq_threshold_solves_its_equation() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        target, draft = (torch.rand(50, 9, generator=generator, dtype=dtype) ** 3 for _ in range(2))
        target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
        count = torch.arange(50) % 5 + 1
        rho, beta = k_seq_threshold(target, draft, count)
        torch.testing.assert_close(1 - (1 - beta) ** count, rho * beta, rtol=tolerance, atol=tolerance)
        assert bool(((rho >= 1 - tolerance) & (rho <= count)).all())
        torch.testing.assert_close(rho[count == 1], torch.ones_like(rho[count == 1]), rtol=tolerance, atol=tolerance)


def test_k_seq_with_nothing_in_common() -> None:
    """No child can be kept, and the target is owed whole."""
    target = torch.tensor([[[0.0, 0.25, 0.75]] * 3], dtype=torch.float64)
    draft = siblings_at_the_root([0, 0], [[1.0, 0, 0]] * 2)
    coins = torch.tensor([[0.0, 0.0], [0.2, 0.9]], dtype=torch.float64)
    for row in coins:
        uniforms = LatticeUniforms({Purpose.ACCEPT: torch.zeros(1, 2), Purpose.TARGET: row[None, :1]})
        verdict = KSeqVerifier().verify(draft, target, uniforms)
        assert decisions(verdict, 0) == ([], 0, 1, 1)


# --- Typical acceptance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [{"epsilon": -0.1}, {"epsilon": 1.1}, {"delta": float("nan")}, {"delta": 2.0}])
def test_thresholds_outside_the_unit_interval_are_refused(threshold: dict[str, float]) -> None:
    (key,) = threshold
    with pytest.raises(UsageError, match=rf"{key}=.*must be in \[0, 1\]"):
        TypicalVerifier(**threshold)


def test_typical_acceptance_follows_its_inequality() -> None:
    generator = torch.Generator().manual_seed(0)
    target = (torch.randn(300, 3, 40, generator=generator) * torch.linspace(0, 4, 300)[:, None, None]).softmax(-1)
    tokens = torch.randint(0, 40, (300, 2), generator=generator)
    verdict = TypicalVerifier(0.05, 0.6).verify(
        Draft(tokens, torch.full((300,), 2)), target, uniforms_for(range(300), 0)
    )
    nats = torch.distributions.Categorical(target[:, :2]).entropy()
    kept = target[:, :2].gather(2, tokens[..., None])[..., 0] > torch.minimum(
        torch.tensor(0.05), 0.6 * torch.exp(-nats)
    )
    assert torch.equal(verdict.num_accepted, kept.long().cumprod(1).sum(1))
    assert 0 < int(verdict.num_accepted.sum()) < 600


# --- Coupling ---------------------------------------------------------------------------------------------------------


def test_a_coupled_draft_is_kept_more_often_than_an_independent_one() -> None:
    batch, generator = 2000, torch.Generator().manual_seed(0)
    target = torch.softmax(torch.randn(20, generator=generator), 0).expand(batch, 2, -1)
    near = torch.softmax(target[0, 0].log() + 0.3 * torch.randn(20, generator=generator), 0)[None].expand(batch, -1)
    keys = [request_key(0, str(row)) for row in range(batch)]
    shares = {}
    for coupled in (False, True):
        uniforms = Uniforms(keys, [3] * batch, positions=[7] * batch, coupled=coupled)
        draft = Draft(uniforms.draft(near, 0)[:, None], torch.ones(batch, dtype=torch.long), near[:, None])
        shares[coupled] = float(CoupledVerifier().verify(draft, target, uniforms).num_accepted.double().mean())
    distance = float((target[0, 0] - near[0]).abs().sum() / 2)
    assert shares[True] > (1 - distance) / (1 + distance) - 0.03
    assert shares[False] < 0.3 < shares[True]


def test_the_timing_table_has_every_rule() -> None:
    table = time_rules(200, batch=2, gamma=4, repeats=2)
    assert set(table["repeat"]) == {0, 1}
    assert table.groupby("rule").size().eq(2).all()
    assert len(table) == 2 * 11
    assert (table["seconds"] > 0).all()
    assert table.query("rule == 'rejection'")["accepted"].mean() > 0.3
    only = time_rules(200, batch=2, gamma=4, repeats=1, rules={"mine": BlockVerifier()})
    assert only["rule"].tolist() == ["mine"]
