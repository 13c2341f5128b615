"""Step time: the seconds of a training step, as recurrences over blocks, micro-batches and collectives.

[Note: streams]
A rank computes on one stream and sends on another. In a forward at stage 3, block i may compute when it has been gathered,
and block i + 1 is gathered meanwhile:

    gather(i) = max(gather(i - 1), slot free) + G        compute(i) = max(compute(i - 1), gather(i)) + F

Blocks are equal, so the recurrence has a period: max(F, G), after the first gather. In a backward, reductions queue behind
gathers, and the last one is seen. What is hidden still costs something, because both streams use the same memory and
multiprocessors: ``interference`` of it. Stages 0 to 2 are the same recurrence with fewer collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from ..pipeline.schedule.schedules import make_schedule
from ..pipeline.schedule.simulate import Report, simulate
from ..pipeline.schedule.times import Times
from .block_time import BlockModel, BlockTimes
from .calibration import Calibration
from .candidate import GATHERS, REDUCTIONS, KernelGeneration, RunCandidate
from .footprint import layers_of_stages
from .hardware import Cluster
from .kernels import KernelModel
from .links import NETWORK, NVLINK, RankGroup, all_reduce_seconds, gather_seconds
from .model_shape import ModelShape

_UPDATE, _FUSED_UPDATE = 40, 28  # bytes that an update moves per parameter
_HOST_UPDATE, _OF_HOST = 28, 0.8  # the same in host memory, and the part of its bandwidth that the update reaches
_HOST_SUM = 12  # bytes that adding a gradient of four bytes to a sum moves in host memory
_ON_DISK = 24  # the same that are read from files and written to them, beside the update
_ROUNDS = 4  # micro-batches that are simulated, for each stage
_MOST_STAGES = 16  # of a zero-bubble schedule: to look for the best one of more takes long, and the formula is near
_MESSAGE = 20e-6  # seconds before a message between stages begins to arrive


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause: those of the slowest stage. ``forward``, ``backward``: of a micro-batch on one stage."""

    causes: dict[str, float]
    forward: float = 0.0
    backward: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.causes.values())

    @property
    def binding(self) -> str:
        """The cause that takes the most, apart from the products of matrices."""
        return max((cause for cause in self.causes if cause != "matrix products"), key=lambda cause: self.causes[cause])


@dataclass(frozen=True)
class RankFamily:
    """``numel`` parameters on a rank: ``every`` sums their gradients, ``shards`` divide their states.

    ``copies``: the ranks that have the same part of their states.
    """

    numel: float
    every: RankGroup
    shards: RankGroup
    copies: RankGroup


