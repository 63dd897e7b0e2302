"""`check_drafter` passes every drafter that ships, and each of its checks catches a drafter made to break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.drafters.base import DraftContext, Drafter, StopDrafting
from specdec.drafters.cascade import CascadeDrafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_tree import EagleTreeDrafter, JointTree, StaticTree
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.none import NoDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter, SuffixTreeDrafter
from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.vocabulary.tokenizer import Tokenizer
from specdec.sampling.distributions import probabilities
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.testing import ConformanceError, check_drafter, tiny_target
from specdec.testing.drafters import DRAFTER_CHECKS
from specdec.types import PADDING, Draft, Verdict
from specdec.verifiers.coupled import CoupledVerifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from tests.drafts import write_eagle
from tests.fakes import TreeDrafter

SKIPPED = {
    "prompt_lookup": {"check_stop", "check_declared_probabilities"},
    "none": {"check_stop", "check_declared_probabilities", "check_rollback", "check_cascade"},
    "oracle": {"check_stop", "check_declared_probabilities", "check_sampled_losslessness"},
    "tree": {"check_stop", "check_declared_probabilities", "check_sampled_losslessness"},
    "suffix": {"check_stop", "check_declared_probabilities"},
    "suffix_tree": {"check_stop", "check_declared_probabilities"},
    "eagle_static_tree": {"check_declared_probabilities"},
    "eagle_joint_tree": {"check_declared_probabilities"},
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("drafts") / "head"
    return str(write_eagle(directory, tiny_target().model, torch.tensor([0, 2, 3, 4, 6, 8, 9])).directory)


@pytest.fixture(scope="module")
def drafters(head: str) -> dict[str, Callable[[], Drafter]]:
    noisy, short_sighted = tiny_target(noise=0.3), tiny_target(1, max_positions=20)
    return {
        "prompt_lookup": PromptLookupDrafter,
        "none": NoDrafter,
        "oracle": lambda: OracleDrafter(0.8),
        "tree": lambda: TreeDrafter(0.7),
        "draft_model": lambda: DraftModelDrafter(noisy),
        "short_sighted": lambda: DraftModelDrafter(short_sighted),
        "early_exit": lambda: EarlyExitDrafter(2),
        "suffix": SuffixDrafter,
        "suffix_tree": SuffixTreeDrafter,
        "eagle": lambda: EagleDrafter(head),
        "eagle_static_tree": lambda: EagleTreeDrafter(head, tree=StaticTree([3, 2, 1])),
        "eagle_joint_tree": lambda: EagleTreeDrafter(head, tree=JointTree(top_k=3, depth=4, num_nodes=8)),
        "cascade": lambda: CascadeDrafter(PromptLookupDrafter(), EagleDrafter(head)),
    }


@pytest.mark.parametrize(
    "name",
    [
        "prompt_lookup",
        "none",
        "oracle",
        "tree",
        "draft_model",
        pytest.param("short_sighted", marks=pytest.mark.slow),
        "early_exit",
        "suffix",
        "suffix_tree",
        "eagle",
        "eagle_static_tree",
        pytest.param("eagle_joint_tree", marks=pytest.mark.slow),
        "cascade",
    ],
)
def test_every_drafter_that_ships_conforms(name: str, drafters: dict[str, Callable[[], Drafter]]) -> None:
    report = check_drafter(drafters[name], num_samples=400)
    assert set(report.skipped) == SKIPPED.get(name, set())
    assert len(report.checked) + len(report.skipped) == len(DRAFTER_CHECKS)


# --- Mutants ----------------------------------------------------------------------------------------------------------


class Honest(Drafter):
    """Draws from a table of next-token logits by the last token of its own record of each slot's text."""

    scale = 1.0

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(target.vocab_size, target.vocab_size, generator=generator)
        self.texts: dict[int, list[int]] = {}

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        for slot, tokens in zip(context.slots, context.tokens, strict=True):
            self.texts[slot] = tokens.tolist()

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        limits = torch.tensor(self.limits(max_tokens))
        last, drawn, drawn_from = self.last(context), [], []
        lengths, alive = torch.zeros_like(limits), limits > 0
        for depth in range(1, int(limits.max()) + 1):
            probs = probabilities(self.scale * self.table[last][:, None], context.sampling)[:, 0]
            last = self.draw(probs, uniforms, depth - 1)
            drawn.append(last.masked_fill(~alive, PADDING))
            drawn_from.append(self.declared(probs))
            lengths += alive
            alive = self.alive(alive & (limits > depth), stop(probs, last, depth))
        if not int(lengths.max()):
            return Draft.empty(len(limits))
        width = int(lengths.max())
        return Draft(torch.stack(drawn, 1)[:, :width], lengths, torch.stack(drawn_from, 1)[:, :width])

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        for row, slot in enumerate(context.slots):
            self.texts[slot].append(int(verdict.next_token[row]))

    def reset(self, slot: int) -> None:
        self.texts.pop(slot, None)

    def limits(self, max_tokens: Sequence[int]) -> list[int]:
        return list(max_tokens)

    def last(self, context: DraftContext) -> Tensor:
        return torch.tensor([self.texts[slot][-1] for slot in context.slots])

    def draw(self, probs: Tensor, uniforms: Uniforms, node: int) -> Tensor:
        return uniforms.draft(probs, node)

    def declared(self, probs: Tensor) -> Tensor:
        return probs

    def alive(self, alive: Tensor, stopped: Tensor) -> Tensor:
        return alive & ~stopped


