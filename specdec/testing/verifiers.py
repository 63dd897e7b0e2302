"""`check_verifier`: the contract of `specdec.verifiers.base.Verifier`, rule by rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from specdec.controllers.fixed import FixedController
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.errors import UsageError
from specdec.sampling.distributions import argmax, one_hot, sample
from specdec.sampling.uniforms import Purpose, Uniforms, request_key
from specdec.testing.cases import Bench, DrafterCase, as_factory
from specdec.testing.exact import Case, LatticeUniforms, cases_for, emission, total_variation
from specdec.testing.languages import joint, without_replacement
from specdec.testing.probes import LoggedUniforms
from specdec.testing.report import Inapplicable, Report, require, run_checks
from specdec.testing.tiny import tiny_target
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.base import SiblingDraws, Verifier
from specdec.verifiers.greedy import GreedyVerifier
from specdec.verifiers.tree import GreedyTreeVerifier

EXACT = 1e-12
"""Total variation up to which an enumerated joint is the target's: what rounding of float64 leaves."""

_SHAPES: tuple[tuple[int, ...], ...] = ((-1, -1, -1), (-1, 0, -1, 2), (-1, 0, 0, 1))
"""Trees, as each node's parent: siblings, two chains, a branch below the root."""

_FIELDS = ("path", "num_accepted", "num_examined", "next_token")


@dataclass
class VerifierCase:
    """A rule under check."""

    rule: Verifier
    bench: Bench = field(default_factory=Bench)


@dataclass(frozen=True)
class Question:
    """Arguments of `Verifier.verify`."""

    draft: Draft
    target_probs: Tensor
    uniforms: Uniforms

    def ask(self, rule: Verifier) -> Verdict:
        """The rule's answer."""
        return rule.verify(self.draft, self.target_probs, self.uniforms)

    def select(self, rows: list[int]) -> Question:
        """Some of the rows, as narrow as they are by themselves."""
        width = int(self.draft.lengths[rows].max())
        probs, parents = (None if p is None else p[rows, :width] for p in (self.draft.probs, self.draft.parents))
        draft = Draft(self.draft.tokens[rows, :width], self.draft.lengths[rows], probs, parents)
        return Question(draft, self.target_probs[rows, : width + 1], self.uniforms.select(rows))


