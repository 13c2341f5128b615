"""Sums of what ranks have sent, in one order: ranks ascending, in fp32. So every run and every stage has the same bits."""

from __future__ import annotations

import torch


def store(value: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """Let ``out`` be ``value``, or grow by it."""
    if accumulate:
        out.add_(value)
    elif value.data_ptr() != out.data_ptr():
        out.copy_(value)


def sum_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
    """``out`` (+)= parts[0] + parts[1] + ..., added in this order in fp32. Overwrites received parts as scratch.

    At most one part is this rank's own, and it may be ``out`` itself: it is never used as scratch.
    """
    if len(parts) == 1:
        store(parts[0], out, accumulate)
        return
    if len(parts) == 2 and not accumulate:
        torch.add(parts[0], parts[1], out=out)
        return
    received = parts[0] if parts[0].data_ptr() != out.data_ptr() else parts[1]
    if received.dtype == torch.float32:
        scratch = torch.add(parts[0], parts[1], out=received)
    else:
        scratch = parts[0].float().add_(parts[1])
    for part in parts[2:]:
        scratch.add_(part)
    store(scratch, out, accumulate)
