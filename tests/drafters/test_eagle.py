"""The EAGLE drafter: what it proposes is what the head says when run from nothing, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.controllers.base import Controller
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.distill.networks import EagleNetwork, Examples, Frozen
from specdec.drafters.base import DraftContext, Drafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_tree import EagleTreeDrafter, JointTree, StaticTree, TreeShape
from specdec.drafters.none import NoDrafter
from specdec.errors import ModelError, UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading import LoadedModel, load_model
from specdec.models.loading.draft_checkpoint import DraftCheckpoint
from specdec.sampling.distributions import probabilities
from specdec.sampling.uniforms import Purpose, Uniforms
from specdec.types import PADDING, Draft, Request, Trace, Verdict
from specdec.verifiers.base import Verifier
from specdec.verifiers.multi_draft_top_k import TopKVerifier
from specdec.verifiers.rejection import RejectionVerifier
from specdec.verifiers.tree import GreedyTreeVerifier
from tests.drafts import HIDDEN_LAYERS, TRANSFORMER, eagle_weights, reference_logits, write_eagle
from tests.fakes import SpoilingController, StoppingController, make_request
from tests.test_lossless import FALSE_ALARM, SAMPLINGS, exact_joint, five_token_model, p_value, sampled_counts

DRAFT_VOCAB = torch.tensor([*range(200, 264), *range(0, 120)])
REQUESTS = [make_request("a", 9), make_request("b", 30), make_request("c", 1, max_new_tokens=40)]
TREES = [StaticTree([3, 2, 1]), JointTree(top_k=3, depth=4, num_nodes=10), JointTree(top_k=1, depth=3, num_nodes=9)]


@pytest.fixture(scope="module")
def head(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_eagle(tmp_path_factory.mktemp("drafts") / "head", target.model, DRAFT_VOCAB).directory)


@pytest.fixture(scope="module")
def plain(target: LoadedModel) -> list[Trace]:
    return decode(target, NoDrafter(), FixedController(0), REQUESTS)


def decode(target: LoadedModel, drafter: Drafter, controller: Controller, requests: Sequence[Request]) -> list[Trace]:
    verifier: Verifier = GreedyTreeVerifier() if drafter.proposes_trees else RejectionVerifier()
    return Engine(target.model, drafter, verifier, controller).generate(requests)


def tokens(traces: list[Trace]) -> list[tuple[int, ...]]:
    return [trace.token_ids for trace in traces]


def true_features(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """[T, n, d] of a sequence, by one forward over all of it."""
    cache = model.new_cache(1, len(ids))
    with torch.inference_mode():
        positions = torch.arange(len(ids))[None]
        output = model.forward(torch.tensor([ids]), positions, cache.view([0]), hidden_layers=HIDDEN_LAYERS)
    assert output.hidden is not None
    return output.hidden[0].clone()


class Checked:
    """Mixed into a drafter: recomputes from nothing, along every path of a draft, what the head says there."""

    target: LanguageModel
    weights: dict[str, Tensor]
    num_checked = 0

    def bind(self, target: LanguageModel, tokenizer: object) -> None:
        super().bind(target, None)  # type: ignore[misc]
        self.target = target
        self.weights = eagle_weights(target, DRAFT_VOCAB)

    def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor) -> None:
        for row, length in enumerate(draft.lengths.tolist()):
            for node in range(length):
                self.check(context, draft, row, node)
        super().observe(context, draft, verdict, hidden)  # type: ignore[misc]

    def check(self, context: DraftContext, draft: Draft, row: int, node: int) -> None:
        above = parent(draft, row, node)
        before = torch.cat(context.seen(draft.tokens, draft.parents)(row, above + 1))
        before = before[before != PADDING]  # nodes of other branches
        features = true_features(self.target, before[: len(context.tokens[row]) - 1].tolist())
        logits = reference_logits(self.weights, self.target, features, before)[-1]
        if draft.probs is None:
            siblings = [n for n in range(int(draft.lengths[row])) if parent(draft, row, n) == above]
            likeliest = DRAFT_VOCAB[logits.topk(len(siblings)).indices].tolist()
            assert sorted(draft.tokens[row, siblings].tolist()) == sorted(likeliest)
        else:
            full = torch.full((1, 1, context.vocab_size), -torch.inf)
            full[0, 0, DRAFT_VOCAB] = logits
            expected = probabilities(full, [context.sampling[row]])[0, 0]
            torch.testing.assert_close(draft.probs[row, node], expected, atol=1e-4, rtol=1e-3)
        self.num_checked += 1


def parent(draft: Draft, row: int, node: int) -> int:
    return node - 1 if draft.parents is None else int(draft.parents[row, node])


class CheckedChain(Checked, EagleDrafter):
    pass


class CheckedTree(Checked, EagleTreeDrafter):
    pass


class Walker(Verifier):
    """Accepts some way down from the root, whatever the target says, the last child of every node."""

    accepts_trees = True

    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        path = torch.full((len(draft.lengths), max(draft.width, 1)), PADDING)
        for row, length in enumerate(draft.lengths.tolist()):
            children, depth = [n for n in range(length) if parent(draft, row, n) < 0], 0
            while children and uniforms.draw(Purpose.ACCEPT, depth, 1)[row, 0] < 0.7:
                path[row, depth], depth = children[-1], depth + 1
                children = [n for n in range(length) if parent(draft, row, n) == path[row, depth - 1]]
        accepted = (path >= 0).sum(1)
        last = torch.cat((torch.full((len(path), 1), -1), path), dim=1).gather(1, accepted[:, None])[:, 0]
        return Verdict(path, accepted, accepted, target_probs.argmax(-1).gather(1, last[:, None] + 1)[:, 0])


@pytest.mark.parametrize("controller", [FixedController(3), SpoilingController(), StoppingController()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_chain_is_what_the_head_says_from_nothing(
    target: LoadedModel, head: str, controller: Controller, temperature: float
) -> None:
    drafter = CheckedChain(head)
    requests = [make_request(r.id, len(r.prompt_ids), temperature=temperature, max_new_tokens=12) for r in REQUESTS]
    traces = Engine(target.model, drafter, Walker(), controller).generate(requests)
    assert drafter.num_checked > 15
    accepted = [step.num_accepted - step.num_drafted for trace in traces for step in trace.steps if step.num_drafted]
    assert min(accepted) < 0 == max(accepted)


@pytest.mark.parametrize("tree", TREES)
def test_every_tree_is_what_the_head_says_from_nothing(target: LoadedModel, head: str, tree: TreeShape) -> None:
    drafter = CheckedTree(head, tree=tree)
    requests = [make_request(r.id, len(r.prompt_ids), max_new_tokens=10) for r in REQUESTS]
    traces = Engine(target.model, drafter, Walker(), SpoilingController()).generate(requests)
    assert drafter.num_checked > 15
    assert max(step.num_accepted for trace in traces for step in trace.steps) > 1


def test_the_head_is_run_as_it_is_trained(target: LoadedModel, head: str) -> None:
    """Every unrolled step of training, from several roots, against the head as the drafter's checks have it."""
    ids, roots = torch.tensor([*REQUESTS[1].prompt_ids]), [4, 11, 20]
    weights = eagle_weights(target.model, DRAFT_VOCAB)
    features, tables = true_features(target.model, ids.tolist()), target.model.tables()
    frozen = Frozen(tables.embedding.clone(), tables.head[DRAFT_VOCAB], torch.ones(32), 1e-5, DRAFT_VOCAB)
    network = EagleNetwork(DraftCheckpoint.find(head).config, frozen, num_features=2)
    names = {stored: name for name, stored in zip(network.state_dict(), network.stored(), strict=True)}
    network.load_state_dict({names[name]: weight for name, weight in weights.items() if name in names})
    scored = torch.isin(torch.arange(len(ids)), torch.tensor(roots))[None]
    examples = Examples(ids[None], features[None], features[None, :, -1], scored, torch.tensor([len(ids)]))
    with torch.no_grad():
        unrolled = [frozen.draft_logits(output) for output in network.unrolled(examples, 3)]
    for step, logits in enumerate(unrolled):
        for found, root in zip(logits, roots, strict=True):
            expected = reference_logits(weights, target.model, features[: root + 1], ids[: root + 2 + step])[-1]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("controller", [FixedController(1), FixedController(5), SpoilingController()])
