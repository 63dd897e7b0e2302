"""A workload: prompts of one kind, and the tier of entropy that kind is meant to have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from specdec.errors import UsageError
from specdec.types import Prompt

TIERS = ("low", "mixed", "high", "unknown")
"""How predictable the answers are meant to be. A label for the legend: the x-axis is measured entropy."""


@dataclass(frozen=True)
class Workload:
    """Named prompts, ready to be tokenized.

    name: as written in the file's header. tier: one of `TIERS`. description: one line on what is asked.
    license: SPDX identifier of the prompts. prompts: in the order they will be run, each carrying its
    own limits.
    """

    name: str
    tier: str
    description: str
    license: str
    prompts: tuple[Prompt, ...]

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the prompts as they will be run: text, turns, order, stops and token limits."""
        canonical = json.dumps([_described(prompt) for prompt in self.prompts], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def shuffled(self, seed: int) -> Workload:
        """The same prompts in an order that depends on `seed` and on each prompt's id alone."""
        # A hash, not `random`: the order stays the same across Python versions.
        return replace(self, prompts=tuple(sorted(self.prompts, key=lambda prompt: _rank(seed, prompt.id))))

    def first(self, count: int) -> Workload:
        """The first `count` prompts. UsageError below 1 and above what there is."""
        available = len(self.prompts)
        if not 1 <= count <= available:
            raise UsageError(
                f"limit={count} is not possible; workload {self.name!r} has 1 to {available} prompts to give"
            )
        return replace(self, prompts=self.prompts[:count])

    def with_max_new_tokens(self, count: int) -> Workload:
        """The same prompts, each answered with at most `count` tokens. UsageError below 1."""
        if count < 1:
            raise UsageError(f"max_new_tokens={count} is not possible; it must be at least 1")
        return replace(self, prompts=tuple(replace(prompt, max_new_tokens=count) for prompt in self.prompts))


def _described(prompt: Prompt) -> dict[str, Any]:
    """What is hashed of a prompt. Turns only where there are any: the hashes of committed runs stay."""
    return {name: value for name, value in asdict(prompt).items() if name != "then" or value}


def _rank(seed: int, prompt_id: str) -> str:
    return hashlib.sha256(f"{seed}:{prompt_id}".encode(errors="surrogatepass")).hexdigest()
