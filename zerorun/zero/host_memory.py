"""Host memory: what the C library and the kernel are asked for, where the model is in the memory of the host.

[Note: freed memory is kept]
A training step frees what it has allocated, and the next one allocates the same again. The C library would give the end of
its heap back to the kernel in between, and get it back page by page, each zeroed: tens of thousands of page faults in a
step, which take 2 to 3 % of its time where a process has one thread. Told to keep freed memory, it has none.

Settings of the user's own, by the environment, are left alone. Other C libraries and kernels have no such calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

# As malloc.h and mman.h of Linux have them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_HUGEPAGE = 14
# Bytes at the end of the heap that stay; the most that an int can say.
_KEPT = 2**31 - 1
# Bytes from which on an allocation is a mapping of its own, and freed at once; the most that the C library allows.
_OWN_MAPPING = 32 * 2**20
_HUGE_PAGE = 2 * 2**20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed() -> None:
    """Let the C library keep what is freed, for the next step."""
    set_by_user = any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        if not set_by_user:
            mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)


def give_back_freed() -> None:
    """Let the C library return what it keeps of freed memory: also pieces that others lie behind.

    Parameters are freed one by one in the midst of new buffers, so it would keep as much as the model takes.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def prefer_huge_pages(buffer: torch.Tensor) -> None:
    """Ask for pages of 2 MiB in the middle of ``buffer``, which nothing was written to yet.

    What is read from another process goes into them faster by a third than into small ones.
    """
    begin = -(-buffer.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (buffer.data_ptr() + buffer.numel() * buffer.element_size()) // _HUGE_PAGE * _HUGE_PAGE
    if buffer.device.type == "cpu" and end > begin:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
