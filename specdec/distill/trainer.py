"""The training loop: AdamW with warm-up and a cosine, gradient clipping, evaluation, and checkpoints that resume.

A run is a function of its plan, recipe and harvest: the order of batches depends on the seed and the step alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.distill.examples import Harvest
from specdec.distill.losses import Loss, find_loss
from specdec.distill.networks import Examples, Frozen
from specdec.distill.recipes import Network
from specdec.errors import UsageError
from specdec.measurement.traces import replacing

_STATE = "state.safetensors"
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class TrainingPlan:
    """How to train. Counts are in steps, one batch each.

    unrolled_steps: how many tokens ahead a head practises on its own outputs; unroll_decay: weight of each further one.
    hard_share: of the loss that asks for the target's most likely token (cross entropy), which is what greedy
    acceptance needs, beside the chosen loss on the whole distribution. dtype: of the products; weights and optimiser
    stay in float32.
    """

    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    final_learning_rate_share: float = 0.02
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    loss: str = "forward_kl"
    hard_share: float = 0.0
    unrolled_steps: int = 3
    unroll_decay: float = 0.8
    dtype: str = "bfloat16"
    checkpoint_every: int = 100
    evaluate_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        find_loss(self.loss)
        if self.dtype not in ("bfloat16", "float32"):
            raise UsageError(f"training dtype={self.dtype!r} is not possible; choose bfloat16 or float32")
        for name in ("steps", "batch_size", "unrolled_steps", "checkpoint_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is not possible; it must be at least 1")
        if not 0 <= self.hard_share <= 1:
            raise UsageError(f"hard_share={self.hard_share} is not possible; it must be in [0, 1]")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to the final share."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        share = self.final_learning_rate_share
        return self.learning_rate * (share + (1 - share) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


@dataclass(frozen=True)
class TrainingStep:
    """What one step left behind. agreement: share of positions whose most likely token is the target's, per unrolled
    step. num_tokens: roots practised on."""

    step: int
    loss: float
    agreement: tuple[float, ...]
    learning_rate: float
    num_tokens: int


@dataclass(frozen=True)
class _Score:
    """One unrolled step's part of the loss, its gradient [roots, d], and the share of positions that agree."""

    loss: float
    gradient: Tensor
    agreement: float


class Trainer:
    """Trains one network in one folder. Construction resumes where an earlier run of the same plan stopped."""

    def __init__(self, network: Network, frozen: Frozen, harvest: Harvest, plan: TrainingPlan, folder: Path) -> None:
        self.network, self.plan, self.folder = network, plan, folder
        self._frozen, self._harvest = frozen, harvest
        self._loss = mixed_loss(plan)
        self._optimiser = torch.optim.AdamW(
            network.parameters(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=plan.weight_decay
        )
        self.step = 0
        if (folder / _STATE).is_file():
            self._resume()

    def run(self) -> Iterator[TrainingStep]:
        """Train up to the plan's last step, saving on the way. Raises `UsageError` where the loss is not finite."""
        for examples in self._harvest.batches(self.step):
            if self.step >= self.plan.steps:
                return
            found = self._train(examples)
            self.step += 1
            if self.step % self.plan.checkpoint_every == 0 or self.step == self.plan.steps:
                self.save()
            yield found

    def _train(self, examples: Examples) -> TrainingStep:
        rate = self.plan.learning_rate_at(self.step)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        device = self._frozen.head.device
        examples = examples.to(device)
        self._optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.plan.dtype == "bfloat16"):
            outputs = self.network.unrolled(examples, self.plan.unrolled_steps)
            scores = [self._score(output, examples, ahead) for ahead, output in enumerate(outputs, start=1)]
        loss = sum(score.loss for score in scores)
        if not math.isfinite(loss):
            raise UsageError(
                f"the training loss is {loss} at step {self.step}; lower training.learning_rate, or set "
                "training.dtype=float32"
            )
        torch.autograd.backward(outputs, [score.gradient for score in scores])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.plan.gradient_clip)
        self._optimiser.step()
        agreement = tuple(score.agreement for score in scores)
        return TrainingStep(self.step, loss, agreement, rate, int(examples.scored.sum()))

    def _score(self, output: Tensor, examples: Examples, ahead: int) -> _Score:
        """Head, loss and their gradient, a few rows at a time: [roots, Vd] in whole would not fit any cache."""
        hidden, known = examples.ahead(ahead)
        share = self.plan.unroll_decay ** (ahead - 1) / sum(
            self.plan.unroll_decay**step for step in range(self.plan.unrolled_steps)
        )
        scale, gradient = share / max(1, int(known.sum())), torch.zeros_like(output)
        loss, agreed = 0.0, 0
        for rows in torch.split(known.nonzero()[:, 0], _ROWS_AT_ONCE):
            leaf = output[rows].detach().requires_grad_()
            draft = self._frozen.draft_logits(leaf).float()
            with torch.no_grad():
                wanted = self._frozen.target_logits(hidden[rows]).float()
            part = self._loss(draft, wanted).sum() * scale
            (gradient[rows],) = torch.autograd.grad(part, leaf)
            loss += part.item()
            agreed += int((draft.argmax(-1) == wanted.argmax(-1)).sum())
        return _Score(loss, gradient, agreed / max(1, int(known.sum())))

    def save(self) -> None:
        """Weights, optimiser and step, in one file that appears whole."""
        names = [name for name, _ in self.network.named_parameters()]
        state = {f"weight.{name}": weight.detach() for name, weight in self.network.named_parameters()}
        for index, moments in self._optimiser.state_dict()["state"].items():
            state |= {f"optimiser.{names[index]}.{name}": moment for name, moment in moments.items()}
        about = {"step": str(self.step), "plan": json.dumps(asdict(self.plan), sort_keys=True)}
        try:
            with replacing(self.folder / _STATE) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary, about)
        except Exception as error:  # safetensors raises its own where the disk is full
            raise UsageError(
                f"the training state cannot be written to {self.folder} ({error}); free some room"
            ) from error

    def _resume(self) -> None:
        with safe_open(self.folder / _STATE, "pt") as opened:
            about: Mapping[str, str] = opened.metadata()
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        if about["plan"] != json.dumps(asdict(self.plan), sort_keys=True):
            raise UsageError(f"{self.folder} holds a training with other settings; choose another folder, or remove it")
        names = [name for name, _ in self.network.named_parameters()]
        self.network.load_state_dict({name: state[f"weight.{name}"] for name in names}, strict=False)
        restored = self._optimiser.state_dict()
        restored["state"] = {
            index: {moment: state[f"optimiser.{name}.{moment}"] for moment in ("step", "exp_avg", "exp_avg_sq")}
            for index, name in enumerate(names)
        }
        self._optimiser.load_state_dict(restored)
        self.step = int(about["step"])


def mixed_loss(plan: TrainingPlan) -> Loss:
    """The plan's loss, with its share of cross entropy."""
    soft, hard = find_loss(plan.loss), find_loss("cross_entropy")
    if plan.hard_share == 0:
        return soft

    def loss(draft: Tensor, target: Tensor) -> Tensor:
        return (1 - plan.hard_share) * soft(draft, target) + plan.hard_share * hard(draft, target)

    return loss
