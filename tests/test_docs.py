"""What docs/plugging-in.md tells a reader to do works, in an empty folder outside the repository."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plugging-in.md"
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, what stands beside it (a file's name, `skip`, or nothing), and its text."""

    language: str
    name: str
    text: str


def blocks() -> list[Block]:
    return [Block(*groups) for groups in FENCE.findall(PAGE.read_text())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, written where a reader would write them."""
    place = tmp_path_factory.mktemp("plug-ins")
    for block in blocks():
        if block.language in ("python", "yaml") and block.name:
            path = place / block.name
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text)
    return place


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As in the repository's environment, which `make setup` makes importable from anywhere."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def commands() -> list[list[str]]:
    lines = [
        line
        for block in blocks()
        if block.language == "sh" and block.name != "skip"
        for line in block.text.splitlines()
    ]
    split = [shlex.split(line) for line in lines]
    assert all(words[:2] == ["python", "-m"] for words in split)
    return [words[1:] for words in split]


def test_the_page_has_what_the_tests_below_run() -> None:
    found = blocks()
    assert {block.name for block in found if block.language == "python"} == {
        "bigram.py",
        "agreement.py",
        "one_more.py",
        "",
    }
    assert len(commands()) == 4
    assert [block.text.split(":")[0] for block in found if block.language == "text"] == ["BigramDrafter"] * 2


@pytest.mark.parametrize("script", [b.text for b in blocks() if b.language == "python" and not b.name], ids=range(5))
def test_every_kit_passes(script: str, folder: Path) -> None:
    done = python("-c", script, folder=folder)
    assert done.returncode == 0, done.stderr
    first, *_ = printed = done.stdout.splitlines()
    assert re.fullmatch(r"\w+: \d+ checks passed, [01] skipped", first)
    for shown in [block.text.splitlines() for block in blocks() if block.language == "text"]:
        assert printed[: len(shown) - 1] == shown[:-1] or first != shown[0], "the page shows what is printed"


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:5]))
def test_every_command_runs_on_a_tiny_model(
    words: list[str], folder: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    header = '{"workload": "tiny", "tier": "low", "license": "Apache-2.0", "format": "raw", "max_new_tokens": 12, '
    header += '"source": "tests", "description": "a few bytes"}'
    prompts.write_text(
        "\n".join([header, *(f'{{"id": "t{i}", "text": "{"abc " * (i + 2)}"}}' for i in range(2))]) + "\n"
    )
    tiny = [
        f"target.model={tiny_checkpoint('llama')}",
        "target.device=cpu",
        "workload=file",
        f"workload.name={prompts}",
        f"results_dir={tmp_path / 'results'}",
    ]
    timed = ["share_device=true"] if words[1] == "experiments.sweep" else []
    kept = [word for word in words if word != "workload=code_edit"]
    done = python(*kept, *tiny, *timed, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout or "equal" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:5]))
def test_every_command_runs_as_it_stands(words: list[str], folder: Path) -> None:
    done = python(*words, folder=folder)
    assert done.returncode == 0, done.stderr


def test_a_plug_in_is_found_from_anywhere_by_its_config_dir(folder: Path, tmp_path: Path) -> None:
    done = python(
        "-m",
        "experiments.sweep",
        "--config-dir",
        str(folder),
        "drafter=bigram",
        "target.model=nowhere",
        folder=tmp_path,
    )
    assert "nowhere" in done.stderr
    listed = python("-m", "experiments.sweep", "--config-dir", str(folder), "drafter=bigam", folder=tmp_path)
    assert re.search(r"Available options in 'drafter':\s+bigram\s", listed.stderr), listed.stderr


def test_a_module_that_cannot_be_imported_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    settings = [f"target.model={tiny_checkpoint('llama')}", "target.device=cpu", "share_device=true"]
    done = python("-m", "experiments.sweep", "drafter._target_=nowhere.Drafter", *settings, folder=tmp_path)
    assert done.returncode != 0
    assert "error: nowhere.Drafter cannot be imported" in done.stderr
    assert "--config-dir or PYTHONPATH" in done.stderr
