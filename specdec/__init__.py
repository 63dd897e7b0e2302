"""Speculative decoding, measured honestly: draft, verify in one forward pass, roll back, lose nothing.

Names are loaded on first use, so that reading results needs no model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.backends.native import NativeBackend, load_pair
    from specdec.controllers.fixed import FixedController
    from specdec.decoding.engine import Engine
    from specdec.drafters.draft_model import DraftModelDrafter
    from specdec.drafters.prompt_lookup import PromptLookupDrafter
    from specdec.errors import ModelError, UsageError
    from specdec.models.loading import load_model
    from specdec.types import Chunk, Draft, Prompt, Request, SamplingParams, Trace, Verdict
    from specdec.verifiers.rejection import RejectionVerifier
    from specdec.workloads import load_workload

_HOME = {
    "Chunk": "types",
    "Draft": "types",
    "DraftModelDrafter": "drafters.draft_model",
    "Engine": "decoding.engine",
    "FixedController": "controllers.fixed",
    "ModelError": "errors",
    "NativeBackend": "backends.native",
    "Prompt": "types",
    "PromptLookupDrafter": "drafters.prompt_lookup",
    "RejectionVerifier": "verifiers.rejection",
    "Request": "types",
    "SamplingParams": "types",
    "Trace": "types",
    "UsageError": "errors",
    "Verdict": "types",
    "load_model": "models.loading",
    "load_pair": "backends.native",
    "load_workload": "workloads",
}

__all__ = [
    "Chunk",
    "Draft",
    "DraftModelDrafter",
    "Engine",
    "FixedController",
    "ModelError",
    "NativeBackend",
    "Prompt",
    "PromptLookupDrafter",
    "RejectionVerifier",
    "Request",
    "SamplingParams",
    "Trace",
    "UsageError",
    "Verdict",
    "__version__",
    "load_model",
    "load_pair",
    "load_workload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(f"specdec.{_HOME[name]}"), name)
