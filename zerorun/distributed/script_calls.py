"""Collectives of torch.distributed that the script makes by itself, on the board of this rank.

[Note: why functions of torch are wrapped]
A rank in a barrier of the script waits for the others as much as one in a gather of the engine. Seen from outside it would
compute: nobody would know for whom it waits, and its wait would count as work of a slow rank. torch tells nobody of these
calls. So where a supervisor reads the boards, the functions of ``torch.distributed`` are replaced by ones that note the
wait and the bytes, and call them. Of calls that return at once (``async_op``) the bytes are noted alone. Calls of zerorun
are on the board already, and other threads than the main one do not hold up the training: theirs are not noted.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from ..watch.board import ALL, NOBODY, NUMBERS, OF_SCRIPT, Span, board, span_of
from .waits import waiting

# By which argument a call gets what has as many bytes on all ranks, a tensor or a list of them; None: there is none.
_SIZED = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "gather", "scatter"), "tensor"),
    "all_gather": "tensor_list",  # the tensors in it may differ
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "input",
    **dict.fromkeys(("all_to_all", "all_to_all_single", "barrier", "monitored_barrier")),
    **dict.fromkeys(("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")),
}
_OWN = __name__.partition(".")[0] + "."
_numbers: dict[tuple[str, Span], int] = defaultdict(int)


def show_script_calls() -> None:
    """Have collectives that the script makes from now on shown. Called again, do nothing."""
    for name, sized in _SIZED.items():
        function = getattr(dist, name, None)
        if function is not None and not hasattr(function, "shows_calls"):
            setattr(dist, name, _shown(function, f"{name}{OF_SCRIPT}", sized))


def _shown(function: Callable[..., Any], label: str, sized: str | None) -> Callable[..., Any]:
    places = {name: at for at, name in enumerate(inspect.signature(function).parameters)}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_none_of_script():
            return function(*args, **kwargs)

        def given(name: str | None) -> Any:
            at = places.get(name or "", len(args))
            return args[at] if at < len(args) else kwargs.get(name or "")

        span, nbytes = _span(given("group")), _bytes_of(given(sized))
        if span == NOBODY:
            return function(*args, **kwargs)
        number = _numbers[label, span] = (_numbers[label, span] + 1) % NUMBERS
        if nbytes is not None:
            board.note_size(label, span, number, nbytes)
        if given("async_op"):
            return function(*args, **kwargs)
        with waiting(label, None, span, number):
            return function(*args, **kwargs)

    call.shows_calls = True  # type: ignore[attr-defined]
    return call


def _bytes_of(given: Any) -> int | None:
    tensors = given if isinstance(given, list) else [given]
    known = all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) if known else None


def _is_none_of_script() -> bool:
    """True if zerorun has made the call, or another thread than the main one, or before ranks have met."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith(_OWN) or threading.get_ident() != _main or not dist.is_initialized()


def _span(group: Any) -> Span:
    """The ranks of ``group``; NOBODY if this one is not among them, or they have no equal steps."""
    if group is None or group is dist.group.WORLD:
        return ALL
    if not isinstance(group, dist.ProcessGroup):
        return NOBODY
    ranks = sorted(dist.get_process_group_ranks(group))
    span = span_of(ranks)
    return span if ranks == list(range(span[0], span[0] + span[1] * span[2], span[1])) else NOBODY


_main = threading.main_thread().ident