class StepModel:
    """The times of one candidate. Neighbouring ranks are those of a tensor group, then of a sequence, then replicas."""

    def __init__(self, shape: ModelShape, candidate: RunCandidate, cluster: Cluster, calibration: Calibration) -> None:
        self.shape, self.candidate, self.cluster = shape, candidate, cluster
        self.constants, self.calibration = calibration.constants, calibration
        efficiency = calibration.efficiency(cluster.gpu, candidate.kernels)
        self.kernels = KernelModel(cluster.gpu, candidate.kernels, efficiency, self.constants)
        self.blocks = BlockModel(candidate, cluster, self.kernels, self.constants)

    def step(self) -> StepTime:
        """Return the step in closed form, with blocks divided as evenly as they can be."""
        c, block, constants = self.candidate, self.block, self.constants
        blocks, micro = self.shape.layers / c.pipe, c.accumulation
        head = self.kernels.head(self.shape, c)
        last = head[0].seconds + head[1].seconds
        exposed, boundary = self.exposed_in_micro_batch, self.boundary_seconds()
        work, mean = block.work[0] + block.work[1], blocks * block.seconds + last / c.pipe
        slower = self.period(last) - mean  # of the slowest stage than the mean
        fill, waits = (c.pipe - 1) * (mean + exposed + boundary - self._filled(mean)), micro * slower
        bubble = fill * micro if c.schedule == "naive" else fill / c.chunks + waits
        causes = {
            "matrix products": micro * (blocks * work.products + (head[0].products + head[1].products) / c.pipe),
            "attention": micro * blocks * work.attention,
            "device memory": micro * (blocks * work.traffic + (head[0].traffic + head[1].traffic) / c.pipe + self._filed),
            "tensor ranks": micro * blocks * (block.on_gpu - work.seconds - block.rows),
            "rows to experts": micro * blocks * block.rows,
            "host": micro * blocks * (block.seconds - block.on_gpu),
            "messages of stages": micro * boundary,
            "pipeline bubble": self._seen_bubble(bubble, micro * (mean + exposed + boundary)),
            "gathers and reductions": micro * exposed + self.exposed_in_step,
            "update": self.update_seconds(),
        }
        causes["waiting for others"] = sum(causes.values()) * constants.jitter * log2(self.cluster.nodes)
        forward = (mean + slower + exposed) * block.forward / block.seconds
        return StepTime(causes, forward, mean + slower + exposed - forward)

    def _filled(self, mean: float) -> float:
        """Return the seconds of a bubble that gradients of weights fill: pipeline/schedule/formulas.py."""
        if not self.candidate.zero_bubble:
            return 0.0
        forward = mean * self.block.forward / self.block.seconds
        weights = min(forward, (mean - forward) / 2)
        return weights + min(forward, mean - forward - weights, weights)

    def _seen_bubble(self, bubble: float, work: float) -> float:
        """Return what is left of a bubble where others have the core of a rank that waits, and are faster meanwhile.

        All cores together do the work in the time that was measured. ``work``: the mean of the stages.
        """
        gpu = self.cluster.gpu
        return max(0.0, (work + bubble) * gpu.cores / gpu.processes - work) if 0 < gpu.cores < gpu.processes else bubble

    def simulated(self) -> StepTime:
        """Return the step with the bubble of a simulated schedule, in which stages have the blocks that they will have."""
        c, found = self.candidate, self.step()
        if c.pipe == 1 or (c.zero_bubble and c.pipe > _MOST_STAGES):
            return found
        bubble = self._simulated_bubble()
        causes = {**found.causes, "pipeline bubble": bubble}
        causes["waiting for others"] *= (found.seconds - found.causes["pipeline bubble"] + bubble) / found.seconds
        return StepTime(causes, found.forward, found.backward)

    def _simulated_bubble(self) -> float:
        """Return the makespan beyond the mean work of a stage. Long schedules are periodic, so few rounds are simulated.

        The two oldest ones have other periods than a stage's work, and are simulated to their end.
        """
        c, block = self.candidate, self.block
        rounds = c.accumulation if c.schedule in ("naive", "gpipe") else min(c.accumulation, _ROUNDS * c.pipe)
        report, times = self.schedule(rounds), self._times
        makespan = report.makespan + (c.accumulation - rounds) * max(map(times.work, range(c.pipe)))
        head = [work.seconds for work in self.kernels.head(self.shape, c)]
        mean = (
            (self.shape.layers * block.seconds + sum(head)) / c.pipe + self.exposed_in_micro_batch + self.boundary_seconds()
        )
        return self._seen_bubble(max(0.0, makespan - c.accumulation * mean), c.accumulation * mean)

    def schedule(self, micro_batches: int, *, record: bool = False) -> Report:
        """Return the simulated computations of ``micro_batches``, on all stages. ``record``: with when each ran."""
        c, times = self.candidate, self._times
        made = make_schedule(c.schedule, c.pipe, micro_batches, chunks=c.chunks, times=times)
        return simulate(made, times, record=record)

    @cached_property
    def _times(self) -> Times:
        """Seconds of a micro-batch on each stage, with what it waits for gathers and reductions."""
        c, block = self.candidate, self.block
        head = [work.seconds for work in self.kernels.head(self.shape, c)]
        blocks = layers_of_stages(self.shape, c.pipe, c.chunks)
        waits = self.exposed_in_micro_batch / 2
        forward = [count * block.forward + waits for count in blocks]
        backward = [count * block.backward + waits for count in blocks]
        forward[-1], backward[-1] = forward[-1] + head[0], backward[-1] + head[1]
        weights = [min(times) for times in zip(forward, (time / 2 for time in backward), strict=True)]
        inputs = [whole - part for whole, part in zip(backward, weights, strict=True)]
        return Times.make(c.pipe, forward, inputs, weights, self.boundary_seconds() / (2 * c.chunks))

    # -- one block -----------------------------------------------------------------------------------------------

    @cached_property
    def block(self) -> BlockTimes:
        """That of a block, in the mean of all kinds."""
        first, *others = self.shape.kinds
        found = self.blocks.of(first)
        if others:
            found = found.times(first.layers / self.shape.layers)
        for kind in others:
            found += self.blocks.of(kind).times(kind.layers / self.shape.layers)
        return found

    # -- stages --------------------------------------------------------------------------------------------------

    def period(self, head: float) -> float:
        """Return the seconds of the slowest stage for a micro-batch, if blocks are divided as evenly as they can be."""
        layers, stages, block = self.shape.layers, self.candidate.pipe, self.block.seconds
        if stages == 1:
            return layers * block + head
        least = -(-layers // stages)
        found = least * block + head
        for count in range(least, least + 3):
            beside_head = int(count - head / block + 1e-9)
            if beside_head >= 0 and (stages - 1) * count + beside_head >= layers:
                found = min(found, count * block)
        return found

    def boundary_seconds(self) -> float:
        """Return the seconds of the messages that a stage waits for, per micro-batch."""
        c, cluster = self.candidate, self.cluster
        if c.pipe == 1:
            return 0.0
        divided = c.tensor if c.sequence_parallel or c.kernels is not KernelGeneration.FLASH else 1
        nbytes = c.tokens * self.shape.hidden * self.candidate.element / divided
        near = 2 * c.world // c.pipe <= cluster.per_node
        rate = cluster.gpu.nvlink * NVLINK if near else cluster.nics / cluster.per_node * NETWORK
        return self.constants.sent * 2 * c.chunks * (nbytes / rate + _MESSAGE)

    # -- parameters and gradients --------------------------------------------------------------------------------

    def group(self, size: int, stride: int) -> RankGroup:
        """Return a group whose neighbours are ``stride`` ranks apart."""
        return RankGroup.of(self.cluster, size, stride)

    @cached_property
    def shard_group(self) -> RankGroup:
        return self.group(self.candidate.shard, self.candidate.tensor * self.candidate.context)

    @cached_property
    def families(self) -> tuple[RankFamily, ...]:
        """The parameters of a block by the ranks that divide them: the rest, and experts that are spread."""
        c, shape, cluster = self.candidate, self.shape, self.cluster
        part = 1 - shape.dense_layers / shape.layers
        experts = part * shape.expert_weights
        whole = sum(kind.layers / shape.layers * kind.block_weights for kind in shape.kinds)
        every = self.group(c.replicas, c.tensor)
        copies = self.group(c.replicas // c.shard, c.tensor * c.context * c.shard)
        rest = RankFamily((whole - (experts if c.expert > 1 else 0)) / c.tensor, every, self.shard_group, copies)
        if c.expert == 1 or not experts:
            return (rest,)
        shard = c.expert_divided if c.stage else 1
        count, stride = c.replicas // c.places, c.tensor * c.places
        over = [RankGroup.of(cluster, count, stride), RankGroup.of(cluster, shard, stride)]
        over.append(RankGroup.of(cluster, count // shard, stride * shard))
        return rest, RankFamily(experts / c.expert, *over)

    @property
    def _outside_numel(self) -> float:
        """The parameters beside blocks, of the stage that has the most: the embedding and the head, or one of them."""
        one = self.shape.vocab * self.shape.hidden / self.candidate.tensor
        return one if self.shape.tied or self.candidate.pipe > 1 else 2 * one

    def _reduction(self, family: RankFamily, pieces: float = 1) -> float:
        c, cluster, nbytes = self.candidate, self.cluster, family.numel * self.candidate.wire_bytes
        shard, fetched = family.shards.size, self._fetch(family.numel / family.shards.size)
        if c.stage == 0 or shard == 1:
            return max(all_reduce_seconds(cluster, family.every, nbytes), fetched)
        over_shards = pieces * gather_seconds(cluster, family.shards, nbytes / pieces)
        return max(over_shards + all_reduce_seconds(cluster, family.copies, nbytes / shard), fetched)

    @property
    def _filed(self) -> float:
        """The seconds in which gradients of a micro-batch come into flat buffers: read and written, and read if added up.

        Efficiencies that were fitted to published steps have it in them; those of a block that was measured alone have not.
        """
        if not self.calibration.update:
            return 0.0
        numel = -(-self.shape.layers // self.candidate.pipe) * sum(one.numel for one in self.families) + self._outside_numel
        return numel * (3 if self.candidate.accumulation > 1 else 2) * self.candidate.element / self.kernels.bandwidth

    def _fetch(self, numel: float) -> float:
        """Return the seconds in which reduced gradients of a micro-batch come to host memory, and are added up there."""
        c, cluster = self.candidate, self.cluster
        if c.stage < 2 or not c.offload_optimizer or cluster.gpu.is_host:
            return 0.0  # they stay where they are until the update
        in_node = numel * min(cluster.per_node, cluster.gpus)
        added = in_node * _HOST_SUM / (_OF_HOST * cluster.host_bandwidth) if c.accumulation > 1 else 0.0
        return max(numel * c.wire_bytes / cluster.gpu.host_link, added)

    def _gather(self, family: RankFamily, pieces: float = 1) -> float:
        if self.candidate.stage == 0:
            return 0.0
        c, nbytes = self.candidate, family.numel * self.candidate.element
        if c.second > 1 and family is self.families[0]:  # from the second copy of the weights
            return gather_seconds(self.cluster, self.group(c.second, c.tensor * c.context), nbytes)
        found = pieces * gather_seconds(self.cluster, family.shards, nbytes / pieces)
        return max(found, nbytes / family.shards.size / self.cluster.gpu.host_link) if c.offload_params else found

    @property
    def _second_copy(self) -> float:
        """The seconds in which a block's second copy is brought up to date: each shard goes to one rank of each group."""
        c = self.candidate
        if c.second == 1:
            return 0.0
        copies = c.shard // c.second
        nbytes = self.families[0].numel * c.element / c.second
        return gather_seconds(self.cluster, self.group(copies, c.tensor * c.context * c.second), nbytes)

    @cached_property
    def _outside(self) -> RankFamily:
        return replace(self.families[0], numel=self._outside_numel)

    @cached_property
    def _collectives(self) -> tuple[float, float]:
        """Seconds of the gather and of the reduction of a block."""
        c = self.candidate
        pieces = self.constants.pieces if c.stage == 1 and GATHERS not in c.hides else 1
        gathers = sum(self._gather(family, pieces) for family in self.families)
        return gathers, sum(self._reduction(family, pieces) for family in self.families)

    @property
    def exposed_in_micro_batch(self) -> float:
        """What a micro-batch waits for gathers and reductions. See [Note: streams]."""
        c, block, blocks = self.candidate, self.block, -(-self.shape.layers // self.candidate.pipe)
        gather, reduction = self._collectives
        reduced = 0.0 if c.reduces_once else reduction
        if c.stage == 3:
            inside = self.blocks.exposed(block.forward, gather) + self.blocks.exposed(block.backward, gather + reduced)
            return blocks * inside + gather + reduced
        return blocks * self.blocks.exposed(block.backward, reduced) + reduced if c.stage == 2 else 0.0

    @property
    def exposed_in_step(self) -> float:
        """What a step waits for reductions after the last backward and for gathers before the first forward."""
        c, block, blocks = self.candidate, self.block, -(-self.shape.layers // self.candidate.pipe)
        gather, reduction = self._collectives
        once = c.stage < 2 or c.reduces_once
        found = self._reduction(self._outside) * (1 if once else c.accumulation) + self._gather(self._outside)
        if once:
            sent = blocks * reduction
            found += self.blocks.exposed(blocks * block.backward, sent) if REDUCTIONS in c.hides else sent
        if c.stage in (1, 2):
            sent = blocks * gather
            found += self.blocks.exposed(blocks * block.forward, sent) if GATHERS in c.hides else sent
        sent = blocks * self._second_copy
        return found + (self.blocks.exposed(blocks * block.forward, sent) if GATHERS in c.hides else sent)

    def update_seconds(self) -> float:
        """Return the seconds of the optimizer's step, on the device or in host memory."""
        c, cluster = self.candidate, self.cluster
        blocks = -(-self.shape.layers // c.pipe)
        own = (blocks * self.families[0].numel + self._outside_numel) / (c.shard if c.stage else 1)
        own += sum(blocks * family.numel / (family.shards.size if c.stage else 1) for family in self.families[1:])
        if self.calibration.update and (cluster.gpu.is_host or not c.offload_optimizer):
            return own * self.calibration.update
        if not c.offload_optimizer:
            return own * (_FUSED_UPDATE if c.kernels is KernelGeneration.FUSED else _UPDATE) / self.kernels.bandwidth
        in_node = own * min(cluster.per_node, cluster.gpus)
        weights = 0 if c.offload_params else c.element  # which are copied where they are needed
        gradients = c.wire_bytes if c.stage == 1 else 0  # which others bring in the backward
        copied = own * (gradients + weights) / cluster.gpu.host_link
        updated = in_node * _HOST_UPDATE / (_OF_HOST * cluster.host_bandwidth)
        return (max(updated, in_node * _ON_DISK / cluster.disk) if c.states_on_disk else updated) + copied


def step_time(shape: ModelShape, candidate: RunCandidate, cluster: Cluster, calibration: Calibration) -> StepTime:
    """Return the time of one step of ``candidate``."""
    return StepModel(shape, candidate, cluster, calibration).step()
