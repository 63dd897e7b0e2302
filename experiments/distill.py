"""Trains a draft on the target's own output: python -m experiments.distill [drafter=eagle|draft_model]

Lets the target continue training prompts, trains on what it wrote, and measures alpha on held-out prompts on the way.
The draft is then used with `drafter=eagle drafter.checkpoint=FOLDER/draft` (or drafter=distilled). After an
interruption the same command continues.
"""

from __future__ import annotations

if __name__ == "__main__":  # first of all: what follows takes seconds to import, and Ctrl-C may come meanwhile
    from specdec.machine.interrupts import hold

    hold()

import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from experiments.building import build
from experiments.report import save_figure
from specdec.distill.card import card
from specdec.distill.harvest import HarvestPlan
from specdec.distill.prompts import training_prompts
from specdec.distill.session import Acceptance, Session, gather
from specdec.distill.trainer import TrainingStep
from specdec.errors import ModelError, UsageError
from specdec.machine.interrupts import check, guarded
from specdec.measurement import results
from specdec.models.loading import LoadedModel
from specdec.plots.training import training_curves
from specdec.types import Prompt
from specdec.workloads import load_workload


@hydra.main(version_base="1.3", config_path="../conf", config_name="distill")
def main(cfg: DictConfig) -> None:
    """Compose, harvest, train, write."""
    try:
        distill(cfg)
    except (UsageError, ModelError) as error:
        sys.exit(f"error: {error}")


def distill(cfg: DictConfig) -> None:
    """Everything, from prompts to a draft with its card."""
    folder = Path(cfg.folder)
    results.prepare_folder(folder)
    torch.set_num_threads(cfg.hardware.num_threads or torch.get_num_threads())
    prompts = training_prompts(cfg.harvest.num_prompts + cfg.evaluation.num_prompts, cfg.harvest.prompt_seed)
    seen, held_out = prompts[: cfg.harvest.num_prompts], prompts[cfg.harvest.num_prompts :]
    target: LoadedModel = build(cfg.target)
    shards, plan = _harvest(cfg, target, seen)
    session = Session(
        target,
        build(cfg.training.recipe),
        build(cfg.training.plan),
        shards,
        plan.hidden_layers,
        folder,
        draft_vocab_size=cfg.draft_vocab_size,
        revision=cfg.target.revision,
        num_shards=cfg.harvest.num_batches,
    )
    command = shlex.join(["python", "-m", "experiments.distill", *sys.argv[1:]])
    provenance = results.collect_provenance(command, [session.plan.seed], "", torch.get_num_threads())
    training: dict[str, object] = {
        "command": command,
        "continuations": session.num_continuations,
        "tokens_harvested": session.num_tokens,
        "git_sha": provenance.revision,
        "hardware": str(provenance.hardware),
        "packages": provenance.packages,
    }
    curves = Curves(folder)
    _train(cfg, session, held_out, training, curves)
    measured = _measure(cfg, session)
    session.write(training, card(session, training, measured))
    results.write_text(folder / "acceptance.csv", pd.DataFrame(_row(one) for one in measured).to_csv(index=False))
    print(pd.DataFrame(_row(one) for one in measured).round(3).to_string(index=False))
    print(f"the draft is in {folder / 'draft'}")


def _harvest(cfg: DictConfig, target: LoadedModel, prompts: list[Prompt]) -> tuple[Path, HarvestPlan]:
    """The shards, made where they are missing, with the target in the harvest's own dtype."""
    layers = [layer + target.model.num_layers + 1 if layer < 0 else layer for layer in cfg.harvest.plan.hidden_layers]
    plan: HarvestPlan = replace(build(cfg.harvest.plan), hidden_layers=tuple(layers))
    speaking = (
        target
        if cfg.harvest.dtype == cfg.target.dtype
        else build(DictConfig({**cfg.target, "dtype": cfg.harvest.dtype}))
    )
    shards, progress = gather(speaking, prompts, plan, Path(cfg.harvest.folder), cfg.harvest.num_batches)
    with tqdm(desc="harvest", unit="token", unit_scale=True) as bar:
        for num_tokens in progress:
            bar.update(num_tokens)
    return shards, plan


def _train(
    cfg: DictConfig, session: Session, held_out: list[Prompt], training: dict[str, object], curves: Curves
) -> None:
    """Train to the end, with alpha on the way."""
    limited = [replace(prompt, max_new_tokens=cfg.evaluation.max_new_tokens) for prompt in held_out]
    trainer, plan = session.trainer, session.plan
    done = 0
    with tqdm(total=plan.steps, initial=trainer.step, desc="training", unit="step") as bar:
        for step in trainer.run():
            done += step.num_tokens
            rate = done / max(1e-9, bar.format_dict["elapsed"])
            bar.update()
            bar.set_postfix_str(f"loss {step.loss:.3f}, agree {step.agreement[0]:.2f}, {rate:,.0f} tokens/s")
            curves.add(step)
            check()
            if (step.step + 1) % plan.evaluate_every == 0 or step.step + 1 == plan.steps:
                session.write(training)
                for temperature in cfg.evaluation.temperatures:
                    found = session.evaluate(limited, temperature, cfg.evaluation.num_draft_tokens)
                    curves.evaluate(step.step + 1, found)
                    bar.write(f"step {step.step + 1}: held out, temperature {temperature:g}: alpha {found.alpha:.3f}")
                curves.save()


class Curves:
    """Loss and alpha over steps: two tables and a figure in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loss = _read(folder / "loss.csv")
        self._alpha = _read(folder / "alpha.csv")

    def add(self, step: TrainingStep) -> None:
        """A training step."""
        row: dict[str, Any] = asdict(step)
        for ahead, share in enumerate(row.pop("agreement"), start=1):
            row[f"agreement_{ahead}"] = share
        self._loss.append(row)

    def evaluate(self, step: int, found: Acceptance) -> None:
        """An evaluation."""
        self._alpha.append({"step": step, **_row(found)})

    def save(self) -> None:
        """Write tables and figure. Steps done twice, after an interruption, count once."""
        loss = pd.DataFrame(self._loss).drop_duplicates("step", keep="last")
        alpha = pd.DataFrame(self._alpha).drop_duplicates(["step", "temperature"], keep="last")
        results.write_text(self._folder / "loss.csv", loss.to_csv(index=False))
        results.write_text(self._folder / "alpha.csv", alpha.to_csv(index=False))
        save_figure(training_curves(loss, alpha), self._folder / "curves")


def _read(file: Path) -> list[dict[Any, Any]]:
    rows: list[dict[Any, Any]] = pd.read_csv(file).to_dict("records") if file.is_file() else []
    return rows


def _measure(cfg: DictConfig, session: Session) -> list[Acceptance]:
    """Alpha on the evaluation workloads, for the card."""
    asked, found = cfg.evaluation, []
    for name in tqdm(asked.workloads, desc="evaluation", unit="workload"):
        workload = load_workload(name, limit=asked.prompts_per_workload, max_new_tokens=asked.max_new_tokens)
        for temperature in asked.temperatures:
            found.append(session.evaluate(workload.prompts, temperature, asked.num_draft_tokens, name))
    return found


def _row(found: Acceptance) -> dict[str, object]:
    return asdict(found) | {"alpha": found.alpha, "block_efficiency": found.block_efficiency}


if __name__ == "__main__":
    sys.exit(guarded(main, "interrupted: the same command goes on from the last checkpoint"))
