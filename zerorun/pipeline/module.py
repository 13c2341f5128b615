"""PipelineModule: a list of layers that run one after the other, of which a process keeps those of its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..activations import checkpointing
from ..errors import PipelineError
from ..zero.init import refuse_partitioned
from .hidden_parameters import hidden_in, refuse_hidden_parameters
from .layer_builder import Builder, Description, describe, draw_seeds
from .layer_spec import LayerSpec, TiedLayerSpec
from .partition import Method, bounds_of
from .pipelined import Pipelined, StageCut, find_ties
from .stages import find_stage, is_in_one_piece

LOSS = "loss_fn"


class PipelineModule(Pipelined):
    """The local stage of a model given as a list of layers, under DeepSpeed's name and arguments.

    layers: nn.Modules, LayerSpecs, TiedLayerSpecs and callables, or an nn.Sequential. Each is called with one value, the
        result of the previous layer: any pytree; a tuple counts as one value. Only specs of the local stage are built.
        Layer i is registered as str(i), so names in state dicts are those of the model in one process.
    num_stages, topology: give one of the two. A topology is a zerorun.Topology or a ProcessTopology with the axis "pipe".
        Its axis "model" has to have the degree of tensor_parallel.size: initialize() refuses it otherwise.
    loss_fn: called as loss_fn(output, labels) on the last stage. None: the output is the loss.
    seed_layers: call seed_fn(base_seed + i) before layer i is built; by default it seeds torch's generators. If False,
        seeds come from one draw of the default generator. Values are the same for any number of stages if ranks are seeded
        alike.
    partition_method: see ``partition.bounds_of``.
    activation_checkpoint_interval: recompute the layers in backward, in runs of this many; 0: recompute nothing.
    activation_checkpoint_func: what recomputes a run, called as func(run, value); by default
        zerorun.checkpointing.checkpoint.
    checkpointable_layers: class names; only runs of these layers are recomputed; by default all runs with parameters.
    dynamic_shape: has no effect, because shapes may always differ from one micro-batch to the next.
    stage: the local stage; by default that of the topology or of this rank. chunks: parts per stage (interleaving).

    A batch is a pair (inputs, labels), each any pytree. Raises PipelineError.
    """

    is_cut = True

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: Method = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        stage: int | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        self._topology = topology
        self.activation_checkpoint_func = activation_checkpoint_func or checkpointing.checkpoint
        self._recomputable = None if checkpointable_layers is None else frozenset(checkpointable_layers)
        self.set_checkpoint_interval(activation_checkpoint_interval)
        found, own = find_stage(num_stages, topology, stage)
        chunks = 1 if is_in_one_piece() else chunks
        if found > 1:
            refuse_partitioned((), "a PipelineModule of several stages")
        given = _list_of(layers)
        described = describe(given)
        self.layer_classes = tuple(layer.facts.class_name for layer in described)
        bounds = bounds_of(partition_method, [layer.facts for layer in described], found * chunks, chunks)
        self._cut = StageCut(bounds, found, chunks, own)
        places: dict[Any, list[tuple[int, str]]] = {}
        for index, layer in enumerate(described):
            for name, identity in layer.params:
                places.setdefault(identity, []).append((self._cut.part_of(index), f"{index}.{name}"))
        self._ties, self._names = find_ties(places)
        if found * chunks > 1:
            _refuse_hidden(given, described, self._cut, loss_fn)
        seeded = any(isinstance(layer, LayerSpec) for layer in given) and not seed_layers
        self._keep(
            given,
            Builder(given, draw_seeds() if seeded else lambda index: base_seed + index, seed_fn if seed_layers else None),
        )
        self._set_loss(loss_fn)

    def _keep(self, layers: Sequence[Any], builder: Builder) -> None:
        """Build and register the local layers."""
        self._functions: dict[int, Callable[[Any], Any]] = {}  # layers that are not modules
        self._forward_fns: dict[int, Callable[[Any, Any], Any]] = {}  # of tied layers
        for index in sorted(self._cut.local_layers()):
            layer, module = layers[index], builder.layer(index)
            if module is None:
                self._functions[index] = layer
            else:
                self.add_module(str(index), module)
            if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
                self._forward_fns[index] = layer.forward_fn

    def _set_loss(self, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        """Keep the loss. If it is a module, it belongs to the last stage, with its parameters."""
        if isinstance(loss_fn, nn.Module):
            self._names += tuple(f"{LOSS}.{name}" for name, _ in loss_fn.named_parameters())
        local = any(self.is_last(chunk) for chunk in range(self.chunks))
        self.loss_fn = loss_fn if local or not isinstance(loss_fn, nn.Module) else None

    def topology(self) -> Any:
        """Return the topology that was given, or None."""
        return self._topology

    @property
    def activation_checkpoint_interval(self) -> int:
        """How many layers are recomputed together; 0: none is recomputed. Setting it is ``set_checkpoint_interval``."""
        return self._interval

    @activation_checkpoint_interval.setter
    def activation_checkpoint_interval(self, interval: int) -> None:
        self.set_checkpoint_interval(interval)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute the layers in backward, in runs of ``interval``; 0: recompute nothing."""
        if interval < 0:
            raise PipelineError(f"activation_checkpoint_interval = {interval}. Remedy: give 0 or a number of layers.")
        self._interval = interval

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Return None. Subclasses written for DeepSpeed may return further losses here; zerorun does not call this."""
        return None

    def forward(self, value: Any, chunk: int = 0, batch: Any = None) -> Any:
        """Run the local layers of one chunk on one value. ``batch`` is not used, because ``loss_of`` applies the loss."""
        layers = self._cut.layers(self._cut.part(chunk))
        step = self._interval or max(len(layers), 1)
        for start in range(layers.start, layers.stop, step):
            run = range(start, min(start + step, layers.stop))
            if self._interval and self._worth_recomputing(run):
                value = self.activation_checkpoint_func(lambda given, run=run: self._run(run, given), value)
            else:
                value = self._run(run, value)
        return value

    def _run(self, layers: range, value: Any) -> Any:
        for index in layers:
            value = self._call(index, value)
        return value

    def _call(self, index: int, value: Any) -> Any:
        if index in self._functions:
            return self._functions[index](value)
        module = self.get_submodule(str(index))
        return self._forward_fns[index](module, value) if index in self._forward_fns else module(value)

    def _worth_recomputing(self, layers: range) -> bool:
        if self._recomputable is not None:
            names = {type(self._functions.get(index, self._modules.get(str(index)))).__name__ for index in layers}
            return names <= self._recomputable
        modules = [self.get_submodule(str(index)) for index in layers if index not in self._functions]
        return any(True for module in modules for _ in module.parameters())

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """The layers of one chunk that are modules."""
        layers = self._cut.layers(self._cut.part(chunk))
        return [self.get_submodule(str(index)) for index in layers if index not in self._functions]

    def inputs_of(self, batch: Any) -> Any:
        """Return the inputs of a batch (inputs, labels)."""
        return _pair(batch)[0]

    def loss_of(self, output: Any, batch: Any) -> Any:
        """Return loss_fn(output, labels), or the output if there is no loss_fn."""
        return output if self.loss_fn is None else self.loss_fn(output, _pair(batch)[1])


def _refuse_hidden(layers: Sequence[Any], described: Sequence[Description], cut: StageCut, loss_fn: Any) -> None:
    """Raise PipelineError if a layer or the loss uses parameters that its stage may not have, and so would not train."""
    owners = {identity: index for index, layer in enumerate(described) for _, identity in layer.params}
    of_layers = frozenset(identity for identity in owners if isinstance(identity, int))
    stages = {(identity, cut.stage_of(index)) for index, layer in enumerate(described) for _, identity in layer.params}
    for index, layer in enumerate(layers):
        elsewhere = [used for used in described[index].hidden & of_layers if (used, cut.stage_of(index)) not in stages]
        if elsewhere:
            raise PipelineError(
                f"layer {index} uses a parameter of layer {owners[elsewhere[0]]}, which is on another stage, and does not "
                "have it. Remedy: let it have the module that has the parameter as an attribute, or use TiedLayerSpec."
            )
        if isinstance(layer, TiedLayerSpec):
            refuse_hidden_parameters(layer.forward_fn, f"forward_fn of layer {index}", of_layers)
        elif not isinstance(layer, (nn.Module, LayerSpec)):
            refuse_hidden_parameters(layer, f"layer {index}", of_layers)
    if not isinstance(loss_fn, nn.Module):
        refuse_hidden_parameters(loss_fn, "loss_fn", of_layers)
        return
    for used in of_layers.intersection(hidden_in(loss_fn).union(map(id, loss_fn.parameters()))):
        raise PipelineError(
            f"loss_fn and layer {owners[used]} share a parameter, and may lie on different stages. Remedy: move the "
            "computation that uses it into the last layer, so that loss_fn needs no parameter."
        )


def _pair(batch: Any) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch
    shown = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise PipelineError(
        f"a batch for a PipelineModule is a pair (inputs, labels), got {shown}. Remedy: make one in the data set, or with "
        "engine.set_batch_fn."
    )


def _list_of(layers: Iterable[Any]) -> list[Any]:
    if isinstance(layers, nn.Sequential) and type(layers).forward is not nn.Sequential.forward:
        raise PipelineError(
            f"{type(layers).__name__} has a forward of its own, so that its children need not run one after the other. "
            "Remedy: give the list of layers."
        )
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList)):
        raise PipelineError(
            f"the layers are one {type(layers).__name__}. Remedy: give a list of layers or an nn.Sequential; a Hugging "
            "Face model is split by zerorun.pipeline.split_pretrained.split_pretrained."
        )
    found = list(layers)
    if not found:
        raise PipelineError("the list of layers is empty. Remedy: give at least one layer.")
    return found
