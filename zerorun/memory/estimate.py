"""Estimate: estimate_memory() computes the bytes that a training would take, without allocating any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.device import CPU, GPU, default_device
from ..distributed.transport import peer_memory
from ..distributed.transport_kinds import GLOO, NCCL, PEER_MEMORY
from ..errors import TopologyError
from ..log import in_bytes
from ..model_setup.checked_arguments import OptimizerLike, take_in
from ..model_setup.planned_stages import PlannedPart, planned_parts
from ..plan.byte_ledger import copied_bytes, heaviest_rank, planned_bytes, total_of, with_states
from ..plan.make_plan import planned_topology
from ..plan.optimizer_states import OptimizerStates
from ..plan.parameter_kinds import named_members, own_members, stays_apart, stored_bytes
from ..plan.sharding_plan import ShardingPlan
from .peaks import Bytes, Held, Holding, Peak, gradients_in_backward, start_up

_RANKS_PER_NODE = 8  # the default
_COPIES = 2  # in shared memory at a time


# Kinds whose names need an explanation.
_MEANING = {"slots": "slots (units in use, embedding, head)"}


@dataclass(frozen=True)
class Estimate:
    """The bytes of the rank that holds the most, and of its node. It prints as a table.

    With pipeline stages, the rank is in ``pipe_rank``, the stage that takes the most.

    ``kinds``: what ``engine.memory_report()`` shows after a step; kinds that begin with "host" are in host memory, and
    those that begin with "disk" in files.
    ``start_up``: the peak of ``initialize()`` for a module built as usual, in full on every rank.
    ``start_up_with_init``: the peak for a module built inside ``zerorun.zero.Init()``, including its construction.
    ``gradients_in_backward``: the most bytes of gradients that autograd has made and zerorun has not taken over yet.
    ``activation_bytes``: as given; zerorun cannot know what the model keeps between forward and backward.

    On a CPU the device is the host, so ``device_*`` includes the host kinds.
    """

    kinds: Mapping[str, int]
    parameters: int  # elements
    stage: int
    world_size: int  # ranks
    ranks_per_node: int
    device: str  # "cuda" or "cpu"
    transport: str  # of gradients and parameters: "nccl", "gloo" or "peer memory"
    start_up: Peak
    start_up_with_init: Peak
    gradients_in_backward: int
    activation_bytes: int
    notes: tuple[str, ...] = ()
    pipe: int = 1  # stages
    tensor: int = 1  # ranks that divide a layer
    pipe_rank: int = 0
    copied_bytes: int = 0  # of ``checkpoint.in_memory``, in the host's shared memory

    @property
    def host_bytes(self) -> int:
        """The bytes that a rank keeps in host memory in addition to its device."""
        return total_of(self.kinds, "host")

    @property
    def disk_bytes(self) -> int:
        """The bytes that a rank keeps in files."""
        return total_of(self.kinds, "disk")

    @property
    def device_bytes(self) -> int:
        """The bytes that a rank keeps on its device."""
        return total_of(self.kinds, "device") + (self.host_bytes if self.device == "cpu" else 0)

    @property
    def step_peak_bytes(self) -> int:
        """The device's peak in a step: all kinds, gradients that autograd has just made, and ``activation_bytes``.

        It does not include the temporaries of single operations, nor those of other packages' optimizers in their step.
        """
        return self.device_bytes + self.gradients_in_backward + self.activation_bytes

    @property
    def peak_bytes(self) -> int:
        """The device's peak over start-up and steps, for a module built as usual."""
        return max(self.step_peak_bytes, self._on_device(self.start_up))

    @property
    def peak_with_init_bytes(self) -> int:
        """The device's peak over start-up and steps, for a module built inside ``zerorun.zero.Init()``."""
        return max(self.step_peak_bytes, self._on_device(self.start_up_with_init))

    @property
    def node_host_bytes(self) -> int:
        """The peak of one node's host memory, for all its ranks, with modules built as usual."""
        if self.device == "cpu":
            return self.ranks_per_node * max(self.peak_bytes, self.step_peak_bytes + self.copied_bytes)
        return self.ranks_per_node * max(self.host_bytes + self.copied_bytes, self.start_up.host)

    @property
    def node_host_with_init_bytes(self) -> int:
        """The peak of one node's host memory, for all its ranks, with modules built inside ``zerorun.zero.Init()``."""
        if self.device == "cpu":
            return self.ranks_per_node * max(self.peak_with_init_bytes, self.step_peak_bytes + self.copied_bytes)
        return self.ranks_per_node * max(self.host_bytes + self.copied_bytes, self.start_up_with_init.host)

    def _on_device(self, peak: Peak) -> int:
        return peak.both if self.device == "cpu" else peak.device

    def __str__(self) -> str:
        data = self.world_size // (self.pipe * self.tensor)
        degrees = f"{self.pipe} pipeline stages x {self.tensor} tensor x {data} data-parallel = "
        where = f" is in pipeline stage {self.pipe_rank}" if self.pipe > 1 else ""
        lines = [
            f"stage {self.stage}, {degrees if self.pipe * self.tensor > 1 else ''}{self.world_size} ranks "
            f"({self.ranks_per_node} on a node, {self.transport}), "
            f"{self.parameters:,} parameters; the rank that holds the most{where}, on {self.device}:",
            *(f"  {_MEANING.get(kind, kind):<44}{in_bytes(size):>12}" for kind, size in self.kinds.items() if size),
        ]
        backward = self.gradients_in_backward + self.activation_bytes
        rows = {
            "together, on the device": self.device_bytes,
            "gradients on their way, and given activations": backward,
            "peak of a step": self.step_peak_bytes,
            "peak of the start-up": self._on_device(self.start_up),
            "peak of the start-up with zero.Init()": self._on_device(self.start_up_with_init),
            **({"copies in host memory": self.copied_bytes} if self.copied_bytes else {}),
            "host memory of one node, at its peak": self.node_host_bytes,
            "host memory of one node with zero.Init()": self.node_host_with_init_bytes,
        }
        lines += [f"  {what:<44}{in_bytes(size):>12}" for what, size in rows.items()]
        return "\n".join([*lines, *self.notes])


