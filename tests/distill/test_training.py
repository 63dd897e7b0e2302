"""Losses, networks and the loop: gradients are right, a resumed run is the uninterrupted one, and it learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.distill.harvest import HarvestPlan
from specdec.distill.losses import LOSSES, find_loss, forward_kl, total_variation
from specdec.distill.recipes import EagleRecipe, Recipe, ShallowRecipe
from specdec.distill.session import Session, gather
from specdec.distill.trainer import TrainingPlan, TrainingStep
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel, load_model
from specdec.types import Prompt

PLAN = TrainingPlan(
    steps=6, batch_size=4, learning_rate=3e-3, warmup_steps=2, dtype="float32", checkpoint_every=3, hard_share=0.3
)
RECIPES = [EagleRecipe(hidden_layers=(1, -1)), ShallowRecipe(num_layers=2)]
by_kind = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)


@pytest.fixture(scope="module")
def shards(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = [Prompt(f"p{n}", text=f"{n} and {n * 7}") for n in range(12)]
    plan = HarvestPlan((1, 3), max_new_tokens=12, batch_size=6)
    folder, progress = gather(target, prompts, plan, tmp_path_factory.mktemp("harvest"))
    assert len(list(progress)) == 2
    return folder


def session(target: LoadedModel, recipe: Recipe, shards: Path, folder: Path, plan: TrainingPlan = PLAN) -> Session:
    return Session(target, recipe, plan, shards, (1, 3), folder, draft_vocab_size=100)


def weights(trained: Session) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trained.trainer.network.state_dict().items()}


@by_kind
def test_a_resumed_training_is_the_uninterrupted_one(
    target: LoadedModel, shards: Path, tmp_path: Path, recipe: Recipe
) -> None:
    whole = session(target, recipe, shards, tmp_path / "whole")
    (tmp_path / "whole").mkdir()
    seen = list(whole.trainer.run())
    assert [step.step for step in seen] == list(range(6))
    (tmp_path / "cut").mkdir()
    cut = session(target, recipe, shards, tmp_path / "cut").trainer.run()
    for _ in range(4):
        next(cut)
    cut.close()  # one step after the checkpoint at 3
    resumed = session(target, recipe, shards, tmp_path / "cut")
    assert resumed.trainer.step == 3
    assert list(resumed.trainer.run()) == seen[3:]
    for name, weight in weights(whole).items():
        assert torch.equal(weights(resumed)[name], weight), name


@by_kind
def test_it_learns_and_what_it_learnt_is_what_drafts(
    target: LoadedModel, shards: Path, tmp_path: Path, recipe: Recipe
) -> None:
    trained = session(target, recipe, shards, tmp_path, replace(PLAN, steps=200, checkpoint_every=500))
    steps: list[TrainingStep] = list(trained.trainer.run())
    assert steps[-1].loss < steps[0].loss / 2
    trained.write({"why": "test"})
    seen = [Prompt(f"p{n}", text=f"{n} and {n * 7}", max_new_tokens=12) for n in range(0, 12, 5)]
    found = trained.evaluate(seen, 0.0, 3)
    assert found.num_emitted == found.num_accepted + found.num_steps
    assert found.alpha > 0.5  # text that it was trained on, through the engine


@by_kind
def test_the_gradient_is_that_of_the_loss_in_one_piece(
    target: LoadedModel, shards: Path, tmp_path: Path, recipe: Recipe
) -> None:
    trainer = session(target, recipe, shards, tmp_path).trainer
    examples = next(trainer._harvest.batches(0))
    outputs = trainer.network.unrolled(examples, PLAN.unrolled_steps)
    weight = [PLAN.unroll_decay**step for step in range(PLAN.unrolled_steps)]
    total = torch.zeros(())
    for ahead, output in enumerate(outputs, start=1):
        hidden, known = examples.ahead(ahead)
        draft, wanted = trainer._frozen.draft_logits(output)[known], trainer._frozen.target_logits(hidden)[known]
        total = total + weight[ahead - 1] / sum(weight) * trainer._loss(draft, wanted).mean()
    total.backward()
    expected = {name: p.grad.clone() for name, p in trainer.network.named_parameters() if p.grad is not None}
    trainer._optimiser.step = lambda: None  # type: ignore[method-assign, assignment]
    trainer.plan = replace(PLAN, gradient_clip=math.inf)  # type: ignore[misc]
    found = trainer._train(examples)
    assert found.loss == pytest.approx(total.item(), rel=1e-4)
    for name, parameter in trainer.network.named_parameters():
        if name in expected:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


def test_another_plan_does_not_resume(target: LoadedModel, shards: Path, tmp_path: Path) -> None:
    list(session(target, RECIPES[1], shards, tmp_path, replace(PLAN, steps=1)).trainer.run())
    with pytest.raises(UsageError, match="other settings"):
        session(target, RECIPES[1], shards, tmp_path)


def test_a_loss_that_is_not_finite_says_so(target: LoadedModel, shards: Path, tmp_path: Path) -> None:
    trained = session(target, RECIPES[0], shards, tmp_path)
    with torch.no_grad():
        next(trained.trainer.network.parameters()).fill_(math.nan)
    with pytest.raises(UsageError, match="loss is nan at step 0"):
        list(trained.trainer.run())


def test_a_full_disk_says_so(
    target: LoadedModel, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trained = session(target, RECIPES[1], shards, tmp_path)
    monkeypatch.setattr("specdec.distill.trainer.save_file", full)
    with pytest.raises(UsageError, match="No space left"):
        trained.trainer.save()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@by_kind
def test_other_architectures(tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str, recipe: Recipe) -> None:
    target = load_model(str(tiny_checkpoint(kind)), implementation="native")
    plan = HarvestPlan((1, 3), max_new_tokens=8, batch_size=4)
    prompts = [Prompt(f"p{n}", text=f"{n}") for n in range(4)]
    shards, progress = gather(target, prompts, plan, tmp_path)
    list(progress)
    (tmp_path / "run").mkdir()
    trained = session(target, recipe, shards, tmp_path / "run", replace(PLAN, steps=40))
    list(trained.trainer.run())
    trained.write({})
    seen = [Prompt(prompt.id, text=prompt.text, max_new_tokens=8) for prompt in prompts[::5]]
    assert trained.evaluate(seen, 0.0, 2).alpha > 0.3


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_are_least_where_the_distributions_agree(name: str) -> None:
    torch.manual_seed(0)
    target, other = torch.randn(2, 5, 9)
    loss = find_loss(name)
    assert loss(target, other).shape == (5,)
    if name != "cross_entropy":
        assert loss(target, target).abs().max() < 1e-6
    assert (loss(target, target) < loss(other, target)).float().mean() > 0.5


def test_losses_by_hand() -> None:
    target, draft = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert total_variation(draft, target).item() == pytest.approx(0.25)
    assert forward_kl(draft, target).item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loss": "mse"}, "loss='mse' is unknown"),
        ({"steps": 0}, "steps=0"),
        ({"dtype": "int8"}, "dtype='int8'|dtype=int8"),
        ({"hard_share": 2.0}, "hard_share=2.0"),
    ],
)
def test_bad_plans(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(PLAN, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (EagleRecipe(hidden_layers=(1, 9)), "hidden_layers="),
        (EagleRecipe(hidden_layers=(2, -1)), "reads layer 2, and the harvest keeps"),
        (ShallowRecipe(num_layers=4), "4 layers does not fit a target of 3"),
        (ShallowRecipe(layers=(0, 7)), "layers="),
    ],
)
def test_bad_recipes(target: LoadedModel, shards: Path, tmp_path: Path, recipe: Recipe, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        session(target, recipe, shards, tmp_path)


def test_the_learning_rate_warms_up_and_decays() -> None:
    plan = TrainingPlan(steps=100, learning_rate=1.0, warmup_steps=10, final_learning_rate_share=0.1)
    rates = [plan.learning_rate_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
