"""Every YAML file composes and instantiates; what it builds is what its knobs say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from experiments.arms import PLAIN, arm_configs, build_arms
from experiments.callbacks import num_runs
from specdec.drafters.cascade import CascadeDrafter
from specdec.drafters.prompt_lookup import PromptLookupDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.errors import UsageError
from specdec.models.loading import load_model
from specdec.workloads import workload_names
from tests.conftest import make_model
from tests.drafts import write_eagle, write_shallow

CONF = Path(__file__).parent.parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PAIRS = sorted(path.stem for path in (CONF / "pair").glob("*.yaml"))
OPTIONS = [
    f"{folder.name}={path.stem}"
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("experiment", "pair", "training")
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
def head(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head for the tiny target; those that ship are for another."""
    target = load_model(str(tiny_checkpoint("llama"))).model
    return write_eagle(tmp_path_factory.mktemp("drafts") / "eagle", target, torch.arange(100)).directory


@pytest.fixture(scope="module")
def shallow(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for the tiny target."""
    target, folder = load_model(str(tiny_checkpoint("llama"))).model, tmp_path_factory.mktemp("drafts") / "shallow"
    return write_shallow(folder, target, make_model("llama", 1), 1, torch.arange(100)).directory


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
    option: str, tiny: list[str], tiny_checkpoint: Callable[..., Path], rows: Path, head: Path, shallow: Path
) -> None:
    extra = {f"workload={name}": [f"workload.path={rows}"] for name in DATASETS} | {
        "drafter=eagle": [f"drafter.checkpoint={head}"],
        "drafter=eagle_tree": [f"drafter.checkpoint={head}", "verifier=tree_greedy"],
        "drafter=suffix_tree": ["verifier=tree_greedy"],
        "drafter=cascade": [f"drafter.second.checkpoint={head}"],
        "drafter=distilled": [f"drafter.checkpoint={shallow}"],
        "drafter=early_exit": ["drafter.num_layers=2"],
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
def test_every_experiment_composes_and_builds_its_arms(
    experiment: str, temperature: int, tiny: list[str], head: Path, shallow: Path
) -> None:
    cfg = without_hydra(composed(f"experiment={experiment}", f"sampling.temperature={temperature}", *tiny))
    fit_to_tiny(cfg, head, shallow)
    arms, skipped = build_arms(cfg, {"drafter": "prompt_lookup"}, instantiate(cfg.target))
    assert next(iter(arms)) == PLAIN
    assert set(arms) | set(skipped) == {PLAIN, "prompt_lookup", *cfg.arms}
    assert set(skipped) == ({"oracle_90"} & set(cfg.arms) if temperature > 0 else set()), "the oracle is greedy only"
    assert cfg.name == experiment


def fit_to_tiny(cfg: DictConfig, head: Path, shallow: Path) -> None:
    """Drafts that were trained for the embedded target, and layers the tiny one lacks, replaced in the arms."""
    for arm in (cfg, *cfg.arms.values()):
        target = str(OmegaConf.select(arm, "drafter._target_", default=""))
        if target.endswith("DistilledDrafter"):
            arm.drafter.checkpoint = str(shallow)
        if target.endswith("EarlyExitDrafter"):
            arm.drafter.num_layers = 2
        if target.endswith("EagleDrafter"):
            arm.drafter.checkpoint = str(head)
        if target.endswith("CascadeDrafter"):
            arm.drafter.second.checkpoint = str(head)


@pytest.mark.parametrize("drafter", ["eagle", "draft_model"])
def test_a_distillation_takes_the_recipe_of_its_drafter(drafter: str) -> None:
    cfg = without_hydra(compose("distill", [f"drafter={drafter}"], return_hydra_config=True))
    assert instantiate(cfg.training.recipe).kind == drafter
    assert instantiate(cfg.training.plan).steps == cfg.training.plan.steps
    assert instantiate(cfg.harvest.plan).hidden_layers[-1] == -1
    assert sorted(path.stem for path in (CONF / "training").glob("*.yaml")) == ["draft_model", "eagle"]


@pytest.mark.parametrize("verifier", ["typical", "synthetic"])
def test_a_lossy_rule_is_refused_where_a_lossless_one_is_asked_for(verifier: str, tiny: list[str]) -> None:
    wanted = ["+arms.other.verifier._target_=specdec.verifiers.rejection.RejectionVerifier", f"verifier={verifier}"]
    cfg = without_hydra(composed("require_lossless=true", *wanted, *tiny))
    with pytest.raises(UsageError, match=r"arm 'mine' verifies with \w+, which is lossy.*require_lossless=false"):
        build_arms(cfg, {"drafter": "mine"}, instantiate(cfg.target))
    cfg.require_lossless = False
    assert set(build_arms(cfg, {"drafter": "mine"}, instantiate(cfg.target))[0]) == {PLAIN, "mine", "other"}


def test_only_token_by_token_rules_for_chains_have_an_alpha(tiny: list[str]) -> None:
    targets = {
        path.stem: f"+arms.{path.stem}.verifier._target_={OmegaConf.load(path)._target_}"
        for path in (CONF / "verifier").glob("*.yaml")
    }
    cfg = without_hydra(composed(*targets.values(), "+arms.synthetic.verifier.acceptance_rate=0.5", *tiny))
    arms, _ = build_arms(cfg, {"drafter": "mine"}, instantiate(cfg.target))
    tokenwise = {name for name, arm in arms.items() if arm.metadata.tokenwise}
    assert tokenwise == {PLAIN, "mine", "rejection", "greedy", "coupled", "typical", "synthetic"}
    assert {name for name, arm in arms.items() if arm.metadata.lossless == "declared"} == {"typical", "synthetic"}


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


def test_the_parts_of_a_cascade_are_chosen_and_set_one_by_one(tiny: list[str]) -> None:
    parts = ["drafter@drafter.second=prompt_lookup", "drafter.first.factor=4", "drafter.second.max_ngram=5"]
    cfg = without_hydra(composed("drafter=cascade", *parts, "drafter.min_tokens=3", *tiny))
    arms, _ = build_arms(cfg, {"drafter": "cascade"}, instantiate(cfg.target))
    cascade = arms["cascade"].backend.engine.drafter
    assert isinstance(cascade, CascadeDrafter)
    assert isinstance(cascade.first, SuffixDrafter)
    assert isinstance(cascade.second, PromptLookupDrafter)
    assert (cascade.first.factor, cascade.second.max_ngram, cascade.min_tokens) == (4, 5, 3)


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
