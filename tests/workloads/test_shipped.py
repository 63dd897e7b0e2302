"""The ten shipped workloads: enough prompts, licensed, distinct, in the tier they are meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.types import Prompt
from specdec.workloads import load_workload, workload_names

INTENDED = {
    "json": "low",
    "code_edit": "low",
    "repeat": "low",
    "code": "mixed",
    "qa": "mixed",
    "math": "mixed",
    "summarise": "mixed",
    "creative": "high",
    "brainstorm": "high",
    "multilingual": "high",
}
ENOUGH = 32


def words(prompt: Prompt) -> str:
    """The prompt's own words, without a system message that a whole workload may share."""
    return prompt.text or (prompt.messages or ({"content": ""},))[-1]["content"]


def test_all_ten_are_there() -> None:
    assert sorted(INTENDED) == list(workload_names())


def test_ids_and_texts_are_unique_across_workloads() -> None:
    prompts = [prompt for name in workload_names() for prompt in load_workload(name).prompts]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({" ".join(words(prompt).lower().split()) for prompt in prompts}) == len(prompts)


def test_they_load_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(load_workload(name).prompts for name in workload_names())


@pytest.mark.parametrize("name", INTENDED)
class TestShipped:
    def test_header(self, name: str) -> None:
        workload = load_workload(name)
        assert (workload.name, workload.tier, workload.license) == (name, INTENDED[name], "Apache-2.0")
        assert workload.description

    def test_prompts(self, name: str) -> None:
        prompts = load_workload(name).prompts
        assert len(prompts) >= ENOUGH
        assert all(words(prompt).strip() for prompt in prompts)
        assert {(prompt.workload, prompt.tier) for prompt in prompts} == {(name, INTENDED[name])}
        assert len({prompt.text is None for prompt in prompts}) == 1, "one format per workload"

    def test_answers_may_run_long_enough_to_measure(self, name: str) -> None:
        assert all((prompt.max_new_tokens or 0) >= 64 for prompt in load_workload(name).prompts)

    def test_not_one_template(self, name: str) -> None:
        """No more than a quarter of the prompts open with the same six words."""
        openings = [tuple(words(prompt).split()[:6]) for prompt in load_workload(name).prompts]
        assert max(openings.count(opening) for opening in openings) <= len(openings) / 4
