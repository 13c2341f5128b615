"""Offloading for a while: the device's memory is given back between two phases of training, for generation say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import StepError
from ..zero.offloaded_states import StateKind
from ..zero.sharded_model import ShardedModel


class Offloading:
    """The part of an engine that moves its states between the device and host memory."""

    sharded_model: ShardedModel

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory, and give the device's memory back. All ranks must call it.

        ``include``: "optim_states" (moments), "hp_params" (fp32 masters), "lp_params" (weights in the dtype of the
        computation, and the slots that they are gathered in), "lp_grads" (reduced gradients), "contiguous_grad_buffer"
        (full gradients); all of them by default. Weights in fp32, which are their own masters, go with "lp_params". What is
        in host memory or on a disk anyway stays there; where the device is a CPU nothing is moved. ``pin_memory``: the
        copies are pinned, and their memory is kept for the next call. ``non_blocking``: do not wait for the copies.

        Training goes on as if nothing had been moved: what is needed comes back by itself, weights with a forward,
        gradients with a backward, everything with ``step``, ``save_checkpoint`` and whatever else writes to states.
        ``reload_states`` does it beforehand. Until then parameters that are away read as NaN, outside of a forward, of
        ``GatheredParameters`` and of ``state_dict``. ``memory_report()`` says where things are.

        Raises StepError for another name or device, and within ``GatheredParameters``.
        """
        names = [kind.value for kind in StateKind]
        wanted = names if include is None else [str(getattr(name, "value", name)) for name in include]
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise StepError(f"offload_states(include={unknown}): there are no such states. Remedy: choose from {names}.")
        _refuse_elsewhere(device)
        if self.sharded_model.runtime.guard.held:
            raise StepError("offload_states() inside GatheredParameters(...). Remedy: call it after the block.")
        self.settle()
        kinds = [kind for kind in StateKind if kind.value in wanted]
        self.sharded_model.offload(kinds, pinned=pin_memory, wait=not non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what ``offload_states`` has moved. Nothing if nothing is away.

        ``non_blocking``: do not wait for the copies; the device waits before it computes.
        """
        self.sharded_model.runtime.made.states.bring_back(wait=not non_blocking, asked=True)

    def empty_partition_cache(self) -> None:
        """Give back the device's memory in which stage 3 gathers parameters, until the next forward needs it.

        All ranks must call it. Nothing at other stages.
        """
        self.sharded_model.empty_slots()

    def settle(self) -> None:
        """Learn what has come of the last step."""
        raise NotImplementedError


def _refuse_elsewhere(device: Any) -> None:
    found = str(getattr(device, "value", device))
    if found != "cpu":
        raise StepError(f"offload_states(device={found!r}): states can go to host memory only. Remedy: leave device out.")
