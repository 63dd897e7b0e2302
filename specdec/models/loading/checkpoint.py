"""Checkpoint directories: where a model's name leads, what its files say, and its weights, from safetensors only."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UsageError
from specdec.machine import hub
from specdec.models.loading import embedded

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*", "*/*"]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Checkpoint:
    """A directory in Hugging Face's layout, and the name it was asked for by. commit: on the hub, else None."""

    directory: Path
    name: str
    commit: str | None = None

    def json(self, file: str) -> dict[str, Any]:
        """A JSON file of the directory; empty where there is none."""
        path = self.directory / file
        if not path.is_file():
            return {}
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not valid JSON ({error}); fetch the checkpoint again") from error
        return content

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files that hold the weights, each whole.

        Raises `UsageError` where there is nothing safe to load, or a file is cut short or has a damaged header.
        """
        index = self.json("model.safetensors.index.json")
        shards = sorted(set(index.get("weight_map", {}).values()))
        files = tuple(self.directory / name for name in shards or ["model.safetensors"])
        missing = [file.name for file in files if not file.is_file()]
        if missing and shards:
            raise UsageError(f"{self.name} lacks its shard {missing[0]}; fetch the checkpoint again")
        if missing:
            raise UsageError(self._without_safetensors())
        for file in files:
            _header(file)
        return files

    @property
    def num_bytes(self) -> int:
        """What the weights take on disk."""
        return sum(file.stat().st_size for file in self.weight_files)

    def _without_safetensors(self) -> str:
        pickles = [file.name for kind in ("*.bin", "*.pt", "*.pth") for file in self.directory.glob(kind)]
        found = f"only {pickles[0]}, a pickle, which can run code when loaded" if pickles else "no model.safetensors"
        return (
            f"{self.name} has {found}; convert it once where you trust it, with "
            "AutoModelForCausalLM.from_pretrained(old).save_pretrained(new), and give the new directory"
        )

    @cached_property
    def fingerprint(self) -> str:
        """What was loaded, for provenance: the hub's commit, or a hash of the config and of samples of the weights."""
        if self.commit is not None:
            return self.commit
        digest = hashlib.sha256((self.directory / "config.json").read_bytes())
        for file in self.weight_files:
            _sample(file, digest.update)
        return f"sampled-sha256:{digest.hexdigest()[:16]}"

    def weights(self) -> StateDict:
        """The weights, read one by one as they are asked for."""
        return StateDict(self.weight_files)


class StateDict(MutableMapping[str, Tensor]):
    """Name → tensor over safetensors files; each look-up reads that tensor afresh, so nothing is held twice.

    A memory map would be shorter, but its pages count as the process's memory until the last tensor is gone.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._entries = {name: entry for file in files for name, entry in _entries(file)}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        content = bytearray(entry.num_bytes)
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start)
            filled = file.readinto(content) if content else 0
        if filled != entry.num_bytes:
            raise UsageError(f"{entry.file} ends before its tensor {name} does; fetch the checkpoint again")
        if not content:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(content, dtype=entry.dtype).reshape(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # the mixin's own would read the tensor

    def __setitem__(self, name: str, value: Tensor) -> None:
        raise TypeError(f"the weights of a checkpoint are read only; {name} cannot be set")

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class _Entry:
    file: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _entries(file: Path) -> Iterator[tuple[str, _Entry]]:
    for name, (kind, shape, start, end) in _header(file).items():
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise UsageError(f"{file.name} stores {name} as {kind}; give a checkpoint in 16 or 32 bits")
        if end - start != math.prod(shape) * dtype.itemsize:
            raise _damaged(file)
        yield name, _Entry(file, start, end - start, dtype, shape)


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Of a safetensors file: tensor → dtype, shape, where its bytes begin and end. `UsageError` if it is not whole.

    The format: 8 bytes little-endian header length, a JSON header, then the tensors one after another.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        data_start = 8 + int.from_bytes(opened.read(8), "little")
        if not 8 < data_start <= size:
            raise UsageError(f"{file} is not a whole safetensors file; fetch the checkpoint again")
        content = opened.read(data_start - 8)
    tensors = {}
    try:
        described = json.loads(content)
        described.pop("__metadata__", None)
        for name, entry in described.items():
            start, end = (data_start + offset for offset in entry["data_offsets"])
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), start, end)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file) from error
    cut = next((name for name, (_, _, _, end) in tensors.items() if end > size), None)
    if cut is not None:
        raise UsageError(f"{file} ends before its tensor {cut} does; fetch the checkpoint again")
    return tensors


def _damaged(file: Path) -> UsageError:
    return UsageError(f"{file} has a damaged header; fetch the checkpoint again")


def _sample(file: Path, update: Any, num_pages: int = 64, page_bytes: int = 4096) -> None:
    """Size, head and evenly spaced pages of a file: fine-tuning changes nearly every page of the weights."""
    size = file.stat().st_size
    update(f"{file.name}:{size}".encode())
    with file.open("rb") as opened:
        for page in range(num_pages):
            opened.seek(page * max(size - page_bytes, 0) // (num_pages - 1))
            update(opened.read(page_bytes))


def find(model: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint that a name means: an embedded model, a local directory, or a hub id, in this order.

    Raises `UsageError` with the choices where it means none of them.
    """
    path = Path(model).expanduser()
    if revision is not None and (model in embedded.EMBEDDED or path.is_dir()):
        raise UsageError(f"revision={revision!r} is for hub ids, and {model} is on this machine; leave it out")
    if model in embedded.EMBEDDED:
        return Checkpoint(embedded.ensure(embedded.EMBEDDED[model]), model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"the directory {model} has no config.json, so it is no checkpoint; {_choices()}")
        return Checkpoint(path, model)
    if path.exists() or not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise UsageError(f"there is no checkpoint directory {model}; {_choices()}")
    return _from_hub(model, revision)


def _from_hub(model: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        directory = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED,
                local_files_only=not hub.in_reach(),
            )
        )
    except GatedRepoError as error:
        raise UsageError(
            f"{model} is gated: accept its terms on the model hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"the model hub has no model {model}; {_choices()}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UsageError(f"{model} is not on this machine and the model hub cannot be reached; {_choices()}") from error
    if not (directory / "config.json").is_file():
        raise UsageError(f"{model} has no config.json on this machine or on the hub; {_choices()}")
    return Checkpoint(directory, model, commit=directory.name)


def _choices() -> str:
    names = ", ".join(embedded.EMBEDDED)
    return f"give an embedded name ({names}), a local checkpoint directory, or a hub id with a network"
