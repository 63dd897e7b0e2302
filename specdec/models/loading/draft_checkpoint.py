"""Trained drafts on disk: a folder with `config.json`, `model.safetensors` and a model card, `README.md`.

Only what was trained is stored; embeddings and head are the target's own. So a draft is of use with one target alone,
and its configuration says which:

    {"format": 1, "kind": "eagle" or "draft_model",
     "target": {"name", "fingerprint", "hidden_size", "vocab_size", "num_layers"},
     "hidden_layers": [10, 20, 30],   what an EAGLE head reads; empty for a draft model
     "transformer": {...},            a Hugging Face configuration, num_hidden_layers the draft's own depth
     "training": {...}}               whatever the trainer has to say
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.errors import UsageError
from specdec.models.base import LanguageModel
from specdec.models.loading.checkpoint import Checkpoint, StateDict
from specdec.models.native.config import TransformerConfig

_FORMAT = 1
_CONFIG, _WEIGHTS, _CARD = "config.json", "model.safetensors", "README.md"


@dataclass(frozen=True)
class TargetRecord:
    """What a draft remembers of the target it was trained for. fingerprint: None where the target had none."""

    name: str
    fingerprint: str | None
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, target: LanguageModel) -> TargetRecord:
        """Of a target in memory."""
        return cls(target.name, target.fingerprint, target.hidden_size, target.vocab_size, target.num_layers)


@dataclass(frozen=True)
class DraftCheckpoint:
    """One trained draft. name: what it was asked for by; transformer: a Hugging Face configuration as a dictionary."""

    directory: Path
    name: str
    kind: str
    target: TargetRecord
    transformer: Mapping[str, Any]
    hidden_layers: tuple[int, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, name_or_directory: str, kind: str | None = None) -> DraftCheckpoint:
        """A draft that ships with specdec, by name, or a folder.

        kind: refuse any other. Raises `UsageError` where there is none, or what is there can't be read.
        """
        directory = _shipped().get(name_or_directory, Path(name_or_directory).expanduser())
        if not (directory / _CONFIG).is_file():
            raise UsageError(
                f"there is no trained draft {name_or_directory}; give one that ships with specdec "
                f"({', '.join(sorted(_shipped())) or 'this installation has none'}), or a folder that "
                "`python -m experiments.distill` has written"
            )
        found = cls._parse(directory, name_or_directory)
        if kind not in (None, found.kind):
            raise UsageError(
                f"the trained draft {name_or_directory} is of kind {found.kind!r} and {kind!r} was asked for; "
                "use drafter=distilled for draft_model, drafter=eagle for eagle"
            )
        return found

    @classmethod
    def _parse(cls, directory: Path, name: str) -> DraftCheckpoint:
        content = Checkpoint(directory, name).json(_CONFIG)
        if content.get("format") != _FORMAT:
            raise UsageError(
                f"{directory / _CONFIG} says format={content.get('format')!r}, and a trained draft has "
                f"format={_FORMAT}; train it again, or update specdec"
            )
        try:
            return cls(
                directory,
                name,
                content["kind"],
                TargetRecord(**content["target"]),
                content["transformer"],
                tuple(content.get("hidden_layers", ())),
                content.get("training", {}),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(f"{directory / _CONFIG} is incomplete ({error}); train the draft again") from error

    @property
    def config(self) -> TransformerConfig:
        """The draft's own layers. `UsageError` for an architecture the native transformer does not have."""
        from transformers import AutoConfig

        settings = dict(self.transformer)
        kind = settings.pop("model_type", "llama")
        try:
            described = AutoConfig.for_model(kind, **settings)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"the draft {self.name} has a transformer of model_type {kind!r} that transformers can't configure; "
                "update transformers, or train the draft again"
            ) from error
        return TransformerConfig.from_hf(described)

    def weights(self) -> StateDict:
        """The trained weights, read one by one. Raises `UsageError` where the file is missing or cut short."""
        file = self.directory / _WEIGHTS
        if not file.is_file():
            raise UsageError(f"the trained draft {self.name} has no {_WEIGHTS}; copy or train it again")
        try:
            return StateDict((file,))
        except (ValueError, KeyError, OSError) as error:
            raise UsageError(f"the weights of the trained draft {self.name} can't be read: {error}") from error

    def refuse_other_target(self, target: LanguageModel, check_revision: bool = True) -> None:
        """Raise `UsageError` unless this is the target the draft was trained for.

        check_revision: also where its sizes agree and its weights differ, as a fine-tuned relative's do.
        """
        self.refuse_other(TargetRecord.of(target), check_revision)

    def refuse_other(self, here: TargetRecord, check_revision: bool = True) -> None:
        """As `refuse_other_target`, for a target that need not be in memory."""
        for what in ("hidden_size", "vocab_size", "num_layers"):
            trained, found = getattr(self.target, what), getattr(here, what)
            if trained != found:
                raise UsageError(
                    f"the draft {self.name} was trained for {self.target.name} with {what}={trained}, and {here.name} "
                    f"has {what}={found}; train one for it with `python -m experiments.distill`"
                )
        self._refuse_own_sizes()
        known = self.target.fingerprint is not None and here.fingerprint is not None
        if check_revision and known and self.target.fingerprint != here.fingerprint:
            raise UsageError(
                f"the draft {self.name} was trained for {self.target.name} at revision {self.target.fingerprint}, and "
                f"{here.name} is at {here.fingerprint}; train one for it, or set drafter.check_revision=false to use "
                "it all the same (output stays exact, fewer drafts are accepted)"
            )

    def _refuse_own_sizes(self) -> None:
        depth, width, layers = self.config.num_layers, self.config.hidden_size, self.target.num_layers
        if depth > layers:
            raise UsageError(
                f"the draft {self.name} has {depth} layers and its target {self.target.name} only {layers}; "
                "a draft must be the smaller of the two"
            )
        if width != self.target.hidden_size:
            raise UsageError(
                f"the draft {self.name} has hidden_size={width} and shares the tables of {self.target.name}, which has "
                f"hidden_size={self.target.hidden_size}; train it again"
            )
        beyond = [layer for layer in self.hidden_layers if not 0 <= layer <= layers]
        if beyond:
            raise UsageError(
                f"the draft {self.name} reads layer {beyond[0]} of {self.target.name}, which has {layers}; "
                "train it again"
            )

    @classmethod
    def write(
        cls,
        directory: Path,
        *,
        kind: str,
        target: LanguageModel,
        transformer: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        hidden_layers: Sequence[int] = (),
        training: Mapping[str, Any] | None = None,
        card: str = "",
    ) -> DraftCheckpoint:
        """Write a draft whole, in place of what is there: made beside it, then renamed.

        weights: floating ones are stored in float16. card: Markdown. Raises `UsageError` where the disk is full or
        can't be written.
        """
        config = {
            "format": _FORMAT,
            "kind": kind,
            "target": asdict(TargetRecord.of(target)),
            "hidden_layers": list(hidden_layers),
            "transformer": dict(transformer),
            "training": dict(training or {}),
        }
        try:
            _write_folder(directory, config, weights, card)
        except OSError as error:
            raise UsageError(
                f"cannot write the draft to {directory} ({error.strerror or error}); free some room, or choose another "
                "folder"
            ) from error
        return cls._parse(directory, str(directory))


def draft_names() -> tuple[str, ...]:
    """Names of the trained drafts that ship with specdec, sorted."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, Path]:
    folder = Path(str(resources.files("specdec.models"))) / "trained"
    return {path.parent.name: path.parent for path in folder.glob(f"*/{_CONFIG}")}


def _write_folder(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], card: str) -> None:
    """Everything next to the final place, then two renames."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stored = {name: (w.half() if w.is_floating_point() else w).cpu().contiguous() for name, w in weights.items()}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as name:
        made = Path(name, "new")
        made.mkdir()
        (made / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / _CARD).write_text(card, encoding="utf-8")
        try:
            save_file(stored, made / _WEIGHTS, metadata={"format": "pt", "kind": config["kind"]})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (made / _WEIGHTS).chmod(0o644)  # safetensors writes for its owner alone
        if directory.exists():
            directory.rename(Path(name, "old"))
        made.rename(directory)
