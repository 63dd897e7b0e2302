"""Training prompts: varied, repeatable, and none of the evaluation's."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from specdec.distill.prompts import training_prompts
from specdec.errors import UsageError
from specdec.types import Prompt
from specdec.workloads import load_workload, workload_names

_SPAN = 12
"""Words in a row that count as quoted."""


def _said(prompt: Prompt) -> str:
    return prompt.text or "\n".join(m["content"] for m in prompt.messages or () if m["role"] == "user")


def _spans(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + _SPAN]) for i in range(len(words) - _SPAN + 1)} or {tuple(words)}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return training_prompts(3000)


def test_no_prompt_is_an_evaluation_prompt_or_quotes_one(prompts: list[Prompt]) -> None:
    evaluated = {
        span: p.id for name in workload_names() for p in load_workload(name).prompts for span in _spans(_said(p))
    }
    shared = {p.id: evaluated[span] for p in prompts for span in _spans(_said(p)) if span in evaluated}
    assert shared == {}


def test_prompts_are_different_and_of_every_kind(prompts: list[Prompt]) -> None:
    assert len({(p.text, str(p.messages)) for p in prompts}) == len(prompts)
    assert len({p.id for p in prompts}) == len(prompts)
    kinds = Counter(p.workload for p in prompts)
    assert set(kinds) == set(workload_names())
    assert min(kinds.values()) > len(prompts) / 100
    assert all(not re.search(r"\{\w+\}", _said(p)) for p in prompts if p.workload not in ("json", "code_edit", "code"))


def test_the_seed_decides(prompts: list[Prompt]) -> None:
    assert training_prompts(50) == prompts[:50]
    assert training_prompts(50, seed=1) != prompts[:50]


def test_no_prompts_are_refused() -> None:
    with pytest.raises(UsageError, match="0 prompts"):
        training_prompts(0)
