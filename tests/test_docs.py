"""What docs/plugging-in.md tells a reader to do works, in an empty folder outside the repository."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments import sweep
from tests.commands import PROMPTS, ROOT, run

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


@pytest.fixture
def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as if it had been started in the page's folder; its modules are forgotten afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


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


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("script", [b.text for b in blocks() if b.language == "python" and not b.name], ids=range(5))
def test_every_kit_passes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(script, {})
    first, *_ = printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\w+: \d+ checks passed, [01] skipped", first)
    for shown in [block.text.splitlines() for block in blocks() if block.language == "text"]:
        assert printed[: len(shown) - 1] == shown[:-1] or first != shown[0], "the page shows what is printed"


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:5]))
def test_every_command_runs_on_a_tiny_model(
    words: list[str], tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.report.figures", lambda *tables: {})
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    tiny = [
        f"target.model={tiny_checkpoint('llama')}",
        "target.device=cpu",
        "workload=file",
        f"workload.name={tmp_path / 'prompts.jsonl'}",
        f"results_dir={tmp_path / 'results'}",
        "share_device=true",
    ]
    _, module, *rest = words
    kept = shlex.join(rest).replace("--config-dir ", "--config-dir=").replace("workload=code_edit", "").split()
    done = run(importlib.import_module(module).main, *kept, *tiny)
    assert done.status == 0, done.stderr
    assert "lossless" in done.stdout or "equal" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:5]))
def test_every_command_runs_as_it_stands(words: list[str], folder: Path) -> None:
    done = python(*words, folder=folder)
    assert done.returncode == 0, done.stderr


def test_a_plug_in_is_found_from_anywhere_by_its_config_dir(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    beside = f"--config-dir={folder}"
    done = run(sweep.main, beside, "drafter=bigram", "target.model=nowhere")
    assert "nowhere" in done.stderr
    listed = run(sweep.main, beside, "drafter=bigam")
    assert re.search(r"Available options in 'drafter':\s+bigram\s", listed.stderr), listed.stderr


def test_a_module_that_cannot_be_imported_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    settings = [f"target.model={tiny_checkpoint('llama')}", "target.device=cpu", f"results_dir={tmp_path}"]
    done = run(sweep.main, "drafter._target_=nowhere.Drafter", "share_device=true", *settings)
    assert done.status != 0
    assert "error: nowhere.Drafter cannot be imported" in done.stderr
    assert "--config-dir or PYTHONPATH" in done.stderr
