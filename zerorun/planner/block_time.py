"""Block time: the seconds of one block for a micro-batch, with the collectives of tensor ranks and rows to experts."""

from __future__ import annotations

from dataclasses import dataclass

from .calibration import Constants
from .candidate import TENSOR, KernelGeneration, RunCandidate
from .hardware import Cluster
from .kernels import KernelModel, Work
from .links import RankGroup, all_reduce_seconds, exchange_seconds, gather_seconds
from .model_shape import ModelShape


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block for a micro-batch. ``forward``, ``backward``: with everything; ``on_gpu``: without the host.

    ``rows``: those in which it waits for rows on their way to experts and back.
    """

    forward: float
    backward: float
    on_gpu: float
    work: tuple[Work, Work]
    rows: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def times(self, factor: float) -> BlockTimes:
        work = self.work[0].times(factor), self.work[1].times(factor)
        times = self.forward * factor, self.backward * factor, self.on_gpu * factor
        return BlockTimes(*times, work, self.rows * factor)

    def __add__(self, other: BlockTimes) -> BlockTimes:
        work = self.work[0] + other.work[0], self.work[1] + other.work[1]
        times = self.forward + other.forward, self.backward + other.backward, self.on_gpu + other.on_gpu
        return BlockTimes(*times, work, self.rows + other.rows)


@dataclass(frozen=True)
class BlockModel:
    """The times of the blocks of one candidate. ``kernels``: those of its GPU."""

    candidate: RunCandidate
    cluster: Cluster
    kernels: KernelModel
    constants: Constants

    def of(self, shape: ModelShape) -> BlockTimes:
        """Return the times of a block of ``shape``, of the last kind."""
        c, constants = self.candidate, self.constants
        forward, backward = self.kernels.block(shape, c)
        whole = c.rerun  # collectives and all
        if c.checkpointing == "selective" and c.kernels is KernelGeneration.UNFUSED:
            backward = backward + Work(attention=forward.attention)
        else:
            backward = backward + forward.times(constants.selective if c.checkpointing == "selective" else whole)
        sent = self._tensor_seconds(shape) * (constants.exposed if TENSOR in c.hides else 1.0)
        rows = self._row_seconds(shape)
        rows = rows[0], rows[1] + whole * rows[0]
        on_gpu = (
            forward.seconds + sent + rows[0],
            backward.seconds + sent * (1 + whole) + self._context_seconds(shape, forward, backward) + rows[1],
        )
        host = self._host_seconds()
        times = max(on_gpu[0], host / 3), max(on_gpu[1], host * (2 + whole) / 3)
        return BlockTimes(*times, sum(on_gpu), (forward, backward), sum(rows))

    def _row_seconds(self, shape: ModelShape) -> tuple[float, float]:
        """Return what a forward and a backward wait for rows to experts elsewhere and back, beside shared experts.

        Before them the counts of rows go, in a forward.
        """
        c = self.candidate
        if c.expert == 1 or shape.experts == 1:
            return 0.0, 0.0
        group = self._group(c.expert, 1)
        rows = c.tokens / c.tensor * shape.used_experts * shape.hidden * self.candidate.element
        both = 2 * exchange_seconds(self.cluster, group, rows)
        counts = exchange_seconds(self.cluster, group, 8 * shape.experts)
        shared = self.kernels.shared(shape, c)
        return counts + self.exposed(shared[0], both), self.exposed(shared[1], both)

    def _host_seconds(self) -> float:
        c, constants = self.candidate, self.constants
        fused = c.kernels is KernelGeneration.FUSED
        found = constants.host * (0.5 if fused else 1.0) * (2 if c.tensor > 1 else 1)
        if c.pipe > 1 and c.tensor > 1 and self.cluster.nodes > 1 and TENSOR in c.hides and not fused:
            found = max(found, constants.contention * c.tensor)
        return found

    def _tensor_seconds(self, shape: ModelShape) -> float:
        """Return the seconds of the collectives of tensor ranks in one forward of a block, for attention and for its MLP.

        If experts are spread over them, each has a part of the rows, and these are gathered where ranks have whole ones;
        only shared experts have sums.
        """
        c = self.candidate
        nbytes, group = c.tokens * shape.hidden * self.candidate.element, self._group(c.tensor, 1)
        spread = shape.experts > 1 and c.expert > 1
        sums = 1 if spread and not shape.shared_ffn else 2
        if c.sequence_parallel:
            return 2 * sums * gather_seconds(self.cluster, group, nbytes)
        gathered = gather_seconds(self.cluster, group, nbytes) if spread else 0.0
        return sums * all_reduce_seconds(self.cluster, group, nbytes) + gathered

    def _context_seconds(self, shape: ModelShape, forward: Work, backward: Work) -> float:
        """Return what is not hidden of the keys and values that go round the ranks of a sequence, beside attention."""
        c = self.candidate
        keys = max(shape.kv_heads // c.tensor, 1) * shape.attended
        nbytes = 2 * c.micro_batch * c.sequence * keys * self.candidate.element
        one = gather_seconds(self.cluster, self._group(c.context, c.tensor), nbytes)
        return max(0.0, one - forward.attention) + max(0.0, 2 * one - backward.attention)

    def exposed(self, compute: float, sent: float) -> float:
        """Return what is seen of ``sent`` seconds behind ``compute``. See [Note: streams] in step_time.py."""
        return max(0.0, sent - compute) + self.constants.interference * min(sent, compute)

    def _group(self, size: int, stride: int) -> RankGroup:
        return RankGroup.of(self.cluster, size, stride)
