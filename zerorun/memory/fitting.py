"""Fitting: check whether a training fits into free memory, before anything is allocated, and find out what would fit.

The need is a lower bound and the free memory an upper bound, so that nothing is refused that could run. Therefore
activations do not count, nor does what the parameters occupy already, nor what is allocated but certainly never written (if
the limit is on memory in use). Pinned memory does not count towards RLIMIT_MEMLOCK: the GPU's driver is not subject to it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.device import free_bytes, name_of, on_host
from ..distributed.replication import ALONE, Replication
from ..distributed.topology import Topology
from ..distributed.transport_kinds import GLOO, PEER_MEMORY
from ..errors import ConfigError, DoesNotFitError, TopologyError
from ..launcher import copy_keeper
from ..log import in_bytes
from ..optim.requested_optimizer import RawOptimizer
from ..pipeline.pipelined import Pipelined
from ..plan.byte_ledger import heaviest_rank, planned_bytes, total_of, with_states
from ..plan.make_plan import make_plan, planned_topology
from ..plan.optimizer_states import OptimizerStates, state_count
from ..plan.receive_buffers import receive_buffer_bytes
from ..plan.sharding_plan import ShardingPlan
from ..watch.launch_environment import ranks_here
from ..zero.init import part_of
from .estimate import held_whole, memory_of_copies
from .limits import Limit, cgroup_path, host_limits, node_name
from .peaks import Bytes, Holding, never_written, start_up

_TO_HOST = {"device": "cpu"}
_TO_DISK = {"device": "nvme", "nvme_path": "a folder on a local disk"}
_MOST_NODES = 1024  # the search for a training that fits tries up to this many times the nodes that there are


@dataclass(frozen=True)
class Demand:
    """The bytes that a rank needs beyond those it already holds. ``virtual``: allocated host memory, written or not."""

    device: int
    host: int
    virtual: int
    node: str = ""
    cgroup: str = "/"
    device_name: str = ""  # the same for ranks that share a device


@dataclass(frozen=True)
class Choice:
    """A configuration that may fit: the keys to change, and the number of ranks."""

    keys: dict[str, Any]
    config: Config
    world_size: int


class Fitting:
    """This rank's demand, and the check once all ranks' demands are known. It changes neither model nor optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        raw: RawOptimizer,
        plan: ShardingPlan,
        device: torch.device,
        limits: list[Limit] | None = None,
        replication_of: Callable[[nn.Parameter], Replication] = lambda param: ALONE,
    ) -> None:
        """``plan``: that of this rank, for ``config``. ``limits``: those of host memory; default, this process's.

        ``replication_of``: as for ``make_plan``.
        """
        self._model, self._config, self._raw, self._device = model, config, raw, device
        self._topology, self._replication_of = plan.topology, replication_of
        self._limits = host_limits() if limits is None else limits
        self._plan = self._with_states(plan)

    def _planned(self, config: Config, topology: Topology) -> ShardingPlan:
        between_nodes = topology.world_size > self._topology.world_size and self._plan.transport == PEER_MEMORY
        transport = GLOO if between_nodes else self._plan.transport
        given = (self._model, config, self._raw, topology, transport, self._device.type)
        return self._with_states(make_plan(*given, replication_of=self._replication_of))

    def _with_states(self, plan: ShardingPlan) -> ShardingPlan:
        on_host = any(unit.placement.optimizer for unit in plan.units)
        return with_states(plan, self._states_on_host if on_host else self._states)

    @cached_property
    def _states(self) -> OptimizerStates:
        return OptimizerStates(self._raw, self._device)

    @cached_property
    def _states_on_host(self) -> OptimizerStates:
        return self._states if on_host(self._device) else OptimizerStates(self._raw, torch.device("cpu"))

    @cached_property
    def demand(self) -> Demand:
        """This rank's demand, and with which ranks it shares memory."""
        name = f"{self._device} of rank {self._topology.rank}"
        needed = self._demand_of(self._plan)
        return replace(needed, node=node_name(), cgroup=cgroup_path(), device_name=name_of(self._device, name))

    def _demand_of(self, plan: ShardingPlan) -> Demand:
        kinds, here = planned_bytes(plan), ranks_here(plan.topology.world_size)
        copies = memory_of_copies(plan, self._config, several_hosts=here < plan.topology.world_size)
        host = total_of(kinds, "host") + max(0, copies - self._copies_left // here)
        total = total_of(kinds, "device") + host
        held, start = self._held, start_up(plan, self._model, self._held_by)
        if on_host(self._device):
            unwritten = kinds["slots"] + kinds["gradients"]  # as long as units are being built
            written = max(total - never_written(plan), start.both - unwritten)
            return Demand(0, written - held.both, max(total, start.both) - held.both)
        host += receive_buffer_bytes(plan)
        on_device = max(total - host, start.device) - held.device
        beside = max(host, start.host) - held.host
        return Demand(on_device, beside, beside)

    @cached_property
    def _held(self) -> Bytes:
        """The bytes that parameters and buffers occupy now."""
        total = sum((self._held_by(param).now for param in self._model.parameters()), Bytes())
        for buffer in self._model.buffers():
            size = buffer.numel() * buffer.element_size()
            total += Bytes(size) if buffer.device.type == self._device.type else Bytes(host=size)
        return total

    def _held_by(self, param: nn.Parameter) -> Holding:
        part = part_of(param)
        if part is None:
            return held_whole(param, self._device.type)
        size = part.numel() * part.element_size()
        now = Bytes(size) if part.device.type == self._device.type else Bytes(host=size)
        return Holding(now, param.numel() * param.element_size())

    # -- the check -----------------------------------------------------------------------------------------------

    def require(self, demands: list[Demand]) -> None:
        """Raise DoesNotFitError if the ranks of this node together need more than there is. ``demands``: of all ranks."""
        mine = self.demand
        near = [demand for demand in demands if demand.node == mine.node]
        on_device = [demand.device for demand in demands if demand.device_name == mine.device_name]
        short = self._shortage(sum(on_device), mine.virtual, near)
        if short is not None:
            raise DoesNotFitError(self._refusal(short, near, len(on_device)))
        self._require_shared_memory(len(near), several_hosts=len(near) < len(demands))

    def _require_shared_memory(self, ranks: int, *, several_hosts: bool) -> None:
        """Raise DoesNotFitError if the memory file system is too small for what ``checkpoint.in_memory`` keeps there."""
        folder, every = copy_keeper.own_folder(), self._config.checkpoint.in_memory.every_steps
        if not every or folder is None:
            return
        needed = ranks * memory_of_copies(self._plan, self._config, several_hosts=several_hosts)
        free = shutil.disk_usage(folder).free + self._copies_left
        if needed > free:
            raise DoesNotFitError(
                f"checkpoint.in_memory.every_steps = {every}: the copies of the {ranks} ranks of {self.demand.node} take "
                f"{in_bytes(needed)} of {os.path.dirname(folder)}, which has {in_bytes(free)} free. Nothing has been "
                "allocated. Remedy: make it larger (mount -o remount,size=, docker run --shm-size), or leave the key out. "
                "ZERORUN_MEMORY_CHECK=0 switches this check off."
            )

    @cached_property
    def _copies_left(self) -> int:
        """The bytes on this host of copies that a start before has left, which make room for new ones."""
        folder = copy_keeper.own_folder()
        return copy_keeper.engine_folders.left_bytes(folder) if folder is not None else 0

    def _shortage(self, device: int, virtual: int, near: list[Demand]) -> str | None:
        """Return in words which memory is too small, or None."""
        free = self._free_on_device
        if free is not None and device > free:
            return f"{self._device} needs {in_bytes(device)} more, and has {in_bytes(free)} free"
        for limit in self._limits:
            inside = [demand.host for demand in near if limit.cgroup in ("/", demand.cgroup) or _around(limit, demand)]
            needed = virtual if limit.cgroup is None else sum(inside)
            who = "this rank needs" if limit.cgroup is None else f"{len(inside)} ranks of node {self.demand.node} need"
            if needed > limit.available:
                return f"{who} {in_bytes(needed)} more, and {limit.name} leaves {in_bytes(limit.available)}"
        return None

    @cached_property
    def _free_on_device(self) -> int | None:
        return free_bytes(self._device)

    def _refusal(self, short: str, near: list[Demand], sharing: int) -> str:
        kinds = planned_bytes(self._plan)
        table = "\n".join(f"  {kind:<20}{in_bytes(size):>12}" for kind, size in kinds.items() if size)
        choice = self._nearest(near, sharing)
        remedy = "free memory, or use a smaller model: no stage, placement or number of ranks would fit."
        if choice is not None:
            keys = f"set {json.dumps({'zero_optimization': choice.keys})}" if choice.keys else "keep the configuration"
            ranks = self._topology.world_size
            nodes = choice.world_size // max(len(near), 1)
            more = f", and start {choice.world_size} ranks on {nodes} such nodes" if choice.world_size > ranks else ""
            remedy = f"{keys}{more}; this is the nearest configuration that fits."
        untouched = "" if isinstance(self._model, Pipelined) else ", and the model is as it was"
        return (
            f"the training does not fit into memory: {short}. Nothing has been allocated{untouched}. "
            f"This rank would hold, apart from activations:\n{table}\n"
            f"  of which {in_bytes(self._held.both)} are there already, as the module's parameters and buffers.\n"
            f"Remedy: {remedy} ZERORUN_MEMORY_CHECK=0 switches this check off."
        )

    # -- what would fit ------------------------------------------------------------------------------------------

    def _nearest(self, near: list[Demand], sharing: int) -> Choice | None:
        """Return the first choice that fits on nodes like this one, or None."""
        for choice in self._choices(max(len(near), 1)):
            try:
                topology = planned_topology(choice.config, choice.world_size, max(len(near), 1))
            except TopologyError:
                continue
            plan = self._planned(choice.config, topology)
            heaviest = heaviest_rank(plan, self._states)
            if heaviest:
                plan = self._planned(choice.config, replace(topology, rank=topology.rank_at(shard=heaviest)))
            needed = self._demand_of(plan)
            beside = [replace(needed, node=other.node, cgroup=other.cgroup) for other in near]
            if self._shortage(needed.device * sharing, needed.virtual, beside) is None:
                return choice
        return None

    def _choices(self, local: int) -> Iterator[Choice]:
        """Yield choices, those that slow a step down least first: a higher stage, offload, more nodes."""
        ranks = self._topology.world_size
        here = [(keys, _changed(self._config, keys)) for keys in self._placements()]
        yield from (Choice(keys, config, ranks) for keys, config in here if keys)
        factor = 2
        while factor <= _MOST_NODES:
            yield from (Choice(keys, config, ranks * factor) for keys, config in here)
            factor *= 2

    def _placements(self) -> Iterator[dict[str, Any]]:
        """Yield changes of zero_optimization, beginning with none."""
        zero = self._config.zero_optimization
        stages = range(max(zero.stage, 1), 4)
        once = {"zero_hpz_partition_size": 1} if zero.zero_hpz_partition_size > 1 and zero.stage == 3 else {}
        yield {}
        yield from [once] if once else []  # without a second copy of the weights
        yield from ({"stage": stage} for stage in range(zero.stage + 1, 4))
        if not on_host(self._device):  # on a CPU, offloading to the host would free nothing
            if zero.offload_optimizer.is_off():
                yield from ({"stage": stage, "offload_optimizer": _TO_HOST} for stage in stages)
            if zero.offload_param.is_off():
                yield {"stage": 3, "offload_optimizer": _TO_HOST, "offload_param": _TO_HOST}
        if zero.offload_optimizer.device != "nvme" and self._can_update_on_disk():
            yield from ({"stage": stage, "offload_optimizer": _TO_DISK} for stage in stages)
            yield {"stage": 3, "offload_optimizer": _TO_DISK, "offload_param": _TO_DISK}

    def _can_update_on_disk(self) -> bool:
        try:
            return bool(self._raw.groups) and state_count(self._raw) >= 0
        except ConfigError:
            return False


def _around(limit: Limit, demand: Demand) -> bool:
    """True if the rank's control group is inside that of the limit."""
    return limit.cgroup is not None and demand.cgroup.startswith(f"{limit.cgroup.rstrip('/')}/")


def _changed(config: Config, keys: dict[str, Any]) -> Config:
    """Return ``config`` with other values in zero_optimization."""
    zero = config.zero_optimization
    values = {
        key: getattr(zero, key).model_copy(update=value) if isinstance(value, dict) else value
        for key, value in keys.items()
    }
    return config.model_copy(update={"zero_optimization": zero.model_copy(update=values)})
