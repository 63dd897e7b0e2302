"""The draft model where none is named, as a checkpoint that both sides can load: trained, or cut from the target."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import save_file

from specdec.distill.export import export_standalone
from specdec.errors import UsageError
from specdec.models.loading.checkpoint import Checkpoint, find
from specdec.models.loading.draft_checkpoint import DraftCheckpoint, draft_names

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SHARE = 5  # one layer in five: 6 of the embedded target's 30


def describe(folder: Path | None, model: str) -> str:
    """The words a table carries."""
    if folder is not None:
        return folder.name
    drafts = _shipped(model, "draft_model")
    return drafts[0].name if drafts else f"the target's first 1/{_SHARE} of layers, untrained"


def default(model: str, scratch: Path) -> Path:
    """The one that ships for this target, else the target's own beginning. Made once per `scratch`."""
    folder, drafts = scratch / "draft", _shipped(model, "draft_model")
    if folder.is_dir():
        return folder
    if drafts:
        return export_standalone(drafts[0], find(model), folder)
    truncate(find(model), folder)
    return folder


def truncate(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the first fifth of the layers, with embedding, final norm and head, to a new folder.

    Untrained for it, such a draft is rarely right; it costs what a trained one of its shape costs.
    """
    config = checkpoint.json("config.json")
    if "num_hidden_layers" not in config or not any(_LAYER.match(name) for name in checkpoint.weights()):
        raise UsageError(f"{checkpoint.name} does not show its layers, so no draft can be cut from it; give --draft")
    layers = depth(config["num_hidden_layers"])
    config["num_hidden_layers"] = layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    folder.mkdir(parents=True)
    for file in checkpoint.directory.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = checkpoint.weights()
    kept = {name: weights[name] for name in weights if _kept(name, layers)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def depth(num_layers: int) -> int:
    """Layers of a draft cut from so many."""
    return max(1, num_layers // _SHARE)


def shipped(model: str, kind: str) -> str:
    """The name of a trained draft of this kind that ships with specdec for this target; `UsageError` without one."""
    drafts = _shipped(model, kind)
    if not drafts:
        raise UsageError(f"no trained draft of kind {kind!r} ships for {model}")
    return drafts[0].name


def _shipped(model: str, kind: str) -> list[DraftCheckpoint]:
    drafts = map(DraftCheckpoint.find, draft_names())
    return [draft for draft in drafts if draft.kind == kind and draft.target.name == model]


def _kept(name: str, layers: int) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < layers