def estimate_memory(
    model: nn.Module,
    config: str | Path | dict[str, Any],
    world_size: int,
    *,
    ranks_per_node: int | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    device: str | None = None,
    transport: str | None = None,
    activation_bytes: int = 0,
) -> Estimate:
    """Estimate the memory of ``zerorun.initialize(model, config)`` and its steps on ``world_size`` ranks. Allocates none.

    ``model``: on the meta device or real; it is not changed. ``optimizer`` and ``model_parameters``: as for ``initialize``.
    ``ranks_per_node``: default 8, or ``world_size`` if that is less. ``device``: "cuda" or "cpu"; default, that of this
    machine. ``transport``: "nccl", "gloo" or "peer memory"; default, the one that the ranks would use.
    ``activation_bytes``: their peak on one rank (``zerorun.checkpointing.kept_bytes`` measures them for a block).

    Raises ConfigError, ModelError or TopologyError, as ``initialize`` would.
    """
    if world_size < 1:
        raise TopologyError(f"world_size must be at least 1, got {world_size}.")
    wanted, raw = take_in(model, config, None, optimizer, model_parameters, world_size)
    kind = torch.device(device).type if device is not None else default_device().type
    local = min(ranks_per_node or _RANKS_PER_NODE, world_size)
    transport = transport or default_transport(kind, world_size, local)
    if transport not in (NCCL, GLOO, PEER_MEMORY):
        raise TopologyError(f"transport must be {NCCL!r}, {GLOO!r} or {PEER_MEMORY!r}, got {transport!r}.")
    topology = planned_topology(wanted, world_size, local)
    parts = planned_parts(model, wanted, raw, topology)
    of_part = partial(
        _estimate,
        whole=model,
        config=wanted,
        transport=transport,
        device=kind,
        ranks_per_node=local,
        activation_bytes=activation_bytes,
    )
    return max(map(of_part, parts), key=lambda estimate: estimate.step_peak_bytes)


