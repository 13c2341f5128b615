"""Waiter: when messages between two ranks have left or come. gloo does not tell whether such a work is done."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from ..waits import time_limit


class Waiter:
    """A thread that waits for messages between two ranks, in order. It ends when nobody refers to the waiter any more."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._queue.put, None).atexit = False

    @staticmethod
    def waiting() -> bool:
        """True if a message of this process has not come to its end."""
        return bool(_unfinished)

    def begin(self, work: dist.Work, kept: Any = None) -> Future[None]:
        """Done when ``work`` is, or failed as it has. ``kept``: what must stay alive until then."""
        if self._thread is None:  # a daemon: nobody waits at exit for a rank that has ended
            self._thread = threading.Thread(target=_work_off, args=(self._queue,), name="zerorun messages", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        _unfinished.add(future)
        self._queue.put((future, work, kept))
        return future


_Message = tuple[Future[None], dist.Work, Any]
_unfinished: set[Future[None]] = set()  # of all waiters, whether anybody still refers to them or not


def _work_off(messages: SimpleQueue[_Message | None]) -> None:
    while (message := messages.get()) is not None:
        future, work, _ = message
        try:
            work.wait(time_limit())
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        _unfinished.discard(future)
        del message, future, work, _  # before the next comes
