"""A trained draft model as a checkpoint of its own, for programs that know nothing of shared tables.

transformers takes it as `assistant_model`, this toolkit as `drafter=draft_model drafter.model=FOLDER`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.models.loading.checkpoint import Checkpoint
from specdec.models.loading.draft_checkpoint import DraftCheckpoint, TargetRecord

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TEXT_FILES = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")


def export_standalone(
    draft: DraftCheckpoint,
    target: Checkpoint,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    check_revision: bool = True,
) -> Path:
    """Write `draft`, a draft model, with the target's whole embedding and head, tokenizer and configuration.

    The head is the target's own, not the reduced one, so the exported draft may say what this one never proposes.
    dtype: None is that of the target's files. Written beside `out` first, then renamed. Raises `UsageError` where the
    draft is of another kind or target, `out` is taken, or the disk is full.
    """
    if draft.kind != "draft_model":
        raise UsageError(
            f"{draft.name} is of kind {draft.kind!r}, which reads its target's features and can't stand alone; give a "
            "draft of kind 'draft_model'"
        )
    settings = target.json("config.json")
    sizes = (settings["hidden_size"], settings["vocab_size"], settings["num_hidden_layers"])
    draft.refuse_other(TargetRecord(target.name, target.fingerprint, *sizes), check_revision)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is taken; choose a folder that is empty or not there yet")
    weights = _weights(draft, target, dtype)
    try:
        _write(out, target.directory, _config(settings, draft.config.num_layers, weights[_EMBEDDING].dtype), weights)
    except OSError as error:
        raise UsageError(
            f"cannot write {out} ({error.strerror or error}); free some room, or choose another folder"
        ) from error
    return out


def _weights(draft: DraftCheckpoint, target: Checkpoint, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Under Hugging Face's names, all of one dtype."""
    own, shared = draft.weights(), target.weights()
    tables = [_EMBEDDING] if draft.config.tied_head else [_EMBEDDING, _HEAD]
    missing = [name for name in tables if name not in shared]
    if missing:
        raise UsageError(f"the weights of {target.name} lack {missing[0]}; give the draft's own target")
    weights = {name: shared[name] for name in tables} | {name: own[name] for name in own if name != "draft_vocab"}
    kept = dtype or weights[_EMBEDDING].dtype
    return {name: weight.to(kept).contiguous() for name, weight in weights.items()}


def _config(settings: dict[str, Any], num_layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The target's own, for fewer layers."""
    kinds = settings.get("layer_types")
    changes = {"num_hidden_layers": num_layers, "dtype": str(dtype).removeprefix("torch.")}
    return settings | changes | ({"layer_types": kinds[:num_layers]} if kinds else {})


def _write(out: Path, texts: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Everything next to the final place, then a rename."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        made = Path(name, "new")
        made.mkdir()
        for file in (file for pattern in (*_TEXT_FILES, "generation_config.json") for file in texts.glob(pattern)):
            shutil.copy(file, made)
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        try:
            save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        made.replace(out)
