"""Every YAML file composes and instantiates; what it builds is what its knobs say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.arms import PLAIN, arm_configs, build_arms
from experiments.callbacks import num_runs
from specdec.errors import UsageError
from specdec.workloads import workload_names

CONF = Path(__file__).parent.parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PAIRS = sorted(path.stem for path in (CONF / "pair").glob("*.yaml"))
OPTIONS = [
    f"{folder.name}={path.stem}"
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("experiment", "pair")
    for path in sorted(folder.glob("*.yaml"))
    if not path.stem.endswith("base")
]
DATASETS = [path.stem for path in (CONF / "workload").glob("*.yaml") if "- dataset_base" in path.read_text()]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose("config", list(overrides), return_hydra_config=True)


def without_hydra(cfg: DictConfig) -> DictConfig:
    HydraConfig.instance().set_config(cfg)
    return DictConfig({key: value for key, value in cfg.items() if key != "hydra"})


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Callable[..., Path]) -> list[str]:
    return [f"target.model={tiny_checkpoint('llama')}"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local file with every column that a dataset's configuration maps: the hub is out of reach here."""
    texts = dict.fromkeys(("text", "prompt", "question", "article"), "Go")
    ids = ("id", "task_id", "question_id", "prompt_id")
    nested = {"turns": ["Go"], "test_list": ["assert f()"], "translation": {"de": "Los"}, "category": "mixed"}
    path = tmp_path_factory.mktemp("datasets") / "rows.jsonl"
    path.write_text("".join(json.dumps(texts | nested | dict.fromkeys(ids, number)) + "\n" for number in range(32)))
    return path


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_builds_a_run(
    option: str, tiny: list[str], tiny_checkpoint: Callable[..., Path], rows: Path
) -> None:
    extra = {f"workload={name}": [f"workload.path={rows}"] for name in DATASETS} | {
        "drafter=draft_model": [f"drafter.model={tiny_checkpoint('llama', seed=1)}"],
        "workload=file": [f"workload.name={CONF.parent / 'specdec/workloads/prompts/json.jsonl'}"],
        "verifier=tree_greedy": ["drafter=none"],
    }
    target = [] if option.startswith("target=") else tiny
    cfg = without_hydra(composed(option, *target, *extra.get(option, [])))
    if option.startswith("target="):
        assert cfg.target._target_ == "specdec.models.loading.load_model"
        cfg.target.model = tiny[0].partition("=")[2]
    arms, skipped = build_arms(cfg, {"drafter": "chosen"}, instantiate(cfg.target))
    assert list(arms) + list(skipped) == [PLAIN, "chosen"]
    assert len(instantiate(cfg.workload).prompts) >= 32
    assert instantiate(cfg.sampling).temperature == cfg.sampling.temperature


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_experiment_composes_and_builds_its_arms(experiment: str, temperature: int, tiny: list[str]) -> None:
    cfg = without_hydra(composed(f"experiment={experiment}", f"sampling.temperature={temperature}", *tiny))
    arms, skipped = build_arms(cfg, {"drafter": "prompt_lookup"}, instantiate(cfg.target))
    assert next(iter(arms)) == PLAIN
    assert set(arms) | set(skipped) == {PLAIN, "prompt_lookup", *cfg.arms}
    assert bool(skipped) == (temperature > 0), "the oracle is greedy only"
    assert cfg.name == experiment


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_names_target_and_draft_together(pair: str) -> None:
    cfg = composed(f"pair={pair}")
    assert cfg.drafter._target_.endswith("DraftModelDrafter.load")
    assert cfg.target.model != cfg.drafter.model
    assert cfg.drafter.dtype == cfg.target.dtype


def test_the_reference_sweeps_every_workload() -> None:
    cfg = composed("experiment=throughput_vs_entropy")
    params = cfg.hydra.sweeper.params
    assert set(params.workload.split(",")) == set(workload_names())
    assert cfg.workload.limit >= 32
    assert num_runs(cfg) == 2 * len(workload_names())


def test_runs_are_counted_with_the_command_lines_choices() -> None:
    cfg = composed("experiment=throughput_vs_entropy")
    cfg.hydra.overrides.task = ["workload=json,code", "sampling.seed=range(3)", "share_device=true"]
    assert num_runs(cfg) == 2 * 2 * 3


def test_an_arm_changes_single_settings_or_a_whole_part(tiny: list[str]) -> None:
    cfg = without_hydra(
        composed(
            "+arms.short.controller.num_draft_tokens=2",
            "+arms.none.drafter._target_=specdec.drafters.none.NoDrafter",
            *tiny,
        )
    )
    configs = arm_configs(cfg, {"drafter": "prompt_lookup"})
    assert list(configs) == ["prompt_lookup", "short", "none"]
    assert configs["prompt_lookup"].controller.num_draft_tokens == 5
    assert configs["short"].controller.num_draft_tokens == 2
    assert configs["short"].drafter.max_ngram == 3
    assert OmegaConf.to_container(configs["none"].drafter) == {"_target_": "specdec.drafters.none.NoDrafter"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+arms.plain.controller.num_draft_tokens=2", "'plain' is taken"),
        ("+arms.a.workload.limit=2", "sets workload; an arm has drafter, verifier, controller"),
    ],
)
def test_arms_that_cannot_be_are_refused(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arm_configs(without_hydra(composed(override)), {"drafter": "prompt_lookup"})