@pytest.mark.parametrize("tree", [None, *TREES])
def test_greedy_output_equals_plain_decoding_together_alone_and_reordered(
    target: LoadedModel, head: str, plain: list[Trace], controller: Controller, tree: TreeShape | None
) -> None:
    drafter = EagleDrafter(head) if tree is None else EagleTreeDrafter(head, tree=tree)
    batched = decode(target, drafter, controller, REQUESTS)
    reordered = decode(target, drafter, controller, REQUESTS[::-1])[::-1]
    alone = [decode(target, drafter, controller, [request])[0] for request in REQUESTS]
    assert tokens(batched) == tokens(reordered) == tokens(alone) == tokens(plain)
    counts = [[[step.num_accepted for step in trace.steps] for trace in run] for run in (batched, reordered, alone)]
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("options", ["penalised"])
def test_sampled_output_has_the_targets_distribution(options: str, tmp_path: Path) -> None:
    model, prompt = five_token_model(0), (1, 2, 3, 1, 2)
    write_eagle(tmp_path / "head", model, torch.tensor([3, 0, 1, 4]))
    engine = Engine(model, EagleDrafter(str(tmp_path / "head")), RejectionVerifier(), FixedController(2))
    counts = sampled_counts(engine, prompt, SAMPLINGS[options])
    assert p_value(counts, exact_joint(model, prompt, SAMPLINGS[options])) > FALSE_ALARM