def check_verifier(
    verifier: Verifier | Callable[[], Verifier],
    *,
    num_samples: int = 2000,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Put a verification rule through every rule of its contract; seconds.

    The heart is `check_exactness`: on vocabularies of two to four tokens everything a step can emit is enumerated, over
    all drafts and all uniforms, and compared with the target's own joint. A rule that declares itself lossy has its
    loss measured and reported instead. num_samples: sampled requests of the one statistical check; it fails a rule
    without fault with probability `FALSE_ALARM`. only, skip: names of checks.

    Raises `ConformanceError`, an `AssertionError`, at the first rule that is broken.
    """
    rule: Verifier = as_factory(verifier, Verifier)()
    case = VerifierCase(rule, Bench(num_samples=num_samples, verifier=rule))
    return run_checks(type(rule).__name__, VERIFIER_CHECKS, case, only, skip)


def check_declarations(case: VerifierCase) -> None:
    """What a rule declares is True or False."""
    flags = ("lossless", "greedy_only", "accepts_trees", "tokenwise", "coupled", "synthetic", "greedy_when_certain")
    for name in flags:
        value = getattr(case.rule, name)
        require(isinstance(value, bool), f"{name} is {value!r}, not True or False")


def check_verdict_form(case: VerifierCase) -> None:
    """A verdict is a path from the root down, counts that agree with it, and a token of the vocabulary."""
    for question in _questions(case.rule):
        verdict = question.ask(case.rule)
        for row, length in enumerate(question.draft.lengths.tolist()):
            _require_path(question.draft, verdict, row, length)
            token, size = int(verdict.next_token[row]), question.target_probs.shape[-1]
            require(0 <= token < size, f"next_token of row {row} is {token}, outside a vocabulary of {size}")
        chain = question.draft.parents is None
        if chain and case.rule.tokenwise:
            wanted = torch.minimum(verdict.num_accepted + 1, question.draft.lengths)
            same = torch.equal(verdict.num_examined, wanted)
            found = f"{verdict.num_examined.tolist()}, not {wanted.tolist()}"
            require(same, f"num_examined is {found}: everything up to and including the first rejection")


def _require_path(draft: Draft, verdict: Verdict, row: int, length: int) -> None:
    path, count = verdict.path[row].tolist(), int(verdict.num_accepted[row])
    kept = path[:count]
    form = len(kept) == count and set(path[count:]) <= {PADDING}
    require(form, f"row {row} has path {path} and num_accepted {count}; PADDING follows what was accepted")
    for above, node in zip([-1, *kept], kept, strict=False):
        known = 0 <= node < length
        require(known, f"row {row} accepts node {node}, and its draft has {length}")
        parent = node - 1 if draft.parents is None else int(draft.parents[row, node])
        require(parent == above, f"row {row} accepts node {node} after {above}, and its parent is {parent}")
    examined, end = int(verdict.num_examined[row]), kept[-1] if kept else -1
    more = end + 1 < length if draft.parents is None else end in draft.parents[row, :length].tolist()
    require(examined <= count or more, f"row {row} has num_examined {examined}, and nothing follows node {end}")
    require(count <= examined <= length, f"row {row} has num_examined {examined}, {count} accepted of {length} drafted")


def check_purity(case: VerifierCase) -> None:
    """Asked twice it answers the same, and its arguments are as before."""
    for question in _questions(case.rule):
        before = [part.clone() for part in _parts(question)]
        first, second = question.ask(case.rule), question.ask(case.rule)
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(_parts(question), before, strict=True))
        require(same, "it wrote to its arguments")
        for name in _FIELDS:
            one, two = getattr(first, name), getattr(second, name)
            require(torch.equal(one, two), f"asked twice the same, {name} was {one.tolist()} and then {two.tolist()}")


def check_randomness(case: VerifierCase) -> None:
    """It never looks at the uniforms that drafts were drawn with."""
    for question in _questions(case.rule):
        purposes: set[Purpose] = set()
        replace(question, uniforms=LoggedUniforms(question.uniforms, purposes)).ask(case.rule)
        taken = purposes & {Purpose.DRAFT, Purpose.ORACLE}
        require(not taken, f"it drew uniforms of {', '.join(p.name for p in taken)}, which decided what was drafted")


def check_batch_invariance(case: VerifierCase) -> None:
    """A row's verdict is the same alone, in a ragged batch, and in another order; padding is not looked at."""
    for question in _questions(case.rule):
        batch = len(question.draft.lengths)
        together = question.ask(case.rule)
        for rows in [[row] for row in range(batch)] + [list(reversed(range(batch)))]:
            apart = question.select(rows).ask(case.rule)
            for name in ("num_accepted", "num_examined", "next_token"):
                wanted, found = getattr(together, name)[rows].tolist(), getattr(apart, name).tolist()
                require(wanted == found, f"{name} of rows {rows} is {found} by themselves, and {wanted} in a batch")


def check_trees(case: VerifierCase) -> None:
    """A rule for chains refuses drafts with parents, with `UsageError`."""
    if case.rule.accepts_trees:
        raise Inapplicable("it accepts trees")
    question = next(iter(_questions(case.rule)))
    parents = torch.full_like(question.draft.tokens, -1)
    try:
        replace(question, draft=replace(question.draft, parents=parents)).ask(case.rule)
    except UsageError:
        return
    require(False, "it does not declare accepts_trees, and took a draft with parents")


def check_empty_draft(case: VerifierCase) -> None:
    """Without a draft the token is drawn from the target: a step is plain decoding."""
    probs = torch.tensor([0.0, 1.0] if case.rule.greedy_only else [0.3, 0.7], dtype=torch.float64)
    cells = (torch.arange(10, dtype=torch.float64)[:, None] + 0.5) / 10  # [10, 1], on which every step is a tenth
    uniforms = LatticeUniforms(dict.fromkeys((Purpose.ACCEPT, Purpose.TARGET, Purpose.COUPLED), cells))
    verdict = case.rule.verify(Draft.empty(10), probs.expand(10, 1, 2), uniforms)
    counts = torch.bincount(verdict.next_token, minlength=2).tolist()
    wanted = (10 * probs).round().long().tolist()
    require(counts == wanted, f"without a draft, of ten steps {counts} emit each of two tokens, not {wanted}")


def check_greedy(case: VerifierCase) -> None:
    """At temperature 0 it keeps the draft as far as it is the target's argmax, and then emits the argmax."""
    if not case.rule.lossless:
        raise Inapplicable("it declares itself lossy")
    for question in _questions(case.rule, chains_only=True):
        choice = one_hot(argmax(question.target_probs.nan_to_num()), question.target_probs.shape[-1])
        certain = replace(question, target_probs=choice, draft=replace(question.draft, probs=None))
        wanted, found = certain.ask(GreedyVerifier()), certain.ask(case.rule)
        for name in ("num_accepted", "next_token"):
            right, own = getattr(wanted, name).tolist(), getattr(found, name).tolist()
            require(right == own, f"at temperature 0 {name} is {own}, and greedy verification says {right}")


def check_certain(case: VerifierCase) -> None:
    """Where it declares greedy_when_certain, one-hot distributions are decided as by `GreedyTreeVerifier`."""
    if not case.rule.greedy_when_certain:
        raise Inapplicable("it does not declare greedy_when_certain")
    for question in _questions(case.rule):
        choice = one_hot(argmax(question.target_probs.nan_to_num()), question.target_probs.shape[-1])
        certain = replace(question, target_probs=choice, draft=replace(question.draft, probs=None))
        wanted, found = certain.ask(GreedyTreeVerifier()), certain.ask(case.rule)
        for name in ("num_accepted", "num_examined", "next_token"):
            right, own = getattr(wanted, name).tolist(), getattr(found, name).tolist()
            require(right == own, f"it declares greedy_when_certain, and {name} is {own} where greedy has {right}")


def check_exactness(case: VerifierCase) -> str:
    """What it emits has exactly the target's joint, enumerated over all drafts and uniforms (1e-12)."""
    worst, questions = 0.0, list(cases_for(case.rule))
    for asked in questions:
        found = emission(
            case.rule,
            asked.target,
            asked.draft,
            asked.gamma,
            parents=asked.parents,
            siblings=asked.siblings,
            deterministic=asked.deterministic,
        )
        error = total_variation(found.joint, joint(asked.target, found.joint.ndim))
        if case.rule.lossless:
            where = _described(asked)
            require(not found.forbidden, f"{where}, it can emit a token that the target never does")
            require(error <= EXACT, f"{where}, what it emits is {error:.3g} from the target in total variation")
        worst = max(worst, error)
    if not case.rule.lossless:
        return f"declared lossy: total variation up to {worst:.3f} on {len(questions)} languages"
    return f"total variation at most {worst:.1e} on {len(questions)} languages"


def _described(case: Case) -> str:
    size = len(case.target(()))
    if case.parents is not None:
        return f"with {size} tokens and trees of parents {list(case.parents)} drawn {case.siblings.__name__}"
    if case.deterministic is not None:
        return f"with {size} tokens and the deterministic draft {list(case.deterministic)}"
    return f"with {size} tokens and chains of {case.gamma}"


def check_decoding(case: VerifierCase) -> str:
    """In the engine output is plain decoding's at temperature 0 and has the target's joint at temperature 1."""
    if not case.rule.lossless:
        raise Inapplicable("it declares itself lossy")
    drafting = DrafterCase(lambda: DraftModelDrafter(tiny_target(noise=0.3)), case.bench)
    requests = case.bench.requests()
    _, traces = drafting.run(requests, FixedController(4))
    case.bench.require_plain_output(requests, traces, "four draft tokens a step")
    if case.rule.greedy_only:
        return "temperature 0 only"
    _, traces = drafting.sampled
    return f"p = {case.bench.require_target_joint(traces):.2g}"


def _questions(rule: Verifier, *, chains_only: bool = False) -> Iterator[Question]:
    """Random arguments a rule must be able to answer: ragged batches of five, vocabulary of six, padding poisoned."""
    shapes: list[tuple[int, ...] | None] = [None, *(_SHAPES if rule.accepts_trees and not chains_only else ())]
    for seed, (parents, one_hot_drafts) in enumerate(product(shapes, (False, True))):
        yield _question(seed, rule, parents, one_hot_drafts)
        yield _question(100 + seed, rule, parents, one_hot_drafts)


def _question(seed: int, rule: Verifier, parents: tuple[int, ...] | None, one_hot_drafts: bool) -> Question:
    generator = torch.Generator().manual_seed(seed)
    batch, width, vocab_size = 5, 4 if parents is None else len(parents), 6

    def distributions(*shape: int) -> Tensor:
        probs = torch.rand(*shape, vocab_size, generator=generator) ** 3
        probs = torch.where(probs < 0.1, 0.0, probs) + 1e-3 * one_hot(torch.zeros(shape, dtype=torch.long), vocab_size)
        return probs / probs.sum(-1, keepdim=True)

    lengths = torch.tensor([width, 0, width - 1, 1, width])
    above = [-1] * width if parents is None else list(parents)
    target, drawn_from = distributions(batch, width + 1), distributions(batch, width)
    tokens = torch.empty(batch, width, dtype=torch.long)
    for node in range(width):
        first = node if parents is None else above.index(above[node])  # siblings are drawn from one distribution
        elder = [other for other in range(first, node) if above[other] == above[node]] if parents is not None else []
        drawn_from[:, node] = drawn_from[:, first]
        if rule.siblings is SiblingDraws.DISTINCT and elder:
            drawn_from[:, node] = _without(drawn_from[:, first], tokens[:, elder])
        tokens[:, node] = sample(drawn_from[:, node], torch.rand(batch, generator=generator, dtype=torch.float64))
    if rule.greedy_only:
        target = one_hot(target.argmax(-1), vocab_size)
    beyond = torch.arange(width) >= lengths[:, None]
    tokens = tokens.masked_fill(beyond, PADDING)
    target[:, 1:][beyond] = math.nan
    drawn_from[beyond] = math.nan
    tree = None if parents is None else torch.tensor(parents).expand(batch, -1).masked_fill(beyond, PADDING)
    draft = Draft(tokens, lengths, None if one_hot_drafts else drawn_from, tree)
    keys = [request_key(seed, str(row)) for row in range(batch)]
    return Question(draft, target, Uniforms(keys, [3] * batch, positions=range(7, 7 + batch)))


def _without(probs: Tensor, tried: Tensor) -> Tensor:
    """probs [B, V] for the next of several distinct siblings, of which tried [B, N] were drawn before."""
    rows = zip(probs.numpy(), tried.tolist(), strict=True)
    return torch.stack([torch.from_numpy(without_replacement(row, tuple(elder))) for row, elder in rows]).to(probs)


def _parts(question: Question) -> list[Tensor]:
    draft = question.draft
    parts = (draft.tokens, draft.lengths, draft.probs, draft.parents, question.target_probs)
    return [part for part in parts if part is not None]


VERIFIER_CHECKS: tuple[Callable[[VerifierCase], str | None], ...] = (
    check_declarations,
    check_verdict_form,
    check_purity,
    check_randomness,
    check_batch_invariance,
    check_trees,
    check_empty_draft,
    check_greedy,
    check_certain,
    check_exactness,
    check_decoding,
)
