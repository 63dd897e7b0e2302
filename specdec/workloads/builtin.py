"""Finding workloads: those shipped in `prompts/`, and the user's own files in the same format."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from specdec.errors import UsageError
from specdec.workloads.base import Workload
from specdec.workloads.jsonl import parse_workload

_SUFFIX = ".jsonl"


def workload_names() -> tuple[str, ...]:
    """Names of the workloads that ship with specdec, sorted."""
    return tuple(sorted(_shipped()))


def load_workload(
    name: str,
    *,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    shuffle_seed: int | None = None,
) -> Workload:
    """Load a shipped workload by name, or a file by its path (which ends in `.jsonl`).

    limit: take only so many prompts, after shuffling; None takes all. max_new_tokens: replaces every prompt's own
    limit. shuffle_seed: None keeps the file's order. UsageError on an unknown name, a file that can't be read or is
    not in the format of `specdec.workloads.jsonl`, and limits that are not possible.
    """
    source = _locate(name)
    workload = parse_workload(_read(source), str(source))
    if shuffle_seed is not None:
        workload = workload.shuffled(shuffle_seed)
    if limit is not None:
        workload = workload.first(limit)
    return workload if max_new_tokens is None else workload.with_max_new_tokens(max_new_tokens)


def _shipped() -> dict[str, Traversable]:
    folder = resources.files("specdec.workloads") / "prompts"
    return {file.name.removesuffix(_SUFFIX): file for file in folder.iterdir() if file.name.endswith(_SUFFIX)}


def _locate(name: str) -> Traversable:
    if name.endswith(_SUFFIX):
        return Path(name).expanduser()
    shipped = _shipped()
    if name not in shipped:
        known = ", ".join(sorted(shipped))
        raise UsageError(f"unknown workload {name!r}; choose one of {known}, or give the path of a {_SUFFIX} file")
    return shipped[name]


def _read(source: Traversable) -> str:
    try:
        return source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"the workload file {source} can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the workload file {source} is not UTF-8; save it as UTF-8 text") from error
