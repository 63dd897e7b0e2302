"""What decoding on a CPU needs of the C library's allocator. Nothing is done where that is not glibc's."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_NO_TRIMMING = -1
_DEFAULT_MMAP_MAX = 65536
# <sys/mman.h>
_MADV_HUGEPAGE = 14
_MIB = 1 << 20
_HUGE_PAGE = 2 * _MIB


def keep_freed_memory() -> None:
    """Let glibc keep freed megabytes for the next step instead of handing them back to the kernel.

    A step makes a handful of [K, V] temporaries of one or two MiB. By default each is unmapped when freed and faulted
    in again page by page a moment later, which costs several times the arithmetic done on it. Larger blocks than
    32 MiB, such as weights, still go back at once.
    """
    if (libc := _glibc()) is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    libc.mallopt(_M_TRIM_THRESHOLD, 256 * _MIB)
    libc.mallopt(_M_TOP_PAD, 16 * _MIB)


@contextmanager
def huge_pages(num_bytes: int) -> Iterator[None]:
    """Let what is allocated inside, up to `num_bytes` of it, lie in huge pages.

    Every weight is read once per step, front to back. In pages of 4 KiB a processor spends a good tenth of the step
    on finding out where the next page lies. Most kernels grant huge pages to who asks, so room is asked for before
    weights are put there: it is taken from the heap and given back to it at once, untouched. What is not used of it
    costs nothing. Ends with the settings of `keep_freed_memory`.
    """
    if (libc := _glibc()) is None:
        yield
        return
    libc.mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap too
    libc.mallopt(_M_TRIM_THRESHOLD, _NO_TRIMMING)
    try:
        if room := libc.malloc(num_bytes + _HUGE_PAGE):
            start = -(-room // _HUGE_PAGE) * _HUGE_PAGE
            libc.madvise(start, num_bytes // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)  # refused: pages stay small
            libc.free(room)
        yield
    finally:
        libc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        keep_freed_memory()


@cache
def _glibc() -> Any:
    """The C library, or None where it is another."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    if getattr(libc, "mallopt", None) is None or getattr(libc, "gnu_get_libc_version", None) is None:
        return None
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
