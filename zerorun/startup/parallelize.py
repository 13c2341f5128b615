"""Parallel: what initialize() does about the axes beyond data parallelism: cuts a model, and divides its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..config.parse import Config
from ..config.sections import TensorParallel
from ..distributed.device import generators
from ..distributed.replication import ALONE, Replication
from ..distributed.tensor_shard import TensorShard, partial_of, shards_of
from ..distributed.topology import Topology
from ..distributed.transport.connect import connect_axis
from ..distributed.transport.gloo import Gloo
from ..distributed.transport.statistics import CommunicationStatistics
from ..distributed.transport.transport import Transport
from ..distributed.transport.world import gather_values
from ..errors import ModelError, PipelineError
from ..log import info_once
from ..pipeline.module import PipelineModule
from ..pipeline.pipelined import Pipelined, Tie
from ..pipeline.split_pretrained import PretrainedPipeline, split_pretrained
from ..tensor_parallel.axis import TransportAxis, make_axis
from ..tensor_parallel.causal_loss import has_head
from ..tensor_parallel.collectives import Region, make_region
from ..tensor_parallel.layers import whole_of
from ..tensor_parallel.parallelized import Parallelized, carry_out, plan_of
from ..tensor_parallel.planning import make_plan, matches, matches_names
from ..tensor_parallel.sequence import blocks_of, has_blocks
from ..tensor_parallel.styles import HOOKED, ParallelPlan
from ..zero.init import part_of, refuse_partitioned

Copies = dict[int, tuple[str, bool]]  # id(parameter) -> name in ``model_axes``, whether it is the first copy


@dataclass
class ParallelizedModel:
    """A model of which this rank has a part. ``undo`` makes it whole again; all ranks must call it."""

    model_axes: dict[str, Transport] = field(default_factory=dict)  # axes over which gradients may have to be summed
    shards: dict[int, TensorShard] = field(default_factory=dict)  # id(parameter) -> what of it is here
    replication_of: Callable[[nn.Parameter], Replication] = lambda param: ALONE
    undo: Callable[[], None] = lambda: None
    axis: TransportAxis | None = None
    copies: dict[str, str] = field(default_factory=dict)  # name here -> name in the first pipeline stage that has it

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The whole of what ``part`` of ``param`` is on this rank: a value, gradient or state. All tensor ranks call it."""
        shard = self.shards.get(id(param))
        if shard is None or self.axis is None:
            return part
        return whole_of(part.contiguous(), shard, self.axis)

    def part(self, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``."""
        shard = self.shards.get(id(param))
        return whole if shard is None or tuple(whole.shape) == shard.local_shape != shard.shape else shard.cut(whole)

    def of_tensor_ranks(self, number: int) -> list[int]:
        """What each tensor rank gives. All of them must call it."""
        if self.axis is None:
            return [number]
        mine = torch.tensor([number], device=self.axis.transport.device)
        found: list[int] = self.axis.all_gather(mine, 0, range(self.axis.size + 1), "comparison of data").tolist()
        return found

    def take(self, whole: torch.Tensor, tensor_rank: int) -> None:
        """Let ``whole`` be that of another tensor rank, in place. All tensor ranks call it."""
        if self.axis is not None:
            self.axis.transport.broadcast(whole, "edited parameters", tensor_rank)


def is_part(model: nn.Module) -> bool:
    """True if ranks have different parts of what ``model`` stands for: it is cut, or made of divided layers."""
    return isinstance(model, Pipelined) or bool(shards_of(model))


def cut(model: nn.Module, config: Config, topology: Topology) -> nn.Module:
    """This rank's stage of ``model``. Raises ModelError or PipelineError, before any layer is taken out."""
    section = config.pipeline
    if isinstance(model, Pipelined):
        _check_stage(model, topology, section.chunks)
        if config.sources.get("pipeline.partition") == "file":
            info_once("pipeline.partition: not used; the PipelineModule was cut when it was made, by its partition_method.")
    elif topology.pipe == 1:
        return model
    elif isinstance(model, nn.Sequential):
        model = PipelineModule(
            model,
            num_stages=topology.pipe,
            stage=topology.pipe_rank,
            partition_method=_method(section.partition),
            chunks=section.chunks,
        )
    else:
        if section.activation_checkpoint_interval:
            info_once("pipeline.activation_checkpoint_interval: not used; activation_checkpointing recomputes blocks.")
        stages, method = (topology.pipe, topology.pipe_rank), _method(section.partition)
        return split_pretrained(model, *stages, partition_method=method, chunks=section.chunks)
    if section.activation_checkpoint_interval and isinstance(model, PipelineModule):
        model.set_checkpoint_interval(section.activation_checkpoint_interval)
    return model


def _method(partition: str | tuple[int, ...]) -> Any:
    return partition if isinstance(partition, str) else list(partition)


def _check_stage(model: Pipelined, topology: Topology, chunks: int) -> None:
    if (model.num_pipeline_stages(), model.stage) != (topology.pipe, topology.pipe_rank):
        raise PipelineError(
            f"the module is stage {model.stage} of {model.num_pipeline_stages()}, but this rank is stage "
            f"{topology.pipe_rank} of {topology.pipe}. Remedy: give PipelineModule the topology that initialize() gets."
        )
    if model.chunks != chunks:
        raise PipelineError(
            f"the module has {model.chunks} parts on each stage, and pipeline.chunks is {chunks}. Remedy: make them agree."
        )


def plan_layers(model: nn.Module, config: Config, topology: Topology) -> ParallelPlan | None:
    """How the layers of ``model`` are to be divided, if they are not yet. To be asked before it is cut.

    Raises ModelError, with nothing changed.
    """
    section = config.tensor_parallel
    if topology.tensor * topology.pipe > 1:
        refuse_partitioned(model.parameters() if is_part(model) else (), "a model that is cut or divided over ranks")
    if topology.tensor == 1 or shards_of(model):
        return None
    if not isinstance(model, Pipelined):
        made = plan_of(model, section.plan or None, topology.tensor, vocab_parallel_loss=section.vocab_parallel_loss)
        if section.sequence_parallel:
            blocks_of(model, made)
        return made
    if isinstance(model, PipelineModule):
        _refuse_whole_model_keys(section)
    if not section.plan:
        raise ModelError(
            "a PipelineModule does not tell how its layers are to be divided over tensor-parallel ranks. Remedy: set "
            'tensor_parallel.plan (name pattern -> style, such as {"*.up": "colwise", "*.down": "rowwise"}), or make '
            "layers with zerorun.tensor_parallel.ColumnParallelLinear and its like."
        )
    _refuse_unmatched(model, section.plan)
    here = {pattern: style for pattern, style in section.plan.items() if matches(model, pattern)}
    return make_plan(model, here, topology.tensor) if here else ParallelPlan(topology.tensor, ())


def _refuse_whole_model_keys(section: TensorParallel) -> None:
    """Raise ModelError for what needs to see the whole model, and not the layers of one stage."""
    for key, instead in (
        ("sequence_parallel", "it works on a Hugging Face model that is not cut by hand."),
        ("vocab_parallel_loss", "let loss_fn call zerorun.tensor_parallel.vocab_parallel_cross_entropy."),
    ):
        if getattr(section, key):
            raise ModelError(
                f"tensor_parallel.{key} cannot be done in a PipelineModule. Remedy: set it to false; {instead}"
            )


def _refuse_unmatched(model: Pipelined, plan: Mapping[str, Any]) -> None:
    """Raise ModelError for a pattern that matches nothing on any stage: its layers would stay whole unnoticed."""
    names = model.parameter_names()
    for pattern, style in plan.items():
        if style not in HOOKED and not matches_names(names, pattern):  # modules that are hooked need no parameters
            raise ModelError(
                f"tensor_parallel.plan: pattern {pattern!r} matches no layer of any stage. Remedy: use names as of the "
                f'PipelineModule\'s parameter_names(), such as {names[0]!r}; "*" stands for one part between dots.'
            )


def divide(
    model: nn.Module, plan: ParallelPlan | None, config: Config, topology: Topology, device: torch.device
) -> ParallelizedModel:
    """Divide the layers of ``model`` in place by ``plan``, unless it is made of divided layers. All ranks must call it.

    Raises ModelError, on all ranks alike, with the model as it was.
    """
    made = ParallelizedModel() if topology.tensor == 1 else _divide_layers(model, plan, config, topology, device)
    if isinstance(model, Pipelined) and topology.pipe > 1:
        _refuse_dropped(model, topology)
        _tie(model, topology, made, device)
    return made


def divide_shapes(
    model: nn.Module, plan: ParallelPlan | None, config: Config, topology: Topology
) -> Callable[[nn.Parameter], Replication]:
    """As ``divide``, of a model on the meta device: nobody is needed for it. Returns how gradients are spread."""
    replication_of = ParallelizedModel().replication_of
    if topology.tensor > 1:
        place = (topology.tensor_rank, topology.tensor)
        nobody = Gloo("tensor", None, *place, torch.device("meta"), CommunicationStatistics())
        if plan is not None:
            _convert(model, plan, config, Region(TransportAxis(nobody)))
        replication_of = _replication_in_layers(model, topology)
    if not isinstance(model, Pipelined) or topology.pipe == 1:
        return replication_of
    copies: Copies = {}
    for tie, stages in _ties_of_stages(model, topology):
        for local in _names_here(tie, topology):
            copies[id(model.get_parameter(local))] = (_name_of(tie), stages[0] == topology.pipe_rank)
    return _with_copies(replication_of, copies)


def _divide_layers(
    model: nn.Module, plan: ParallelPlan | None, config: Config, topology: Topology, device: torch.device
) -> ParallelizedModel:
    axis = make_axis(topology, device)
    undo = ParallelizedModel().undo
    if plan is not None:
        made = _convert(model, plan, config, make_region(topology, device))
        undo = made.undo
        info_once(made.describe())
    else:
        _take_rank_zeros(model, axis)
    _agree_on_random_numbers(axis)
    return ParallelizedModel(
        {"tensor": axis.transport}, shards_of(model), _replication_in_layers(model, topology), undo, axis
    )


def _convert(model: nn.Module, plan: ParallelPlan, config: Config, region: Region) -> Parallelized:
    own, section = plan.here(model), config.tensor_parallel
    whole = model.whole_model if isinstance(model, PretrainedPipeline) else model
    return carry_out(
        model,
        own,
        region,
        sequence_parallel=section.sequence_parallel and has_blocks(own),
        vocab_parallel_loss_of=whole if section.vocab_parallel_loss and has_head(whole) else None,
    )


def _replication_in_layers(model: nn.Module, topology: Topology) -> Callable[[nn.Parameter], Replication]:
    shards, partial, first = shards_of(model), partial_of(model), topology.tensor_rank == 0

    def replication_of(param: nn.Parameter) -> Replication:
        if id(param) in shards:
            return ALONE
        return Replication(("tensor",) if id(param) in partial else (), first)

    return replication_of


def _refuse_dropped(model: Pipelined, topology: Topology) -> None:
    """Raise ModelError, on all ranks alike, unless the stages together have every parameter of the model."""
    found = gather_values([name for name, _ in model.named_parameters(remove_duplicate=False)])
    lost = set(model.parameter_names()).difference(*found)
    if lost:
        raise ModelError(f"no pipeline stage has {', '.join(sorted(lost)[:5])}. This is an error in zerorun.")


def _tie(model: Pipelined, topology: Topology, made: ParallelizedModel, device: torch.device) -> None:
    """Give stages that have copies of one parameter a transport to sum its gradients, and the same values.

    Each tie has a name of its own, and so a flat group of its own, which lies alike on all its stages.
    """
    copies: Copies = {}
    transports: dict[tuple[int, ...], Transport] = {}
    for tie, stages in _ties_of_stages(model, topology):
        group = topology.subgroup("pipe", stages)
        if topology.pipe_rank not in stages:
            continue
        if stages not in transports:
            place = (stages.index(topology.pipe_rank), len(stages))
            transports[stages] = connect_axis(f"stages {stages}", group, *place, device, CommunicationStatistics())
        made.model_axes[_name_of(tie)] = transports[stages]
        for local in _names_here(tie, topology):
            param = model.get_parameter(local)
            if id(param) not in copies and part_of(param) is None:  # a stage may use it in several parts
                transports[stages].broadcast(param.data, "pipeline: tied parameters")
            copies[id(param)] = (_name_of(tie), stages[0] == topology.pipe_rank)
            if local != tie.name:
                made.copies[local] = tie.name
    made.replication_of = _with_copies(made.replication_of, copies)


def _ties_of_stages(model: Pipelined, topology: Topology) -> Iterator[tuple[Tie, tuple[int, ...]]]:
    """The parameters that several stages have, with those stages."""
    for tie in model.ties():
        stages = tuple(sorted({part % topology.pipe for part in tie.parts}))
        if len(stages) > 1:
            yield tie, stages


def _names_here(tie: Tie, topology: Topology) -> list[str]:
    named = zip(tie.parts, tie.local_names, strict=True)
    return [local for part, local in named if part % topology.pipe == topology.pipe_rank]


def _name_of(tie: Tie) -> str:
    return f"copies of {tie.name}"


def _with_copies(inner: Callable[[nn.Parameter], Replication], copies: Copies) -> Callable[[nn.Parameter], Replication]:
    def replication_of(param: nn.Parameter) -> Replication:
        replication, copy = inner(param), copies.get(id(param))
        return replication if copy is None else Replication((*replication.sums, copy[0]), replication.counted and copy[1])

    return replication_of


def _take_rank_zeros(model: nn.Module, axis: TransportAxis) -> None:
    """What every tensor rank of a model made of divided layers has whole is tensor rank 0's."""
    shards = shards_of(model)
    for _, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):  # which ranks may have in any order
        if id(tensor) not in shards and not tensor.is_meta:
            axis.broadcast(tensor.data, "tensor: whole weights")


def _agree_on_random_numbers(axis: TransportAxis) -> None:
    """The default generators go on as those of tensor rank 0. See tensor_parallel/random.py."""
    for generator in generators(axis.transport.device):
        state = generator.get_state()
        axis.broadcast(state, "tensor: random state")
        generator.set_state(state)
