"""Bad input: every kind a user may give, answered by one clear sentence, and the tests that hold it.

Kinds that a part's own tests hold too are named here, as `file::test`, files below tests/; what a user types is below.

- unknown model
    test_bad_input::test_the_command_says_it_in_one_sentence
    models/loading/test_loading::test_a_path_that_is_not_there
    models/loading/test_loading::test_a_hub_id_without_a_network_names_the_choices
- tokenizer mismatch
    test_bad_input::test_the_command_says_it_in_one_sentence
    models/vocabulary/test_translation::test_a_hopeless_overlap_is_refused_with_its_size
- prompt longer than the window, empty prompt
    test_bad_input::test_the_command_says_it_in_one_sentence
    test_bad_input::test_one_prompt_too_long_is_found_before_the_first_is_decoded
    decoding/test_engine::test_requests_that_cannot_be_decoded_are_refused_before_any_work
    decoding/test_engine::test_requests_that_make_no_sense_are_refused_when_made
- a draft model that cannot roll back
    test_bad_input::test_a_draft_that_cannot_roll_back_is_refused_when_the_engine_is_built
- max_new_tokens 0 or negative, gamma negative or beyond the window
    test_bad_input::test_the_command_says_it_in_one_sentence
- top_p 0 or above 1, temperature negative, infinite or NaN, other options out of range
    test_bad_input::test_the_command_says_it_in_one_sentence
    test_bad_input::test_sampling_options_out_of_range_are_refused
- unknown workload, drafter, verifier or column: the known ones are listed
    test_bad_input::test_the_command_says_it_in_one_sentence
    test_bad_input::test_an_unknown_part_lists_the_known_ones
- empty workload, malformed JSONL
    test_bad_input::test_the_command_says_it_in_one_sentence
    workloads/test_loading::test_a_malformed_file_is_refused_by_name
    workloads/test_dataset::test_a_bad_row_is_named
- unwritable or full results folder
    test_bad_input::test_the_command_says_it_in_one_sentence
    test_bad_input::test_a_full_disk_is_found_before_any_work
    test_bad_input::test_a_disk_that_fills_up_leaves_nothing_half_written
- a GPU where there is none, bfloat16 where the device lacks it
    test_bad_input::test_the_command_says_it_in_one_sentence
    test_bad_input::test_bfloat16_where_the_device_lacks_it
    models/loading/test_loading::test_impossible_settings
- corrupted or truncated weights: fetched again, or refused
    test_bad_input::test_damaged_weights_are_refused
    models/loading/test_embedded::test_damage_is_mended
    models/loading/test_embedded::test_damage_that_cannot_be_mended_is_refused
- NaN or infinite logits: model, step and request
    test_bad_input::test_a_model_that_is_broken_from_the_start
    decoding/test_engine::test_broken_logits_name_model_request_and_step
    decoding/test_engine::test_a_failed_request_is_a_failure_and_not_a_row
- a setting that is missing, unknown, or no number
    test_bad_input::test_the_command_says_it_in_one_sentence
- Ctrl-C in a sweep
    experiments/test_interrupts::test_at_any_moment_it_ends_with_one_sentence_and_loses_nothing
    experiments/test_interrupts::test_it_goes_on_where_it_stopped
    experiments/test_interrupts::test_a_second_one_stops_at_once
    test_run_smoke::test_an_interrupted_run_leaves_nothing_and_runs_again
    measurement/test_results::test_an_interrupted_write_leaves_no_run
- two sweeps in one folder at once
    test_bad_input::test_a_run_that_another_sweep_is_writing_is_left_to_it
    measurement/test_results::test_two_processes_cannot_write_one_run
- one run of a sweep that fails
    test_bad_input::test_a_sweep_says_what_failed_and_finishes_the_rest
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments import sweep
from specdec.controllers.fixed import FixedController
from specdec.decoding.engine import Engine
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.errors import UsageError
from specdec.measurement import results, traces
from specdec.models.loading import LoadedModel, load_model
from specdec.types import SamplingParams
from specdec.verifiers.rejection import RejectionVerifier
from tests.commands import ROOT, run
from tests.test_pitfalls import KIND, defined_in
from tests.test_run_smoke import CHOICES, composed

HEADER = {"workload": "tiny", "tier": "low", "license": "Apache-2.0", "format": "raw", "max_new_tokens": 12}
Command = Callable[..., tuple[int, str]]
"""Overrides → exit status, and what a terminal shows."""


def test_every_kind_is_held_by_tests_that_exist() -> None:
    assert __doc__ is not None
    kinds = KIND.findall(__doc__)
    assert len(kinds) == __doc__.count("\n- "), "a kind without a test"
    named = {tuple(name.split("::")) for _, listed in kinds for name in listed.split()}
    missing = [f"{file}::{test}" for file, test in sorted(named) if test not in defined_in(file)]
    assert not missing
    ours = {test for file, test in named if file == "test_bad_input"}
    assert ours | {"test_every_kind_is_held_by_tests_that_exist"} == defined_in("test_bad_input")


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def files(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder of good and bad files, by the names that the cases below use."""
    prompts = [{"id": f"t{index}", "text": "abc " * (index + 2)} for index in range(3)]
    write_lines(tmp_path / "good.jsonl", HEADER, *prompts)
    write_lines(tmp_path / "long.jsonl", HEADER, *prompts, {"id": "long", "text": "x" * 128})
    write_lines(tmp_path / "blank.jsonl", HEADER, {"id": "a", "text": " "})
    write_lines(tmp_path / "headed.jsonl", HEADER)
    write_lines(tmp_path / "empty.jsonl")
    write_lines(tmp_path / "malformed.jsonl", HEADER, prompts[0], "{oops")
    write_lines(tmp_path / "rows.jsonl", {"question": "Why?", "level": 1})
    other = Path(shutil.copytree(tiny_checkpoint("llama", seed=1), tmp_path / "foreign"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"q{token}z": index for token, index in tokenizer["model"]["vocab"].items()}
    tokenizer["added_tokens"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.fixture
def settings(files: Path, tiny_checkpoint: Callable[..., Path]) -> list[str]:
    return [
        f"target.model={tiny_checkpoint('llama')}",
        "target.device=cpu",
        "workload=file",
        f"workload.name={files}/good.jsonl",
        f"results_dir={files}/results",
        "share_device=true",
    ]


@pytest.fixture
def command(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`python -m experiments.sweep`, in this process, without figures."""
    monkeypatch.setattr("experiments.report.figures", lambda *tables: {})

    def on_the_tiny_model(*overrides: str) -> tuple[int, str]:
        ran = run(sweep.main, *settings, *overrides)
        return ran.status, ran.stderr

    return on_the_tiny_model


EARLY: list[tuple[list[str], list[str]]] = [  # found before a model is loaded
    (["workload.name={}/blank.jsonl"], ["blank.jsonl, line 2", "not blank"]),
    (["workload.name={}/headed.jsonl"], ["headed.jsonl holds a header and no prompts"]),
    (["workload.name={}/empty.jsonl"], ["empty.jsonl is empty"]),
    (["workload.name={}/malformed.jsonl"], ["malformed.jsonl, line 3", "not JSON"]),
    (["workload.name={}/nowhere.jsonl"], ["nowhere.jsonl can't be read"]),
    (["workload.name=nonsense"], ["unknown workload 'nonsense'", "brainstorm, code, code_edit", ".jsonl"]),
    (["workload=local", "~workload.name", "+workload.path={}/rows.jsonl"], ["no column 'text'", "question, level"]),
    (["workload=local", "~workload.name"], ["workload.path is not set", "workload.path=..."]),
    (["workload.max_new_tokens=0"], ["max_new_tokens=0", "at least 1"]),
    (["workload.max_new_tokens=-3"], ["max_new_tokens=-3", "at least 1"]),
    (["sampling.temperature=-1"], ["temperature=-1", ">= 0"]),
    (["sampling.temperature=nan"], ["temperature=nan", "finite"]),
    (["sampling.temperature=warm"], ["SamplingParams", "'str'"]),
    (["sampling=multinomial", "sampling.top_p=0"], ["top_p=0", "(0, 1]"]),
    (["sampling=multinomial", "sampling.top_p=1.5"], ["top_p=1.5", "(0, 1]"]),
    (["time_limit_seconds=0"], ["time_limit_seconds=0", "above 0, or null"]),
    (["time_limit_seconds=soon"], ["time_limit_seconds=soon", "above 0, or null"]),
    (["results_dir={}/file"], ["results can't be written to", "file/adhoc", "Not a directory", "name a folder"]),
]
LATE: list[tuple[list[str], list[str]]] = [
    (["target.model={}/nowhere"], ["no checkpoint directory", "smollm2-135m", "hub id"]),
    (["target.device=cuda:63"], ["device='cuda:63' is not on this machine", "device=cpu"]),
    (["target.dtype=float12"], ["dtype='float12'", "float32, bfloat16"]),
    (["drafter=draft_model", "drafter.model={}/foreign"], ["foreign", "tokenizers", "choose a draft"]),
    (["controller.num_draft_tokens=-1"], ["num_draft_tokens=-1", "use 0 for plain decoding"]),
    (["controller.num_draft_tokens=128"], ["128 tokens", "window is 128", "at most 127"]),
    (["controller.num_draft_tokens=many"], ["FixedController", "'str'"]),
    (["+drafter.colour=red"], ["PromptLookupDrafter", "'colour'"]),
    (["backend.batch_size=0"], ["batch_size=0", "at least 1"]),
    (["workload.name={}/long.jsonl"], ["request 'long' has 128 prompt tokens", "window is 128", "at most 127"]),
]


@pytest.mark.parametrize(("overrides", "words"), EARLY + LATE, ids=lambda value: " ".join(value)[:40])
def test_the_command_says_it_in_one_sentence(
    command: Command, files: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: list[str]
) -> None:
    if (overrides, words) in EARLY:
        monkeypatch.setattr(sweep, "load_target", lambda cfg: pytest.fail("a model was loaded first"))
    status, shown = command(*(override.replace("{}", str(files)) for override in overrides))
    assert status == 1
    (sentence,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert all(word in sentence for word in words), sentence
    assert "Traceback" not in shown
    assert not list(files.glob("results/adhoc/runs/[!.]*"))


@pytest.mark.parametrize("group", ["drafter", "verifier", "controller", "workload", "cache", "experiment"])
def test_an_unknown_part_lists_the_known_ones(command: Command, group: str) -> None:
    status, shown = command(f"{group}=nonsense")
    assert status == 1
    assert f"{group}/nonsense" in shown
    for known in (ROOT / "conf" / group).glob("*.yaml"):
        assert f"\t{known.stem}\n" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": float("nan")},
        {"min_p": -0.1}, {"min_p": 1.0}, {"min_p": float("nan")},
        {"repetition_penalty": 0.0}, {"repetition_penalty": float("inf")}, {"repetition_penalty": float("nan")},
        {"presence_penalty": float("nan")}, {"frequency_penalty": float("-inf")},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=f"^{name}={value} is not possible; it must be "):
        SamplingParams(**options)


def test_one_prompt_too_long_is_found_before_the_first_is_decoded(
    settings: list[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.decoding.engine.Engine.generate", lambda *_: pytest.fail("something was decoded"))
    with pytest.raises(UsageError, match="request 'long'"):
        sweep.run(composed([*settings, f"workload.name={files}/long.jsonl"]), CHOICES)


# Devices and weights


def test_bfloat16_where_the_device_lacks_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.loading.model._computes", lambda device, dtype: dtype is not torch.bfloat16)
    status, shown = command("target.dtype=bfloat16")
    assert (status, shown) == (
        1,
        "error: device='cpu' has no bfloat16; use dtype=float32, or float16 on an older GPU\n",
    )


def test_a_draft_that_cannot_roll_back_is_refused_when_the_engine_is_built(
    target: LoadedModel, tiny_checkpoint: Callable[..., Path]
) -> None:
    stateful = DraftModelDrafter(load_model(str(tiny_checkpoint("recurrent_gemma"))))
    message = r"recurrent_gemma-0.* cannot roll back rejected tokens \(RecurrentGemmaForCausalLM's recurrent state\)"
    with pytest.raises(UsageError, match=message):
        Engine(target.model, stateful, RejectionVerifier(), FixedController(2), tokenizer=target.tokenizer)


def cut_short(content: bytes) -> bytes:
    return content[:-64]


def garbled(content: bytes) -> bytes:
    return content[:8] + b"~" + content[9:]


@pytest.mark.parametrize("implementation", ["native", "hf"])
@pytest.mark.parametrize("damage", [cut_short, garbled])
def test_damaged_weights_are_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, damage: Callable[[bytes], bytes], implementation: str
) -> None:
    """Of a checkpoint of the user's own there is no second copy to take."""
    directory = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "damaged"))
    weights = directory / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(UsageError, match=r"model.safetensors .*; fetch the checkpoint again"):
        load_model(str(directory), implementation=implementation)


def test_a_model_that_is_broken_from_the_start(
    command: Command, files: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    broken = Path(shutil.copytree(tiny_checkpoint("llama"), files / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"][5] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    status, shown = command(f"target.model={broken}")
    assert status == 1
    assert f"error: {broken} gave NaN or infinite logits at step 0 of request 't0'; " in shown
    assert "Traceback" not in shown
    assert not list(files.glob("results/adhoc/runs/[!.]*"))


# The results folder


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_found_before_any_work(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "load_target", lambda cfg: pytest.fail("a model was loaded first"))
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    status, shown = command()
    assert status == 1
    assert "error: results can't be written to" in shown
    assert "No space left on device" in shown


def test_a_disk_that_fills_up_leaves_nothing_half_written(
    command: Command, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = traces.write

    def half(frames: traces.Frames, folder: Path) -> None:
        write(frames, folder)
        (folder / "tokens.parquet").write_text("half")
        full()

    with monkeypatch.context() as patch:
        patch.setattr(traces, "write", half)
        status, shown = command()
    assert status == 1
    assert "No space left on device" in shown
    assert "Traceback" not in shown
    assert not [path for path in files.glob("results/adhoc/runs/*") if path.is_dir()]
    assert command()[0] == 0, "with room again, the same command runs"


def test_a_run_that_another_sweep_is_writing_is_left_to_it(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    config, measure, refused = composed(settings), sweep.measure, []

    def meanwhile(*arguments: Any) -> Any:
        with pytest.raises(UsageError, match="is being written by another process; wait for it or stop it"):
            sweep.run(config, CHOICES)
        refused.append(True)
        return measure(*arguments)

    monkeypatch.setattr(sweep, "measure", meanwhile)
    assert results.is_finished(files / "results" / "adhoc", sweep.run(config, CHOICES).name)
    assert refused
    sweep.run(config, CHOICES)  # finished by now, so there is nothing left to fight over
    assert len(refused) == 1


# Sweeps


def test_a_sweep_says_what_failed_and_finishes_the_rest(command: Command, files: Path) -> None:
    names = ",".join(str(files / name) for name in ("malformed.jsonl", "good.jsonl"))
    status, shown = command("-m", f"workload.name={names}")
    assert status == 1
    assert f"error: {files}/malformed.jsonl, line 3 is not JSON" in shown
    assert "Traceback" not in shown
    assert len(results.load_runs(files / "results" / "adhoc")) == 1
