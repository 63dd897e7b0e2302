"""Which processor this is, as the system gives it."""

from __future__ import annotations

import platform
from pathlib import Path

_INFO = Path("/proc/cpuinfo")


def cpu_model() -> str:
    """The processor's name."""
    return _field("model name") or platform.processor() or platform.machine()


def features() -> str:
    """The instruction sets it has, as the system lists them; empty where it does not say."""
    return _field("flags") or _field("Features") or ""


def _field(name: str) -> str | None:
    lines = _INFO.read_text(encoding="utf-8").splitlines() if _INFO.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