def _estimate(
    part: PlannedPart,
    *,
    whole: nn.Module,
    config: Config,
    transport: str,
    device: str,
    ranks_per_node: int,
    activation_bytes: int,
) -> Estimate:
    topology, states = part.topology, OptimizerStates(part.raw, torch.device("cpu"))
    plan = with_states(part.plan(config, transport, device), states)
    heaviest = heaviest_rank(plan, states)
    if heaviest:
        part = replace(part, topology=replace(topology, rank=topology.rank_at(shard=heaviest)))
        plan = with_states(part.plan(config, transport, device), states)
    return Estimate(
        kinds=planned_bytes(plan),
        parameters=sum(param.numel() for param in whole.parameters()),
        stage=config.zero_optimization.stage,
        world_size=topology.world_size,
        ranks_per_node=ranks_per_node,
        device=device,
        transport=transport,
        start_up=_from_whole(plan, part, whole, device),
        start_up_with_init=_from_parts(plan, part, whole, device),
        gradients_in_backward=gradients_in_backward(plan),
        activation_bytes=activation_bytes,
        notes=(states.unknown,) if states.unknown else (),
        pipe=topology.pipe,
        tensor=topology.tensor,
        pipe_rank=topology.pipe_rank,
        copied_bytes=memory_of_copies(plan, config, several_hosts=topology.world_size > ranks_per_node),
    )


def memory_of_copies(plan: ShardingPlan, config: Config, *, several_hosts: bool) -> int:
    """Return the bytes of host memory that ``checkpoint.in_memory`` takes of a rank.

    Its share is there twice, because one copy is made while another one is whole. If there are ``several_hosts``, that of a
    rank of another host is there, too.
    """
    if not config.checkpoint.in_memory.every_steps:
        return 0
    return copied_bytes(plan) * _COPIES * (2 if several_hosts else 1)


def default_transport(device_type: str, world_size: int, ranks_per_node: int) -> str:
    """Return the transport that ranks would use by default."""
    if device_type == GPU:
        return NCCL
    return PEER_MEMORY if world_size <= ranks_per_node and peer_memory.can_be_used() else GLOO


def held_whole(param: nn.Parameter, device_type: str) -> Holding:
    """Return what a parameter of an ordinary module occupies: on the device if it is there, else in host memory."""
    size = stored_bytes(param)
    return Holding(Bytes(size) if param.device.type == device_type else Bytes(host=size))


def _held_in_parts(param: nn.Parameter, device_type: str, world_size: int) -> Holding:
    """Return what a parameter occupies that ``Init`` will partition; parameters that stay apart are held whole.

    It is made on the device where it will be used.
    """
    if stays_apart(param):
        return held_whole(param, device_type)
    part = -(-param.numel() // world_size) * param.element_size()
    on_device = param.device.type == device_type or device_type == CPU
    return Holding(Bytes(part) if on_device else Bytes(host=part), param.numel() * param.element_size())


def _from_whole(plan: ShardingPlan, part: PlannedPart, whole: nn.Module, device: str) -> Peak:
    """Return the start-up peak of a module that every rank builds in full before it drops the parts of other ranks."""
    held = partial(held_whole, device_type=device)
    return _higher(start_up(plan, part.model, held), _all(held, whole) + Bytes(host=part.tried_bytes))


def _from_parts(plan: ShardingPlan, part: PlannedPart, whole: nn.Module, device: str) -> Peak:
    """Return the start-up peak of a module built inside ``Init``: parts of all parameters, and one module's in full."""
    topology = part.topology
    held = partial(_held_in_parts, device_type=device, world_size=topology.world_size)
    parts = _all(held, whole)
    own = [sum(held(tensor).put_together for tensor in own_members(module)) for module in whole.modules()]
    built = _higher(_beside(parts, max(own)), parts + Bytes(host=part.tried_bytes))
    if topology.pipe * topology.tensor * topology.expert == 1:
        return _higher(start_up(plan, part.model, held), built)
    # All parameters are put together, one after the other, and this rank keeps its own part of the model in full.
    ordinary = partial(held_whole, device_type=device)
    largest = max(held(tensor).put_together for _, tensor in named_members(whole))
    settled = _beside(parts + _all(ordinary, part.model), largest)
    return _higher(_higher(start_up(plan, part.model, ordinary), built), settled)


def _all(held: Held, model: nn.Module) -> Bytes:
    return sum((held(param).now for _, param in named_members(model)), Bytes())


def _beside(held: Bytes, more: int) -> Bytes:
    """Return ``held`` with ``more`` bytes in the same place."""
    return held + (Bytes(more) if held.device else Bytes(host=more))


def _higher(peak: Peak | Bytes, moment: Peak | Bytes) -> Peak:
    return Peak(max(peak.device, moment.device), max(peak.host, moment.host), max(peak.both, moment.both))
