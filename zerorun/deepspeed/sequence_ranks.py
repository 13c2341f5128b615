"""Ranks that divide sequences, by DeepSpeed's names: ``runtime.sequence_parallel.ulysses_sp`` and ``parallel_state_sp``.

Scripts and Trainer say how many ranks there are before there is an engine, and pass what they get as ``mpu`` to
``initialize``. There the model's attention is replaced by DeepSpeed, and each rank is given rows of a batch. Here the model
divides sequences itself (zerorun/context_parallel), so that it stays as it is, and each rank gets the whole batch.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ..distributed.topology import Topology
from ..distributed.transport.world import gather_values
from ..errors import ConfigError, ConfigProblem
from ..log import info_once


@dataclass(frozen=True)
class _Chosen:
    """What a script has asked for. ``ranks`` has no process groups; ``group``: that of a sequence, or None: all.

    ``in_evaluation``: whether sequences are divided there, too.
    """

    ranks: Topology
    group: dist.ProcessGroup | None
    in_evaluation: bool


_chosen: weakref.WeakKeyDictionary[Any, _Chosen] = weakref.WeakKeyDictionary()  # by the group of all ranks


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let neighbouring ranks, so many, divide sequences. All ranks must call it. Raises TopologyError if they cannot."""
    _choose(sequence_parallel_size, in_evaluation=True)


def _choose(size: int, *, in_evaluation: bool) -> None:
    ranks, group = Topology.plan(dist.get_world_size(), dist.get_rank(), context=size), None
    if ranks.context < ranks.world_size:
        group, _ = dist.new_subgroups_by_enumeration(list(map(list, ranks.groups("context"))))
    _chosen[dist.group.WORLD] = _Chosen(ranks, group, in_evaluation)


def chosen() -> Topology | None:
    """The ranks that a script has asked for; None if it has not."""
    found = _latest()
    return None if found is None else found.ranks


def divides_in_evaluation() -> bool:
    """False if a script has asked for whole sequences in evaluation."""
    found = _latest()
    return found is None or found.in_evaluation


def _latest() -> _Chosen | None:
    return _chosen.get(dist.group.WORLD) if dist.is_initialized() else None


def _found() -> _Chosen:
    found = _latest()
    if found is None:
        reason = "no ranks divide sequences yet."
        remedy = "Call initialize_sequence_parallel(), or UlyssesSPAttentionHF.register_with_transformers()."
        raise ConfigError([ConfigProblem("sequence_parallel_size", None, reason, remedy)], "parallel_state_sp")
    return found


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """The process group of the ranks that divide each sequence."""
    return _found().group or dist.group.WORLD


def get_sequence_parallel_world_size() -> int:
    return _found().ranks.context


def get_sequence_parallel_rank() -> int:
    return _found().ranks.context_rank


def get_data_parallel_world_size() -> int:
    return _found().ranks.data_parallel_size


def get_data_parallel_rank() -> int:
    return _found().ranks.data_parallel_rank


class UlyssesSPAttentionHF:
    """DeepSpeed's replacement of a model's attention. Here it only says how many ranks divide sequences."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Return what ``initialize`` is to be given as ``mpu``; None for one rank. All ranks must call it.

        ``core_attn_implementation`` has to be that of the model, if one is given. ``disable_in_eval``: each rank has data
        of its own in evaluation. Lengths and ``micro_batch_size`` have no effect: any batch will do. Raises ConfigError
        for another implementation, and TopologyError if so many ranks cannot divide sequences.
        """
        if sequence_parallel_size == 1:
            return None
        own = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if own is not None and own != core_attn_implementation:
            reason, remedy = f"the model was made with {own!r}.", "Name one implementation in both places."
            problem = ConfigProblem("core_attn_implementation", core_attn_implementation, reason, remedy)
            raise ConfigError([problem], "register_with_transformers()")
        _choose(sequence_parallel_size, in_evaluation=not disable_in_eval)
        info_once(
            "UlyssesSPAttentionHF: zerorun divides sequences inside the model, which keeps its attention; "
            'context_parallel.method says how, and "auto" is the way that sends least.'
        )
        return sys.modules[__name__]


class UlyssesSPDataLoaderAdapter:
    """Gives each rank of a group of ``sp_group`` the batches of all of them, one after the other: all have the same.

    ``dl``: a loader of this rank's own batches, which are dicts with ``labels`` [batch, sequence]. They leave with
    ``shift_labels`` [batch, sequence] instead: the token that each one is to predict. It has as many batches as the loaders
    of all ranks together, and what ``dl`` has besides.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: dist.ProcessGroup, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size, self.device = dl, sp_rank, sp_group, sp_world_size, device
        self._own: Iterator[dict[str, Any]] = iter(dl)
        self._waiting: deque[dict[str, Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dl"], name)

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch, on the CPU. It ends, and can begin anew, when no rank has one any more."""
        if not self._waiting:
            own = next(self._own, None)  # tokenizers make a class of their own, which has items as a dict has
            found = gather_values(None if own is None else dict(own.items()), self.sp_group)
            self._waiting.extend(_shifted(batch) for batch in found if batch is not None)
        if not self._waiting:
            self._own = iter(self.dl)
            raise StopIteration
        return self._waiting.popleft()


def _shifted(batch: dict[str, Any]) -> dict[str, Any]:
    if "labels" not in batch or "shift_labels" in batch:
        return batch
    labels: torch.Tensor = batch["labels"]
    rest = {name: value for name, value in batch.items() if name != "labels"}
    return {**rest, "shift_labels": functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()}
