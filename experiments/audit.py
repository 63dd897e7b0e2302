"""Checks whether a setup is lossless: python -m experiments.audit [drafter=...] [verifier=...] [key=value ...]

Prints a table of findings and writes them to results/<name>/audit.json. Exits with 0 if nothing is lost, with 1 for a
fault, with 3 if the rule declares itself lossy, and with 2 if the setup cannot be audited.
"""

from __future__ import annotations

if __name__ == "__main__":  # first of all: what follows takes seconds to import, and Ctrl-C may come meanwhile
    from specdec.machine.interrupts import hold

    hold()

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from experiments.building import build, plug_in
from experiments.sweep import load_target
from specdec.audit import Audit, Finding, Plan, audit
from specdec.backends.native import to_request
from specdec.errors import ModelError, UsageError
from specdec.machine.interrupts import guarded
from specdec.measurement import results
from specdec.types import SamplingParams
from specdec.workloads import Workload

UNUSABLE = 2
"""Exit status where there is nothing to audit."""


def main() -> int:
    """Compose, ask, answer; returns the exit status."""
    statuses: list[int] = []

    @hydra.main(version_base="1.3", config_path="../conf", config_name="audit")
    def compose(cfg: DictConfig) -> None:
        plug_in()
        try:
            found = run(cfg)
        except (UsageError, ModelError) as error:
            print(f"error: {error}", file=sys.stderr)
            statuses.append(UNUSABLE)
        else:
            print(found)
            statuses.append(found.exit_status)

    try:
        compose()
    except SystemExit as stop:  # --help, or what Hydra has against the command line
        return UNUSABLE if stop.code else 0
    return max(statuses, default=0)


def run(cfg: DictConfig) -> Audit:
    """Carry out an audit and write it down."""
    settings = {str(key): value for key, value in cfg.audit.items()}
    temperature = settings.pop("temperature")
    if not temperature > 0:
        raise UsageError(
            f"audit.temperature={temperature} does not sample; use 1.0, say (greedy output is asked anyway)"
        )
    plan = Plan(**settings)
    sampling: SamplingParams = replace(build(cfg.sampling), temperature=temperature)
    workload: Workload = build(cfg.workload)
    target = load_target(cfg)
    requests = [to_request(prompt, sampling, target) for prompt in workload.prompts[: plan.prompts]]
    OmegaConf.resolve(cfg)
    with tqdm(desc="audit", unit="finding", leave=False) as bar:

        def on_finding(finding: Finding) -> None:
            bar.update()

        found = audit(
            target,
            partial(build, cfg.drafter),
            build(cfg.verifier),
            build(cfg.controller),
            requests,
            sampling=sampling,
            plan=plan,
            new_cache=build(cfg.cache),
            batch_size=cfg.backend.batch_size,
            on_finding=on_finding,
        )
    folder = Path(cfg.results_dir) / cfg.name
    results.prepare_folder(folder)
    content = found.as_dict() | {"config": OmegaConf.to_container(cfg)}
    results.write_text(folder / "audit.json", json.dumps(content, indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(guarded(main, "interrupted: nothing is written of an audit that has not ended"))
