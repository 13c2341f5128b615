"""Host memory: what the C library is asked for, where the model is in the memory of the host.

[Note: freed memory is kept]
A training step frees what it has allocated, and the next one allocates the same again. The C library would give the end of
its heap back to the kernel in between, and get it back page by page, each zeroed: tens of thousands of page faults in a
step, which take 2 to 3 % of its time where a process has one thread. Told to keep freed memory, it has none.

Settings of the user's own, by the environment, are left alone. Other C libraries have no such calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

# As malloc.h has them.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes at the end of the heap that stay; the most that an int can say.
_KEPT = 2**31 - 1
# Bytes from which on an allocation is a mapping of its own, and freed at once; the most that the C library allows.
_OWN_MAPPING = 32 * 2**20
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
