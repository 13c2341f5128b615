"""Gradients of two kinds in one set of buffers: while one kind is in use, the other is kept beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .flat_group import KeptGradients
from .sharded_model import ShardedModel
from .unit import Unit


class _Uncounted:
    """Backwards that are no part of a step. Each reduces its gradients, so that a shard is all there is to keep of them."""

    def reduces_now(self) -> bool:
        return True

    def inspect(self, unit: Unit) -> None:
        pass

    def ended(self, *, late: bool = False) -> None:
        pass


class OtherGradients:
    """Gradients that do not belong to the step: backwards inside ``in_use`` leave the step's as they are.

    Each kind that is not in use and holds something takes as much memory as its buffers: a shard for each rank, or at
    stages 0 and 1 all gradients, as long as they are not reduced.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._kept: list[KeptGradients] | None = None  # of each trained flat group, in the order of units

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Reductions, norms and reads of gradients inside are those of the others. All ranks must enter and leave it."""
        step = self._exchange(self._kept)
        try:
            with self._model.runtime.reducer.counted_by(_Uncounted()):
                yield
        except BaseException:  # maybe of this rank alone: others are not waited for
            self.drop()
            self._kept = self._exchange(step, wait=False)
            raise
        self._kept = self._exchange(step)

    def drop(self) -> None:
        """Forget the others, which are in use."""
        for unit in self._model.units:
            for flat_group in unit.trainable:
                flat_group.forget_gradients()

    def forget(self) -> None:
        """Forget the others, which are not in use."""
        self._kept = None

    def _exchange(self, come: list[KeptGradients] | None, *, wait: bool = True) -> list[KeptGradients]:
        """``wait``: until no other rank reads these buffers any more."""
        self._model.finish_reductions()
        if wait:
            self._model.comm.fence()
        groups = [flat_group for unit in self._model.units for flat_group in unit.trainable]
        gone = [flat_group.keep_gradients() for flat_group in groups]
        for flat_group, kept in zip(groups, come or (), strict=come is not None):
            flat_group.bring_back_gradients(kept)
        self._model.runtime.reducer.look_for_late()
        return gone
