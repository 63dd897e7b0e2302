"""What is measured: one target in one dtype, its draft, the same weights in transformers, and the prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.bench import drafts
from specdec.backends.native import to_request
from specdec.models.loading import LoadedModel, load_model
from specdec.models.loading.checkpoint import find
from specdec.models.loading.model import resolve_dtype
from specdec.types import Request, SamplingParams
from specdec.workloads import Workload


@dataclass(frozen=True)
class Setting:
    """What the command line chose. draft: a checkpoint directory; None: the default one, made in `scratch`."""

    model: str
    device: str
    workload: Workload
    draft: Path | None
    draft_tokens: int
    dtypes: tuple[str, ...]
    scratch: Path


class Subject:
    """One dtype's models, each loaded when first asked for."""

    def __init__(self, setting: Setting, dtype: str) -> None:
        self.setting = setting
        self.dtype = dtype

    def of(self, dtype: str) -> Subject:
        """The same in another dtype; this one in its own."""
        return self if dtype == self.dtype else Subject(self.setting, dtype)

    @cached_property
    def target(self) -> LoadedModel:
        """The target on this engine."""
        return load_model(self.setting.model, dtype=self.dtype, device=self.setting.device)

    @cached_property
    def draft_folder(self) -> Path:
        """The draft's checkpoint."""
        return self.setting.draft or drafts.default(self.setting.model, self.setting.scratch)

    @cached_property
    def draft(self) -> LoadedModel:
        """The draft on this engine."""
        return load_model(str(self.draft_folder), dtype=self.dtype, device=self.setting.device)

    @cached_property
    def transformers(self) -> Any:
        """The target in transformers. It stops at the ids a call names, and at no others."""
        model = self._in_transformers(find(self.setting.model).directory)
        model.generation_config.eos_token_id = None
        return model

    @cached_property
    def assistant(self) -> Any:
        """The draft in transformers, made to draft the same number of tokens at every step."""
        model = self._in_transformers(self.draft_folder)
        model.generation_config.num_assistant_tokens = self.setting.draft_tokens
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0
        return model

    def requests(self, max_new_tokens: int) -> list[Request]:
        """The prompts without stop strings, which the two sides would check at different cost."""
        prompts = self.setting.workload.with_max_new_tokens(max_new_tokens).prompts
        return [to_request(replace(prompt, stop=()), SamplingParams(), self.target) for prompt in prompts]

    def _in_transformers(self, directory: Path) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # for weights that load in a second
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=resolve_dtype(self.dtype))
        return model.to(self.target.model.device).eval()
