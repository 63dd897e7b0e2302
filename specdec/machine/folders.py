"""Where this machine keeps what need not be made twice."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$SPECDEC_CACHE`, else `specdec` in `$XDG_CACHE_HOME` or `~/.cache`."""
    chosen = os.environ.get("SPECDEC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdec"
