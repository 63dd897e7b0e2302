"""Weights lie in huge pages where the C library is glibc and the kernel has them; nowhere does asking do harm."""

from __future__ import annotations

import multiprocessing
import platform
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from specdec.machine.allocator import huge_pages, keep_freed_memory

MIB = 1 << 20
HAS_HUGE_PAGES = platform.libc_ver()[0] == "glibc" and Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def is_advised(address: int) -> bool:
    """Whether the mapping at an address is one the kernel was asked to use huge pages for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping at {address:#x}")


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="needs glibc and a kernel with transparent huge pages")
def test_what_is_allocated_inside_lies_where_huge_pages_were_asked_for() -> None:
    # In a process of its own: here other tests have left holes in the heap, and a hole that fits is taken first.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        advised, is_intact = pool.submit(allocate_inside).result()
    assert advised
    assert is_intact


def allocate_inside() -> tuple[bool, bool]:
    """Whether a large block lies where huge pages were asked for, and whether both blocks hold what was put there."""
    keep_freed_memory()
    with huge_pages(256 * MIB):
        large, small = torch.ones(48 * MIB // 4), torch.ones(MIB // 4)
    is_intact = torch.equal(large[:3], torch.ones(3)) and bool(small.sum() == MIB // 4)
    return is_advised(large.data_ptr() + 4 * MIB), is_intact


def test_an_error_inside_gets_through() -> None:
    with pytest.raises(KeyError), huge_pages(MIB):
        raise KeyError("weight")


def test_more_than_there_is_room_for_is_no_error() -> None:
    with huge_pages(1 << 60):
        assert torch.ones(1000).sum() == 1000
