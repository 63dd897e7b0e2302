"""Decodes one run, or with -m a sweep of runs: python -m experiments.sweep [-m] [experiment=...] [key=value ...]

A run decodes one workload at one temperature with plain decoding and every other arm, which take turns prompt by
prompt. It leaves raw traces and metadata under results/<name>/runs/<run id>/. A run that is there already is skipped.
"""

from __future__ import annotations

if __name__ == "__main__":  # first of all: what follows takes seconds to import, and Ctrl-C may come meanwhile
    from specdec.machine.interrupts import hold

    hold()

import dataclasses
import json
import logging
import shlex
import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from experiments.arms import PLAIN, Arm, build_arms
from experiments.building import build, plug_in
from experiments.report import report, table
from experiments.sharing import Shared
from specdec.errors import ModelError, UsageError
from specdec.machine.interrupts import check, guarded, holding
from specdec.measurement import results, traces
from specdec.measurement.interleaving import Measured, interleave
from specdec.measurement.lossless import TIE_TOLERANCE, Comparison, Outcome, compare_all, exact_logits
from specdec.models.loading import LoadedModel, shared_models
from specdec.types import Request, SamplingParams, Trace
from specdec.workloads import Workload

log = logging.getLogger(__name__)

NOT_IDENTITY = ("name", "results_dir", "share_device", "require_lossless")
"""Settings that leave the result as it is."""
_SHARED = Shared()
"""Runs of a sweep are calls of `main`, and Hydra keeps nothing between them."""


class NotLosslessError(RuntimeError):
    """A greedy arm that should be lossless gave other tokens than plain decoding, and not for a numeric tie."""


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Compose, run, write."""
    hydra_cfg = HydraConfig.get()
    plug_in()
    try:
        with holding():  # a launcher may have sent this run to a process of its own
            check()
            written = run(cfg, dict(hydra_cfg.runtime.choices), _SHARED)
            if hydra_cfg.mode == RunMode.RUN:
                print(table(report(written.parent.parent).query("run_id == @written.name")))
    except (UsageError, ModelError, NotLosslessError) as error:
        if hydra_cfg.mode == RunMode.RUN:
            sys.exit(f"error: {error}")
        log.error("%s", error)  # Hydra finishes the other runs, then says this, or what went wrong before
        raise CompactHydraException(f"error: {error}") from None


def run(cfg: DictConfig, choices: dict[str, str], shared: Shared | None = None) -> Path:
    """Carry out one run unless it is finished; returns its folder. shared: what earlier runs have made."""
    shared = shared or Shared()
    sampling: SamplingParams = build(cfg.sampling)
    workload: Workload = build(cfg.workload)
    limit = time_limit(cfg)
    config = identity(cfg)
    run_id = results.run_id(config, workload.fingerprint)
    folder = Path(cfg.results_dir) / cfg.name
    where = f"{workload.name} at temperature {sampling.temperature:g}"
    with results.run_lock(folder, run_id):
        if results.is_finished(folder, run_id):
            log.info("%s: run %s is finished; skipped", where, run_id)
            return results.run_folder(folder, run_id)
        target = load_target(cfg)
        check()
        with results.timed_lock(str(target.model.device), shared=cfg.share_device):
            with shared_models(shared.drafts):  # some controllers time this machine here
                arms, skipped = build_arms(cfg, choices, target, shared)
            batches = arms[PLAIN].backend.batches(workload.prompts, sampling)
            warm = {name for name, arm in arms.items() if shared.warm(arm.setup, sampling)}
            measured = measure(arms, batches, cfg.warmup_tokens, limit, where, warm)
        for arm in arms.values():
            shared.note(arm.setup, sampling)
        comparisons = compare_arms(arms, measured, target) if sampling.greedy else {}
        metadata = results.RunMetadata(
            run_id=run_id,
            experiment=cfg.name,
            workload=workload.name,
            tier=workload.tier,
            temperature=sampling.temperature,
            model=target.name,
            dtype=str(target.model.dtype).removeprefix("torch."),
            arms=judged(arms, comparisons),
            provenance=provenance(sampling, workload, target),
            config=config,
            skipped_arms=skipped,
            failures=measured.failures,
        )
        frames = traces.concat([traces.to_frames(measured.traces[name], name) for name in arms])
        written = results.write_run(folder, metadata, frames)
    refuse_faults(comparisons)
    return written


def identity(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration, less what leaves the result unchanged, and less what is not set: a setting that is
    new, and null unless used, leaves the ids of committed runs as they were.
    """
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items() if key not in NOT_IDENTITY and value is not None}


