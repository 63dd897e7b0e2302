"""Rows of a dataset, wherever it lives: a local file or folder, or the hub. The one file that needs `datasets`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import UsageError
from specdec.machine import hub

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Row(NamedTuple):
    """One row, and the words by which an error message names it."""

    where: str
    values: Mapping[str, Any]


def read_rows(path: str, config: str | None, split: str, streaming: bool) -> Iterator[Row]:
    """The rows of one split, in order, read as they are asked for.

    path: a `.jsonl`, `.json`, `.csv` or `.parquet` file (one split, whatever its name), a folder of such files (a
    clone of a hub dataset), or a hub id, `owner/name`. Anything that is there locally never touches the network.
    streaming: of hub datasets, read only the split's own files and keep no copy. UsageError on a path that is none
    of these, an unreadable or malformed file (JSONL: with the line), an unknown config or split, and a hub that can't
    be reached.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _named(path, _load_split(path, split, path=str(local.resolve()), name=config, streaming=True))
    if local.suffix.lower() in _READERS:
        return _read_file(local)
    if local.exists():
        raise UsageError(f"{path} is no dataset file; its name must end in one of {', '.join(_READERS)}")
    if not _HUB_ID.fullmatch(path):
        raise UsageError(f"there is no file {path!r}, and a hub id reads owner/name; check workload.path")
    with _without_network(not hub.in_reach()):
        rows = _load_split(path, split, path=path, name=config, streaming=streaming)
    return _named(path, rows)


@contextmanager
def _without_network(offline: bool) -> Iterator[None]:
    """`datasets` with its cache alone: its own clients would try a hub that does not answer for half a minute."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def stem(path: str) -> str:
    """What to call a dataset that was given no name: the last part of its path, without the ending."""
    return Path(path).stem if path.lower().endswith(tuple(_READERS)) else Path(path).name


def _named(path: str, rows: Iterator[Mapping[str, Any]]) -> Iterator[Row]:
    return (Row(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _read_file(path: Path) -> Iterator[Row]:
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"the dataset file {path} can't be read ({error.strerror}); check workload.path") from error
    return _READERS[path.suffix.lower()](path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    """Line by line: Arrow's reader turns strings that look like dates into timestamps and can't name a bad line."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.strip():
                yield Row(where, _parse_line(line, where))


def _read_csv(path: Path) -> Iterator[Row]:
    """Every cell as it is written: a reader that infers types makes 7 of 007, and nothing of the words null and NA."""
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False).fillna("")
    except ValueError as error:
        raise _refusal(str(path), error) from error
    return _named(str(path), ({str(name): cell for name, cell in row.items()} for row in table.to_dict("records")))


def _read_arrow(path: Path, builder: str) -> Iterator[Row]:
    rows = _load_split(str(path), "all", path=builder, data_files={"all": str(path)}, streaming=True)
    return _named(str(path), rows)


_READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": partial(_read_arrow, builder="parquet"),
    ".json": partial(_read_arrow, builder="json"),
}


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8; save the file as UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON ({error.msg}); write one JSON object per line") from error
    if not isinstance(values, dict):
        raise UsageError(f"{where} is not a JSON object; write one object in braces per line")
    return values


def _load_split(source: str, split: str, **how: Any) -> Iterator[Mapping[str, Any]]:
    """Ask `datasets` for every split, so that an unknown one can be answered with the known ones."""
    from datasets import load_dataset

    try:
        splits = load_dataset(**how)
    except Exception as error:
        raise _refusal(source, error) from error
    if split not in splits:
        raise UsageError(f"{source} has no split {split!r}; it has {', '.join(splits)}")
    return _guarded(source, iter(splits[split]))


def _guarded(source: str, rows: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Streams open their files when the first row is asked for: refuse then as at the start."""
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise _refusal(source, error) from error
        yield row


def _refusal(source: str, error: Exception) -> UsageError:
    """One sentence for whatever `datasets` and the libraries below it raise; they share no base class."""
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    reason = "it does not answer" if isinstance(error, ConnectionError) else reason.rstrip(".")
    if Path(source).expanduser().exists():
        return UsageError(f"{source} can't be read as a dataset ({reason}); check the file, its ending and its config")
    if type(error) is ValueError:  # how `datasets` answers a config it doesn't know; subclasses are other things
        return UsageError(f"{source} can't be loaded ({reason}); check workload.path and workload.config")
    return UsageError(
        f"{source} can't be had from the hub ({reason}); go online once (and log in if it is gated), "
        "or download it and set workload.path to the file or folder"
    )