@pytest.mark.parametrize("options", ["truncated"])
def test_sampled_output_of_a_tree_has_the_targets_distribution(options: str, tmp_path: Path) -> None:
    model, prompt = five_token_model(0), (1, 2, 3, 1, 2)
    write_eagle(tmp_path / "head", model, torch.tensor([3, 0, 1, 4]))
    drafter = EagleTreeDrafter(str(tmp_path / "head"), tree=JointTree(top_k=3, depth=2, num_nodes=6))
    engine = Engine(model, drafter, TopKVerifier(), FixedController(2))
    counts = sampled_counts(engine, prompt, SAMPLINGS[options])
    assert p_value(counts, exact_joint(model, prompt, SAMPLINGS[options])) > FALSE_ALARM


def test_nothing_leaks_from_one_request_to_the_next(target: LoadedModel, head: str) -> None:
    first, second = make_request("a", 30, temperature=1.0), make_request("b", 8, temperature=1.0)
    engine = Engine(target.model, EagleDrafter(head), RejectionVerifier(), FixedController(4))
    engine.generate([first])
    after = engine.generate([second])[0]
    fresh = decode(target, EagleDrafter(head), FixedController(4), [second])[0]
    assert after.token_ids == fresh.token_ids
    assert [step.num_accepted for step in after.steps] == [step.num_accepted for step in fresh.steps]


def test_drafts_get_shorter_near_the_heads_own_window(target: LoadedModel, plain: list[Trace], tmp_path: Path) -> None:
    write_eagle(tmp_path / "short", target.model, DRAFT_VOCAB, max_position_embeddings=20)
    traces = decode(target, EagleDrafter(str(tmp_path / "short")), FixedController(4), REQUESTS)
    assert tokens(traces) == tokens(plain)
    steps = [step for trace in traces for step in trace.steps[1:]]
    assert all(step.context_length + step.num_drafted <= 20 or step.num_drafted == 0 for step in steps)
    assert any(step.num_drafted for step in steps)


@pytest.mark.parametrize("tree", [None, TREES[1]])
def test_a_target_that_runs_through_transformers_gives_its_features_too(
    tiny_checkpoint: Callable[..., Path], head: str, plain: list[Trace], tree: TreeShape | None
) -> None:
    slow = load_model(str(tiny_checkpoint("llama")), implementation="hf")
    drafter = EagleDrafter(head) if tree is None else EagleTreeDrafter(head, tree=tree)
    traces = [decode(slow, drafter, FixedController(3), [request])[0] for request in REQUESTS[:1]]
    assert tokens(traces) == tokens(plain[:1])
    assert sum(step.num_drafted for step in traces[0].steps) > 20


def test_decoding_goes_on_to_the_end_of_the_targets_window(target: LoadedModel, head: str) -> None:
    request = make_request("a", 110, max_new_tokens=60)
    expected = decode(target, NoDrafter(), FixedController(0), [request])
    for drafter in (EagleDrafter(head), EagleTreeDrafter(head, tree=TREES[1])):
        assert tokens(decode(target, drafter, FixedController(6), [request])) == tokens(expected)


