"""Huge pages: asking the kernel of Linux for pages of 2 MiB, in the middle of a tensor in the memory of the host.

Both calls are advice. Other kernels have none of them, and a kernel may refuse: small pages serve as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import time

import torch

from ..device import on_host

HUGE_PAGE = 2 << 20  # bytes
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # as mman.h of Linux has them
_ATTEMPTS = 10


def prefer_huge_pages(buffer: torch.Tensor) -> None:
    """Ask for huge pages in ``buffer``, which nothing was written to yet.

    What is read from another process goes into them faster by a third than into small ones.
    """
    _advise(buffer, _MADV_HUGEPAGE)


def make_huge(buffer: torch.Tensor) -> None:
    """Make the small pages of ``buffer``, which exist, huge ones (since Linux 6.1)."""
    for _ in range(_ATTEMPTS):
        if _advise(buffer, _MADV_COLLAPSE) != errno.EAGAIN:
            break
        time.sleep(1e-3)  # another process held one of the pages for a moment


def _advise(buffer: torch.Tensor, advice: int) -> int:
    """Give ``advice`` on the whole huge pages of ``buffer``. 0, or the number of the kernel's refusal."""
    begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
    begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
    if on_host(buffer) and end > begin:
        with contextlib.suppress(AttributeError, OSError):
            madvise = ctypes.CDLL(None, use_errno=True).madvise
            if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice):
                return ctypes.get_errno()
    return 0
