"""What runs prompts: this engine, or somebody else's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from specdec.types import Chunk, Prompt, SamplingParams, Trace


class Backend(ABC):
    """Prompts in, traces out. What a backend cannot observe stays empty in the trace, never zero."""

    @abstractmethod
    def run(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, on_chunk: Callable[[Chunk], None] | None = None
    ) -> list[Trace]:
        """Decode every prompt; traces come in the order of the prompts."""
