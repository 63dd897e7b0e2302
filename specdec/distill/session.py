"""One distillation from prompts to a draft checkpoint: harvest, train, evaluate, write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from specdec.backends.native import NativeBackend
from specdec.controllers.fixed import FixedController
from specdec.distill.examples import Harvest
from specdec.distill.harvest import HarvestPlan, harvest, shard_sizes
from specdec.distill.networks import Frozen
from specdec.distill.recipes import Network, Recipe
from specdec.distill.trainer import Trainer, TrainingPlan
from specdec.errors import UsageError
from specdec.models.loading import LoadedModel
from specdec.models.loading.checkpoint import find
from specdec.models.loading.draft_checkpoint import DraftCheckpoint
from specdec.models.native.transformer import Transformer
from specdec.types import Prompt, SamplingParams
from specdec.verifiers.rejection import RejectionVerifier


@dataclass(frozen=True)
class Acceptance:
    """What a draft achieves with its target. Counts over decode steps; alpha = accepted ÷ examined."""

    workload: str
    temperature: float
    num_accepted: int
    num_examined: int
    num_steps: int
    num_emitted: int

    @property
    def alpha(self) -> float:
        """The censored maximum-likelihood estimate."""
        return self.num_accepted / max(1, self.num_examined)

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per step."""
        return self.num_emitted / max(1, self.num_steps)


class Session:
    """A draft of one kind for one target, in one folder: state and curves while it trains, `draft/` as it is now.

    Raises `UsageError` for a target that is not native, whose layers a draft could not be built of.
    """

    def __init__(
        self,
        target: LoadedModel,
        recipe: Recipe,
        plan: TrainingPlan,
        shards: Path,
        harvested_layers: Sequence[int],
        folder: Path,
        *,
        draft_vocab_size: int,
        revision: str | None = None,
        num_shards: int | None = None,
    ) -> None:
        model = target.model
        if not isinstance(model, Transformer):
            raise UsageError(f"{target.name} does not run natively, and only native targets can be distilled")
        self.target, self.recipe, self.plan, self.folder = target, recipe, plan, folder
        self._layers = recipe.features(model.num_layers)
        wanted = [_index(harvested_layers, layer) for layer in self._layers]
        data = Harvest(shards, wanted, plan.batch_size, plan.seed, num_shards)
        self._checkpoint = find(target.name, revision)
        weights = {name: weight.float() for name, weight in self._checkpoint.weights().items()}
        tables = model.tables()
        vocab = data.frequent_tokens(min(draft_vocab_size, model.vocab_size), model.vocab_size).to(model.device)
        dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
        self._frozen = Frozen(
            tables.embedding.clone(),  # a normal tensor: autograd refuses those made in inference mode
            tables.head[vocab].to(dtype).clone(),
            weights["model.norm.weight"].to(model.device),
            model.config.norm_eps,
            vocab,
        )
        network: Network = recipe.build(recipe.config(model.config), self._frozen, weights).to(model.device)
        self.trainer = Trainer(network, self._frozen, data, plan, folder)
        sizes = [shard_sizes(shard) for shard in data.shards]
        self.num_continuations, self.num_tokens = (sum(column) for column in zip(*sizes, strict=True))

    def write(self, training: Mapping[str, Any], card: str = "") -> DraftCheckpoint:
        """The draft as it is now, under `draft/`."""
        network = self.trainer.network
        weights = network.stored() | {"draft_vocab": self._frozen.draft_vocab.int()}
        transformer = dict(self._checkpoint.json("config.json"))
        transformer["num_hidden_layers"] = self.recipe.depth()
        transformer.pop("layer_types", None)
        return DraftCheckpoint.write(
            self.folder / "draft",
            kind=self.recipe.kind,
            target=self.target.model,
            transformer=transformer,
            weights={name: weight.detach() for name, weight in weights.items()},
            hidden_layers=self._layers,
            training={"plan": asdict(self.plan), "recipe": asdict(self.recipe), **training},
            card=card,
        )

    def evaluate(
        self, prompts: Sequence[Prompt], temperature: float, num_draft_tokens: int, workload: str = "held out"
    ) -> Acceptance:
        """Decode the prompts with the draft under `draft/`, through the engine itself."""
        drafter = self.recipe.drafter(str(self.folder / "draft"))
        backend = NativeBackend(self.target, drafter, RejectionVerifier(), FixedController(num_draft_tokens))
        traces = backend.run(prompts, SamplingParams(temperature=temperature))
        steps = [step for trace in traces for step in trace.steps if step.step > 0]
        return Acceptance(
            workload,
            temperature,
            sum(step.num_accepted for step in steps),
            sum(step.num_examined for step in steps),
            len(steps),
            sum(step.num_emitted for step in steps),
        )


def gather(
    target: LoadedModel, prompts: Sequence[Prompt], plan: HarvestPlan, folder: Path, num_batches: int | None = None
) -> tuple[Path, Iterator[int]]:
    """Where this plan's shards lie under `folder`, and the harvest that completes them, or the first `num_batches`."""
    shards = folder / plan.fingerprint(target, prompts)
    return shards, islice(harvest(target, prompts, plan, shards), num_batches)


def _index(harvested: Sequence[int], layer: int) -> int:
    if layer not in harvested:
        raise UsageError(
            f"the draft reads layer {layer}, and the harvest keeps {list(harvested)}; add it to harvest.hidden_layers"
        )
    return list(harvested).index(layer)
