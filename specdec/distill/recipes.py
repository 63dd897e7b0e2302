"""The two kinds of draft that can be trained: what they are built of, and where they begin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.distill.networks import EagleNetwork, Frozen, ShallowNetwork
from specdec.drafters.base import Drafter
from specdec.drafters.distilled import DistilledDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.errors import UsageError
from specdec.models.native.config import TransformerConfig

Network = EagleNetwork | ShallowNetwork


@dataclass(frozen=True)
class Recipe(ABC):
    """kind: as draft checkpoints name it."""

    kind = ""

    @abstractmethod
    def depth(self) -> int:
        """Layers of the draft."""

    @abstractmethod
    def features(self, num_layers: int) -> tuple[int, ...]:
        """The target's layers whose features the draft reads, for a target of so many."""

    @abstractmethod
    def build(self, config: TransformerConfig, frozen: Frozen, weights: Mapping[str, Tensor]) -> Network:
        """The network at its beginning; config: the draft's own, weights: the target's, under Hugging Face's names."""

    @abstractmethod
    def drafter(self, checkpoint: str) -> Drafter:
        """What drafts with a checkpoint of this kind."""

    def config(self, target: TransformerConfig) -> TransformerConfig:
        """The target's layers, as many as the draft has. `UsageError` where the target has fewer."""
        if not 1 <= self.depth() <= target.num_layers:
            raise UsageError(
                f"a draft of {self.depth()} layers does not fit a target of {target.num_layers}; choose between 1 and "
                f"{target.num_layers}"
            )
        return replace(target, num_layers=self.depth())


@dataclass(frozen=True)
class EagleRecipe(Recipe):
    """An EAGLE-style head on fused features.

    hidden_layers: which layers it reads, negative ones counted from the end as in Python (-1: the last). It begins
    with the feed-forward and norms of the target's last layer; what joins features and embeddings begins at random.
    """

    hidden_layers: Sequence[int] = (6, 15, 24, -1)
    seed: int = 0
    kind = "eagle"

    def depth(self) -> int:
        """See `Recipe.depth`."""
        return 1

    def features(self, num_layers: int) -> tuple[int, ...]:
        """See `Recipe.features`."""
        layers = tuple(layer + num_layers + 1 if layer < 0 else layer for layer in self.hidden_layers)
        if not layers or any(not 0 <= layer <= num_layers for layer in layers):
            raise UsageError(f"hidden_layers={list(self.hidden_layers)} is not possible for {num_layers} layers")
        return layers

    def drafter(self, checkpoint: str) -> EagleDrafter:
        """See `Recipe.drafter`."""
        return EagleDrafter(checkpoint)

    def build(self, config: TransformerConfig, frozen: Frozen, weights: Mapping[str, Tensor]) -> EagleNetwork:
        """See `Recipe.build`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = EagleNetwork(config, frozen, len(self.hidden_layers))
        last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
        prefix = f"model.layers.{last}."
        taken = {f"mlp.{name}": weights[f"{prefix}mlp.{name}"] for name in _under(network, "mlp.")}
        taken["attention.o_proj.weight"] = weights[f"{prefix}self_attn.o_proj.weight"]
        taken["ffn_norm.weight"] = weights[f"{prefix}post_attention_layernorm.weight"]
        taken["norm.weight"] = weights["model.norm.weight"]
        network.load_state_dict(taken, strict=False)
        return network


@dataclass(frozen=True)
class ShallowRecipe(Recipe):
    """A draft model of a few layers, taken from the target's own.

    layers: which, negative ones counted from the end; None: `num_layers` evenly spaced, both ends among them.
    """

    num_layers: int = 2
    layers: Sequence[int] | None = None
    kind = "draft_model"

    def depth(self) -> int:
        """See `Recipe.depth`."""
        return self.num_layers if self.layers is None else len(self.layers)

    def features(self, num_layers: int) -> tuple[int, ...]:
        """None: a draft model reads tokens alone."""
        return ()

    def drafter(self, checkpoint: str) -> DistilledDrafter:
        """See `Recipe.drafter`."""
        return DistilledDrafter(checkpoint)

    def build(self, config: TransformerConfig, frozen: Frozen, weights: Mapping[str, Tensor]) -> ShallowNetwork:
        """See `Recipe.build`."""
        available = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
        network = ShallowNetwork(config, frozen)
        state: MutableMapping[str, Any] = {"model.norm.weight": weights["model.norm.weight"]}
        for position, source in enumerate(self._sources(available)):
            prefix = f"model.layers.{source}."
            for name, weight in weights.items():
                if name.startswith(prefix):
                    state[f"model.layers.{position}.{name.removeprefix(prefix)}"] = weight
        network.load_state_dict(dict(state))
        return network

    def _sources(self, available: int) -> list[int]:
        if self.layers is not None:
            if not all(-available <= layer < available for layer in self.layers):
                raise UsageError(f"layers={list(self.layers)} is not possible for a target of {available} layers")
            return [layer % available for layer in self.layers]
        steps = max(1, self.num_layers - 1)
        return [round(index * (available - 1) / steps) for index in range(self.num_layers)]


def _under(network: torch.nn.Module, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in network.state_dict() if name.startswith(prefix)]
