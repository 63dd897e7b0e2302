"""How everything here is timed: in rounds, each of the things compared once per round, in rotating order.

Whatever else the machine does then falls on all of them alike, and a ratio can be taken within a round.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from tqdm import tqdm

from specdec.machine.interrupts import check
from specdec.machine.timing import Stopwatch, no_garbage

Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Limit:
    """At most `rounds` rounds, and after the first none that would likely end later than `seconds` from the start."""

    rounds: int
    seconds: float = math.inf


def rounds(limit: Limit, label: str) -> Iterator[int]:
    """Round numbers from 0, with a progress bar. Python's garbage is collected before a round and never inside one."""
    start = time.perf_counter()
    with tqdm(total=limit.rounds, desc=label, unit="round", leave=False, dynamic_ncols=True) as bar, no_garbage():
        for number in range(limit.rounds):
            check()
            yield number
            gc.collect()
            bar.update()
            mean = (time.perf_counter() - start) / (number + 1)
            if mean * (number + 2) > limit.seconds:
                return


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """The items, begun at another one each turn."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def timed(device: torch.device, work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the seconds until the device had done it."""
    clock = Stopwatch(device)
    result = work()
    return result, clock.lap()
