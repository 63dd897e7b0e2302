"""One setting of the C library's allocator that decoding on a CPU depends on."""

from __future__ import annotations

import ctypes
import sys

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MIB = 1 << 20


def keep_freed_memory() -> None:
    """Let glibc keep freed megabytes for the next step instead of handing them back to the kernel.

    A step makes a handful of [K, V] temporaries of one or two MiB. By default each is unmapped when freed and faulted
    in again page by page a moment later, which costs several times the arithmetic done on it. Larger blocks than
    32 MiB, such as weights, still go back at once. Does nothing where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    mallopt(_M_TRIM_THRESHOLD, 256 * _MIB)
    mallopt(_M_TOP_PAD, 16 * _MIB)
