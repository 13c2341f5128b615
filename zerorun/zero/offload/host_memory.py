"""Host memory: settings of the C library's allocator for models in host memory.

[Note: freed memory is kept]
A training step frees what it has allocated, and the next one allocates the same again. In between, the C library would give
the end of its heap back to the kernel, and get it back page by page, each zeroed. These are tens of thousands of page
faults per step, which take 2 to 3 % of its time if a process has one thread. If the library keeps freed memory, there are
none.

Settings that the user makes in the environment are left alone. Other C libraries than glibc have no such calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

# Parameters of mallopt(), as in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes at the end of the heap that are kept: the largest int.
_KEPT = 2**31 - 1
# Allocations of at least this many bytes are separate mappings, which are freed at once: the most that glibc allows.
_OWN_MAPPING = 32 * 2**20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed() -> None:
    """Let the C library keep freed memory for the next step."""
    set_by_user = any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        if not set_by_user:
            mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)


def give_back_freed() -> None:
    """Let the C library return freed memory to the kernel, also in the middle of the heap.

    Parameters are freed one by one between new buffers, so the library would keep as much memory as the model takes.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
