"""python -m experiments.distill, from nothing to a draft, on a tiny target."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import distill
from tests.commands import run
from tests.conftest import make_model, make_tokenizer

SETTINGS = [
    "harvest.num_prompts=6",
    "harvest.dtype=float32",
    "harvest.plan.hidden_layers=[1,3]",
    "harvest.plan.max_new_tokens=6",
    "harvest.plan.batch_size=3",
    "training.plan.steps=4",
    "training.plan.checkpoint_every=2",
    "training.plan.evaluate_every=2",
    "training.plan.dtype=float32",
    "evaluation.num_prompts=2",
    "evaluation.max_new_tokens=6",
    "evaluation.workloads=[math]",
    "evaluation.prompts_per_workload=1",
    "draft_vocab_size=64",
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose window holds whole prompts."""
    directory = tmp_path_factory.mktemp("target")
    make_model("llama", max_position_embeddings=2048).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def arguments(folder: Path, target: Path, *more: str) -> list[str]:
    places = [f"target.model={target}", f"folder={folder}", f"harvest.folder={folder.parent / 'harvest'}"]
    return [*places, *SETTINGS, *more]


@pytest.mark.parametrize(
    ("drafter", "more"),
    [("eagle", ["training.recipe.hidden_layers=[1,-1]"]), ("draft_model", ["drafter.model=unused"])],
)
def test_from_prompts_to_a_draft_and_again(target: Path, tmp_path: Path, drafter: str, more: list[str]) -> None:
    folder = tmp_path / "run"
    asked = arguments(folder, target, f"drafter={drafter}", *more)
    done = run(distill.main, *asked)
    assert done.status == 0, done.stderr
    card = (folder / "draft" / "README.md").read_text()
    assert "| math | 0 |" in card
    assert "python -m experiments.distill" in card
    assert pd.read_csv(folder / "loss.csv")["step"].tolist() == [0, 1, 2, 3]
    assert set(pd.read_csv(folder / "alpha.csv")["step"]) == {2, 4}
    assert (folder / "curves.png").stat().st_size > 1000
    assert (folder / "curves.svg").is_file()
    again = run(distill.main, *asked)
    assert again.status == 0, again.stderr
    assert pd.read_csv(folder / "loss.csv")["step"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_no_prompts_is_one_sentence(target: Path, tmp_path: Path) -> None:
    asked = arguments(tmp_path / "run", target, "harvest.num_prompts=0", "evaluation.num_prompts=0")
    command = [sys.executable, "-m", "experiments.distill", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("error: a draft cannot be trained on 0 prompts")