class Listening(FixedController):
    """Keeps what it is shown."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.shown: list[Tensor] = []

    def stop(self, states: Sequence[object], draft_probs: Tensor, tokens: Tensor, depth: int) -> Tensor:
        assert (draft_probs.gather(1, tokens[:, None])[:, 0] >= draft_probs.amax(-1)).all(), "greedy: the likeliest"
        self.shown.append(draft_probs)
        return torch.zeros(len(states), dtype=torch.bool)


@pytest.mark.parametrize("tree", [None, TREES[1]])
def test_a_controller_sees_how_sure_the_head_is_also_at_temperature_0(
    target: LoadedModel, head: str, tree: TreeShape | None
) -> None:
    controller = Listening(3)
    drafter = EagleDrafter(head) if tree is None else EagleTreeDrafter(head, tree=tree)
    decode(target, drafter, controller, REQUESTS)
    for shown in controller.shown:
        torch.testing.assert_close(shown.sum(-1), torch.ones(len(shown)))
        assert shown.amax() < 1
        assert shown[:, 150].max() == 0, "not in the draft vocabulary"


def test_a_controller_that_never_stops_is_never_asked(target: LoadedModel, head: str) -> None:
    drafter, asked = EagleDrafter(head), []
    engine = Engine(target.model, drafter, RejectionVerifier(), FixedController(3))
    engine.controller.stop = lambda *_: asked.append(1)  # type: ignore[method-assign]
    engine.generate(REQUESTS)
    assert not asked


def test_a_joint_tree_keeps_the_likeliest_of_all_nodes(target: LoadedModel, tmp_path: Path) -> None:
    vocab, num_nodes = torch.tensor([7, 3, 250, 9]), 7
    write_eagle(tmp_path / "small", target.model, vocab)
    weights, chances = eagle_weights(target.model, vocab), dict[tuple[int, ...], float]()

    class Watched(EagleTreeDrafter):
        def observe(self, context: DraftContext, draft: Draft, verdict: Verdict, hidden: Tensor | None) -> None:
            super().observe(context, draft, verdict, hidden)
            if draft.width < num_nodes:
                return  # the request's last steps have no room for two depths
            ids, assigned = context.tokens[0].tolist(), dict[int, tuple[int, ...]]({-1: ()})
            for node in range(draft.width):
                assigned[node] = (*assigned[int(draft.parents[0, node])], int(draft.tokens[0, node]))
            features = true_features(target.model, ids[:-1])
            for path in [(), *((token,) for token in vocab.tolist())]:
                logits = reference_logits(weights, target.model, features, torch.tensor([*ids, *path]))[-1]
                for token, prob in zip(vocab.tolist(), logits.softmax(-1).tolist(), strict=True):
                    chances[*path, token] = chances.get(path, 1.0) * prob
            likeliest = sorted(chances, key=lambda path: -chances[path])[:num_nodes]
            assert set(likeliest) == set(assigned.values()) - {()}
            chances.clear()

    drafter = Watched(str(tmp_path / "small"), tree=JointTree(top_k=4, depth=2, num_nodes=num_nodes))
    decode(target, drafter, FixedController(2), REQUESTS[:1])


def test_trees_are_ragged_like_chains(target: LoadedModel, head: str) -> None:
    traces = decode(target, EagleTreeDrafter(head, tree=StaticTree([2, 2])), SpoilingController(), REQUESTS)
    drafted = {step.num_drafted for trace in traces for step in trace.steps}
    assert drafted == {0, 2, 6}


@pytest.mark.parametrize("branching", [[], [2, 0]])
def test_trees_that_cannot_be_are_refused(branching: list[int]) -> None:
    with pytest.raises(UsageError, match="one number above 0 per depth"):
        StaticTree(branching)
    with pytest.raises(UsageError, match="top_k=0 is not possible"):
        JointTree(0, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"), [({"num_hidden_layers": 4}, "has 4 layers"), ({"hidden_size": 64}, "has hidden_size=64")]
)
def test_heads_that_do_not_fit_are_refused(
    target: LoadedModel, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    write_eagle(tmp_path / "head", target.model, DRAFT_VOCAB, **change)
    with pytest.raises(UsageError, match=message):
        decode(target, EagleDrafter(str(tmp_path / "head")), FixedController(2), REQUESTS)


def test_weights_that_do_not_fit_their_configuration_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    weights = eagle_weights(target.model, DRAFT_VOCAB)
    without = {name: weight for name, weight in weights.items() if name != "norm.weight"}
    changes = {
        r"the weights lack norm\.weight": without,
        "no place for the weight more": weights | {"more": torch.ones(1)},
        r"o_proj\.weight has shape \[32, 31\]": weights | {"o_proj.weight": torch.ones(32, 31)},
        "weights for 3 layers of its target and names 2": eagle_weights(target.model, DRAFT_VOCAB, layers=3),
        "is not a list of different ids": weights | {"draft_vocab": torch.tensor([1, 1])},
        "has the id 264 and its target only 264": weights | {"draft_vocab": torch.tensor([1, 264])},
        "the weights lack draft_vocab": {name: weight for name, weight in weights.items() if name != "draft_vocab"},
    }
    for message, changed in changes.items():
        save(tmp_path / "head", target.model, changed)
        with pytest.raises(UsageError, match=message):
            decode(target, EagleDrafter(str(tmp_path / "head")), FixedController(2), REQUESTS)


def save(directory: Path, target: LanguageModel, weights: dict[str, Tensor]) -> None:
    DraftCheckpoint.write(
        directory,
        kind="eagle",
        target=target,
        transformer=TRANSFORMER,
        weights=weights,
        hidden_layers=HIDDEN_LAYERS,
    )


@pytest.mark.parametrize("tree", [None, TREES[0]])
def test_broken_logits_are_named(target: LoadedModel, tmp_path: Path, tree: TreeShape | None) -> None:
    weights = eagle_weights(target.model, DRAFT_VOCAB)
    save(tmp_path / "head", target.model, weights | {"norm.weight": torch.full((32,), float("nan"))})
    path = str(tmp_path / "head")
    drafter = EagleDrafter(path) if tree is None else EagleTreeDrafter(path, tree=tree)
    with pytest.raises(ModelError, match="gave NaN or infinite logits"):
        decode(target, drafter, FixedController(2), REQUESTS)
