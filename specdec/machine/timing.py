"""Wall-clock and memory, measured. The only module that synchronises a device."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def synchronise(device: torch.device) -> None:
    """Wait until everything queued on the device has run; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Splits a stretch of work into laps, each ending when the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronise(device)
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the previous lap."""
        synchronise(self._device)
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


class PeakMemory:
    """The most memory in use since `reset`: the allocator's on a GPU, the process's resident set on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Start a new maximum. On a system that cannot reset it, the maximum is the process's lifetime."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR_REFS.write_text("5")  # documented in proc(5): resets VmHWM
        except OSError:
            return

    def read(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            status = _STATUS.read_text()
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        high_water = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(high_water.split()[1]) * 1024


@contextmanager
def no_garbage() -> Iterator[None]:
    """No collection of Python's garbage but those asked for, which then look at what was made in here only."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