def test_the_honest_one_conforms() -> None:
    assert not check_drafter(Honest, num_samples=400).skipped


class ReadsAnUnknownLayer(Honest):
    hidden_layers = (9,)


class DeclaresHalf(Honest):
    def declared(self, probs: Tensor) -> Tensor:
        return probs / 2


class DeclaresItsTokenImpossible(Honest):
    def declared(self, probs: Tensor) -> Tensor:
        rest = torch.where(probs == probs.amax(-1, keepdim=True), 0.0, probs + 1e-3)
        return rest / rest.sum(-1, keepdim=True)


class WideAndEmpty(Honest):
    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        return Draft(torch.nn.functional.pad(draft.tokens, (0, 1), value=PADDING), draft.lengths)


class ShortPadding(Honest):
    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        return Draft(draft.tokens.clamp(min=0), draft.lengths, draft.probs)


class Overshoots(Honest):
    def limits(self, max_tokens: Sequence[int]) -> list[int]:
        return [limit + 1 for limit in max_tokens]


class NeverStops(Honest):
    def alive(self, alive: Tensor, stopped: Tensor) -> Tensor:
        return alive


class DropsWhatItWasStoppedAt(Honest):
    """The anticipation of ALGORITHMS.md: a token is withheld after it was seen."""

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        dropped = torch.zeros(context.batch_size, dtype=torch.long)

        def noted(probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
            answer = stop(probs, tokens, depth)
            dropped.copy_(dropped | answer.long())
            return answer

        draft = super().propose(context, max_tokens, noted, uniforms)
        lengths = draft.lengths - dropped
        width = int(lengths.max())
        tokens = draft.tokens.masked_fill(torch.arange(draft.width) >= lengths[:, None], PADDING)
        return Draft(tokens[:, :width], lengths, None if draft.probs is None else draft.probs[:, :width])


class WritesToMaxTokens(Honest):
    def limits(self, max_tokens: Sequence[int]) -> list[int]:
        found = list(max_tokens)
        max_tokens[0] = 0  # type: ignore[index]
        return found


class WritesToTheVerdict(Honest):
    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        super().observe(context, draft, verdict, hidden)
        verdict.next_token[:] = 0


class DrawsGlobally(Honest):
    def draw(self, probs: Tensor, uniforms: Uniforms, node: int) -> Tensor:
        return probs.multinomial(1)[:, 0]


class DrawsWithTheVerifiersUniforms(Honest):
    def draw(self, probs: Tensor, uniforms: Uniforms, node: int) -> Tensor:
        coins = uniforms.draw(Purpose.ACCEPT, node, 1)
        return torch.searchsorted(probs.double().cumsum(-1), coins)[:, 0].clamp(max=probs.shape[-1] - 1)


class SharperThanItSays(Honest):
    def draw(self, probs: Tensor, uniforms: Uniforms, node: int) -> Tensor:
        return uniforms.draft(probs**2, node)


class SharperFromTheSecondOn(Honest):
    def draw(self, probs: Tensor, uniforms: Uniforms, node: int) -> Tensor:
        return uniforms.draft(probs ** (2 if node == 1 else 1), node)


class FirstRowForAll(Honest):
    def last(self, context: DraftContext) -> Tensor:
        return super().last(context)[:1].expand(context.batch_size)


class NeverRollsBack(Honest):
    """Believes that everything it drafted was kept."""

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        super().observe(context, draft, verdict, hidden)
        for row, slot in enumerate(context.slots):
            if draft.lengths[row]:
                self.texts[slot].append(int(draft.tokens[row, draft.lengths[row] - 1]))


class CountsItsOwnTokens(Honest):
    """Knows where it stands from its own drafts, so a step that another drafter served leaves it behind."""

    def begin(self, context: DraftContext, hidden: Sequence[Tensor] | None) -> None:
        super().begin(context, hidden)
        self.lengths = dict.fromkeys(context.slots, 0) | dict(zip(context.slots, map(len, context.tokens), strict=True))

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
        for row, slot in enumerate(context.slots):
            self.lengths[slot] += min(int(verdict.num_accepted[row]), int(draft.lengths[row])) + 1

    def last(self, context: DraftContext) -> Tensor:
        places = zip(context.slots, context.tokens, strict=True)
        return torch.tensor([int(tokens[self.lengths[slot] - 1]) for slot, tokens in places])


class ResetsEverybody(Honest):
    def reset(self, slot: int) -> None:
        for other in self.texts:
            self.texts[other] = [0]


class RemembersNames(Honest):
    """Keeps a request's first token by its name, whatever comes later under it."""

    names: dict[str, int]

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        super().bind(target, tokenizer)
        self.names = {}

    def last(self, context: DraftContext) -> Tensor:
        own = [
            self.names.setdefault(name, int(text[0]))
            for name, text in zip(context.request_ids, context.tokens, strict=True)
        ]
        return (super().last(context) + torch.tensor(own)) % len(self.table)


class RunsPastTheWindow(Honest):
    """Looks up a position that the window does not have."""

    def propose(
        self, context: DraftContext, max_tokens: Sequence[int], stop: StopDrafting, uniforms: Uniforms
    ) -> Draft:
        np.zeros(64)[[len(tokens) + 4 for tokens in context.tokens]]
        return super().propose(context, max_tokens, stop, uniforms)


class SpoilsTheTarget(Honest):
    """Writes to weights that it shares with the target."""

    def bind(self, target: LanguageModel, tokenizer: Tokenizer | None) -> None:
        super().bind(target, tokenizer)
        self.shared = target.tables().embedding

    def last(self, context: DraftContext) -> Tensor:
        self.shared.mul_(-0.9)
        return super().last(context)


MUTANTS: list[tuple[str, type[Drafter], str]] = [
    ("check_declarations", ReadsAnUnknownLayer, "hidden_layers names layer 9, and the target has 0 to 3"),
    ("check_form", DeclaresHalf, "the probabilities of node 0 of row 0 sum to 0.5"),
    ("check_form", DeclaresItsTokenImpossible, "whose declared probability is 0"),
    ("check_form", WideAndEmpty, "tokens are 5 wide, and the longest row has 4 nodes"),
    ("check_form", ShortPadding, "after them instead of PADDING"),
    ("check_max_tokens", Overshoots, "row 0 is 2 deep, and max_tokens allowed 1"),
    ("check_stop", NeverStops, "stop said so at depth 1, and the draft is 4 deep"),
    ("check_stop", DropsWhatItWasStoppedAt, "`stop` withholds only later tokens"),
    ("check_arguments_are_left_alone", WritesToMaxTokens, "wrote to max_tokens"),
    ("check_arguments_are_left_alone", WritesToTheVerdict, "wrote to draft, verdict or hidden of observe"),
    ("check_randomness", DrawsGlobally, "drew from the global generator of torch"),
    ("check_randomness", DrawsWithTheVerifiersUniforms, "drew uniforms of ACCEPT"),
    ("check_declared_probabilities", SharperThanItSays, "draft node 0 do not come from the probabilities"),
    ("check_declared_probabilities", SharperFromTheSecondOn, "draft node 1 do not come from the probabilities"),
    ("check_batch_invariance", FirstRowForAll, "in a batch in another order, where alone it did otherwise"),
    ("check_rollback", NeverRollsBack, "some of them its own drafts, it drafted tokens"),
    ("check_cascade", CountsItsOwnTokens, "shown them 3 at a time"),
    ("check_reset", ResetsEverybody, "beside a request that had ended"),
    ("check_requests_are_independent", RemembersNames, "after another request, where fresh it did otherwise"),
    ("check_greedy_losslessness", SpoilsTheTarget, "greedy output is not plain decoding's: fault at output token"),
    ("check_sampled_losslessness", SharperThanItSays, "do not have the target's distribution"),
]


@pytest.mark.parametrize(("check", "mutant", "sentence"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_check_catches_what_it_is_for(check: str, mutant: type[Drafter], sentence: str) -> None:
    with pytest.raises(ConformanceError, match=sentence) as caught:
        check_drafter(mutant, only=[check])
    assert str(caught.value).startswith(f"{mutant.__name__} fails {check}: ")


def test_a_crash_says_which_check_it_came_from() -> None:
    with pytest.raises(IndexError) as caught:
        check_drafter(RunsPastTheWindow, only=["check_context_window"])
    assert "raised while RunsPastTheWindow was put through check_context_window" in caught.value.__notes__


def test_every_check_has_a_mutant() -> None:
    assert {check for check, _, _ in MUTANTS} | {"check_context_window"} == {c.__name__ for c in DRAFTER_CHECKS}


# --- The kit itself ---------------------------------------------------------------------------------------------------


def test_an_instance_is_copied_for_every_check() -> None:
    drafter = PromptLookupDrafter(max_ngram=4)
    assert check_drafter(drafter, only=["check_rollback", "check_form"]).checked == ("check_form", "check_rollback")


def test_the_report_says_what_was_skipped_and_why() -> None:
    report = check_drafter(OracleDrafter, only=["check_form", "check_stop"], skip={"check_form": "seen before"})
    assert report.skipped["check_form"] == "seen before"
    assert "never asks `stop`" in report.skipped["check_stop"]
    assert "OracleDrafter: 0 checks passed, 2 skipped" in str(report)


def test_other_rules_judge_the_same_drafter(drafters: dict[str, Callable[[], Drafter]]) -> None:
    checks = ["check_sampled_losslessness"]
    check_drafter(drafters["draft_model"], verifier=CoupledVerifier(), only=checks, num_samples=800)
    check_drafter(drafters["eagle_static_tree"], verifier=TopKVerifier(), only=checks, num_samples=800)


def test_what_cannot_be_checked_is_refused_in_one_sentence() -> None:
    computing_in_bfloat16 = tiny_target(dtype=torch.bfloat16)
    computing_in_bfloat16.model.compute_dtype = torch.bfloat16  # as on a GPU
    with pytest.raises(UsageError, match="'check_all' is no check; choose from check_declarations"):
        check_drafter(PromptLookupDrafter, only=["check_all"])
    with pytest.raises(UsageError, match="neither a Drafter nor a function"):
        check_drafter("lookup")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="check against dtype=float32"):
        check_drafter(PromptLookupDrafter, computing_in_bfloat16)
