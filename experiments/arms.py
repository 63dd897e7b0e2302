"""From configuration to decoding setups: plain first, then the groups' own arm, then what `arms` adds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.building import build
from experiments.sharing import Shared
from specdec.backends.native import NativeBackend
from specdec.controllers.fixed import FixedController
from specdec.drafters.none import NoDrafter
from specdec.errors import UsageError
from specdec.machine.interrupts import check
from specdec.measurement.results import ArmMetadata
from specdec.verifiers.rejection import RejectionVerifier

PLAIN = "plain"
GROUPS = ("drafter", "verifier", "controller")


@dataclass(frozen=True)
class Arm:
    """One decoding setup and how it is described beside its results. setup: all that it was made of, as text."""

    backend: NativeBackend
    metadata: ArmMetadata
    setup: str


def arm_configs(cfg: DictConfig, choices: Mapping[str, str]) -> dict[str, DictConfig]:
    """Name → drafter, verifier and controller, resolved. The groups' own arm is named after the drafter chosen.

    An arm that replaces a part's `_target_` brings all of that part; otherwise it changes single settings.
    """
    own = {group: cfg[group] for group in GROUPS}
    configs = {choices.get("drafter", "speculative"): OmegaConf.create(own)}
    for name, changes in cfg.arms.items():
        if name == PLAIN or name in configs:
            raise UsageError(f"the arm name {name!r} is taken by the run itself; choose another one in arms")
        unknown = set(changes) - set(GROUPS)
        if unknown:
            raise UsageError(f"arm {name!r} sets {', '.join(sorted(unknown))}; an arm has {', '.join(GROUPS)}")
        configs[str(name)] = OmegaConf.create(
            {group: _changed(own[group], changes.get(group)) for group in GROUPS}, parent=cfg
        )
    return {name: _detached(config, cfg) for name, config in configs.items()}


def _changed(base: DictConfig, changes: DictConfig | None) -> DictConfig:
    if changes is None:
        return base
    if "_target_" in changes:
        return changes
    merged = OmegaConf.merge(base, changes)
    assert isinstance(merged, DictConfig)
    return merged


def _detached(config: DictConfig, root: DictConfig) -> DictConfig:
    """Interpolations such as ${target.dtype} resolved against the whole configuration."""
    config._set_parent(root)
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    assert isinstance(resolved, DictConfig)
    return resolved


def build_arms(
    cfg: DictConfig, choices: Mapping[str, str], target: Any, shared: Shared | None = None
) -> tuple[dict[str, Arm], dict[str, str]]:
    """The run's arms, plain first, and those skipped: name → why. shared: what earlier runs have made.

    Raises `UsageError` for a lossy rule where `require_lossless` is set.
    """
    # Not through `build`: it would turn the loaded model, a dataclass, into configuration.
    new_backend = partial(build(cfg.backend), target=target, new_cache=build(cfg.cache))
    arms, skipped = {PLAIN: _plain(new_backend, _setup(cfg))}, {}
    shared = shared or Shared()
    for name, config in arm_configs(cfg, choices).items():
        check()
        setup = _setup(cfg, config)
        parts = {group: build(config[group]) for group in GROUPS}
        if cfg.require_lossless and not parts["verifier"].lossless:
            rule = type(parts["verifier"]).__name__
            raise UsageError(
                f"arm {name!r} verifies with {rule}, which is lossy, and require_lossless is set; choose another "
                f"verifier, or require_lossless=false"
            )
        greedy_only = [type(part).__name__ for part in parts.values() if getattr(part, "greedy_only", False)]
        if cfg.sampling.temperature > 0 and greedy_only:
            skipped[name] = f"{greedy_only[0]} works at temperature 0 only"
            continue
        backend = new_backend(**parts, measure=partial(shared.step_costs, setup))
        arms[name] = Arm(backend, _describe(config, parts), setup)
    return arms, skipped


def _setup(cfg: DictConfig, *parts: DictConfig) -> str:
    """What an arm is made of, apart from the prompts and how they are sampled."""
    around = OmegaConf.masked_copy(cfg, ["target", "backend", "cache", "hardware"])
    return json.dumps([OmegaConf.to_container(part, resolve=True) for part in (around, *parts)], sort_keys=True)


def _plain(new_backend: partial[NativeBackend], setup: str) -> Arm:
    backend = new_backend(drafter=NoDrafter(), verifier=RejectionVerifier(), controller=FixedController(0))
    metadata = ArmMetadata("none", "rejection", "fixed", num_draft_tokens=0, lossless="equal")
    return Arm(backend, metadata, setup)


def _describe(config: DictConfig, parts: Mapping[str, Any]) -> ArmMetadata:
    verifier = parts["verifier"]
    return ArmMetadata(
        drafter=_short_name(config.drafter),
        verifier=_short_name(config.verifier),
        controller=_short_name(config.controller),
        num_draft_tokens=parts["controller"].max_draft_tokens,
        synthetic=parts["drafter"].synthetic or verifier.synthetic,
        lossless=None if verifier.lossless else "declared",
        tokenwise=verifier.tokenwise,
    )


def _short_name(config: DictConfig) -> str:
    """`specdec.drafters.prompt_lookup.PromptLookupDrafter` → `prompt_lookup`; a plug-in keeps its module's name."""
    parts = [part for part in str(config._target_).split(".") if part.islower()]
    return parts[-1] if parts[-1] != "load" else parts[-2]