def time_limit(cfg: DictConfig) -> float | None:
    """Seconds that the measuring of one run may take; None: whatever it takes."""
    limit = cfg.time_limit_seconds
    if limit is not None and (isinstance(limit, str) or not limit > 0):
        raise UsageError(f"time_limit_seconds={limit} is not possible; it must be above 0, or null for no limit")
    return limit


def load_target(cfg: DictConfig) -> LoadedModel:
    """The target on this hardware; runs of one sweep share it."""
    if cfg.hardware.num_threads is not None:
        torch.set_num_threads(cfg.hardware.num_threads)
    return _load_once(json.dumps(OmegaConf.to_container(cfg.target, resolve=True)))


@lru_cache(maxsize=1)
def _load_once(target: str) -> LoadedModel:
    loaded: LoadedModel = build(OmegaConf.create(json.loads(target)))
    return loaded


def measure(
    arms: dict[str, Arm],
    batches: list[list[Request]],
    warmup_tokens: int,
    time_limit: float | None,
    where: str,
    warm: Collection[str] = (),
) -> Measured:
    """Decode everything, or what the time limit (seconds) allows, with a progress bar in requests.

    Raises `ModelError` where nothing at all could be decoded.
    """
    engines = {name: arm.backend.engine for name, arm in arms.items()}
    turns = sum(1 + len(request.prompt.then if request.prompt else ()) for batch in batches for request in batch)
    with tqdm(total=len(arms) * turns, desc=where, unit="request", leave=False, dynamic_ncols=True) as bar:

        def on_batch(_: str, done: Sequence[Trace]) -> None:
            bar.update(len(done))

        next_turn = arms[PLAIN].backend.next_turn
        measured = interleave(engines, batches, on_batch, warmup_tokens, time_limit, warm, next_turn)
    tried = len(measured.traces[PLAIN]) + len(measured.failures.get(PLAIN, {}))
    if time_limit is not None and tried < turns:
        log.info("%s: time_limit_seconds=%g was enough for %d prompts", where, time_limit, tried)
    if not measured.traces[PLAIN]:
        raise ModelError(next(iter(measured.failures[PLAIN].values())))
    return measured


def compare_arms(arms: dict[str, Arm], measured: Measured, target: LoadedModel) -> dict[str, Comparison]:
    """Every greedy arm that claims to be lossless against the plain one, wherever both were asked the same.

    They were not in a conversation whose earlier answer differs, and has been found to.
    """
    plain = {request.id: request for request in measured.requests[PLAIN]}
    tolerance = TIE_TOLERANCE[target.model.compute_dtype]
    exact = exact_logits(target.in_float64)

    def same(name: str) -> list[Trace]:
        pairs = zip(measured.requests[name], measured.traces[name], strict=True)
        return [trace for request, trace in pairs if plain.get(request.id) == request]

    return {
        name: compare_all(measured.requests[PLAIN], measured.traces[PLAIN], same(name), exact, tolerance)
        for name, arm in arms.items()
        if arm.metadata.lossless != Outcome.DECLARED
    }


def judged(arms: dict[str, Arm], comparisons: dict[str, Comparison]) -> dict[str, results.ArmMetadata]:
    """The arms' metadata with what the comparison found; None stays for what was sampled."""
    found = {name: str(comparison.outcome) for name, comparison in comparisons.items()}
    declared = {name: arm.metadata.lossless for name, arm in arms.items() if name != PLAIN}
    return {
        name: dataclasses.replace(arm.metadata, lossless=found.get(name, declared.get(name)))
        for name, arm in arms.items()
    }


def provenance(sampling: SamplingParams, workload: Workload, target: LoadedModel) -> results.Provenance:
    """What it takes to make this run again."""
    device = target.model.device
    return results.collect_provenance(
        command=shlex.join(["python", "-m", "experiments.sweep", *sys.argv[1:]]),
        seeds=[sampling.seed],
        prompts_sha256=workload.fingerprint,
        num_threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )


def refuse_faults(comparisons: dict[str, Comparison]) -> None:
    """Fail loudly where an arm lost tokens; the run's rows are kept as evidence."""
    for name, comparison in comparisons.items():
        if comparison.outcome == Outcome.TIE:
            log.info("arm %s: %s", name, comparison)
    faults = {name: found for name, found in comparisons.items() if found.outcome == Outcome.FAULT}
    if faults:
        raise NotLosslessError("; ".join(f"arm {name} is not lossless: {found}" for name, found in faults.items()))


def command() -> int:
    """`main` as a shell calls it: Ctrl-C may come at any moment, also while only Hydra is at work."""
    return guarded(main, "interrupted: finished runs are kept, and the same command goes on with the rest")


if __name__ == "__main__":
    sys.exit(command())
