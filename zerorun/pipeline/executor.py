"""Executor: runs a rank's list of actions on its chunks of the model.

The list alone decides the order. For each micro-batch and chunk, from its forward to its backward, the executor keeps what
was received, what was computed from it, and the passes over units that the runtime must expect in the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree

from ..distributed.device import Clock
from ..errors import PipelineError
from ..watch.board import Phase, board
from ..zero.gathers import ExecutionTrace
from ..zero.runtime import ModelPart, Runtime
from .p2p import ACTIVATIONS, GRADIENTS, PointToPoint, tensors_of
from .pipelined import Pipelined
from .schedule.actions import FORWARD_ONLY, Action, ActionKind, PipelineSchedule, peer
from .schedule.simulate import Span
from .split_backward import WeightGradients

Key = tuple[int, int]  # micro-batch, chunk
Timed = tuple[Action, Any, Any]  # with the moments of a Clock at which it began and ended
_PHASES = dict.fromkeys((ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT), Phase.BACKWARD)
_PHASES[ActionKind.FORWARD] = Phase.FORWARD
_RECEIVES = {ActionKind.RECEIVE_ACTIVATION: ACTIVATIONS, ActionKind.RECEIVE_GRADIENT: GRADIENTS}


@dataclass
class _Kept:
    """What is kept for one micro-batch in one chunk."""

    value: Any = None  # the input of the forward, then its output
    arrived: list[list[torch.Tensor]] = field(default_factory=list)  # per received tensor: [its gradient]; [] until then
    outputs: list[GradientEdge | None] = field(default_factory=list)  # of the output tensors; None: no gradient
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # of the output tensors
    passes: list[ExecutionTrace] = field(default_factory=list)
    jobs: list[Callable[[], None]] = field(default_factory=list)  # weight gradients still to be computed


class Executor:
    """Runs the local stage of one engine. ``parts``: the local parts of the model, by chunk.

    ``root_of(loss, micro_batch)`` returns the tensor from which the backward of the last part starts. ``begin(value)``
    prepares the inputs that the first part takes from a batch. ``last_backward(flag)`` is called before each backward and
    tells whether it is the last of the step. ``around()`` returns the context of a forward. ``clock``: of the device.
    """

    def __init__(
        self,
        module: Pipelined,
        runtime: Runtime,
        p2p: PointToPoint | None,
        parts: list[ModelPart],
        later: WeightGradients,
        root_of: Callable[[torch.Tensor, int], torch.Tensor],
        begin: Callable[[Any], Any],
        last_backward: Callable[[bool], None],
        around: Callable[[], AbstractContextManager[Any]],
        clock: Clock,
    ) -> None:
        self._module, self._runtime, self._p2p, self._parts, self._later = module, runtime, p2p, parts, later
        self._root_of, self._begin, self._last_backward, self._around = root_of, begin, last_backward, around
        self.clock = clock
        self._kept: dict[Key, _Kept] = {}
        self._failed, self._error = False, ""  # True while a batch runs, and after it has failed
        self.losses: list[torch.Tensor] = []  # of the micro-batches so far, on the last stage
        self.outputs: list[Any] = []  # of the last part, if the schedule has only forwards
        self.timed: list[Timed] = []  # the computations

    def run(self, schedule: PipelineSchedule, batches: list[Any], *, needs_loss: bool = True) -> None:
        """Run this rank's actions. ``batches``: one per micro-batch; None on a stage without the first and the last part.

        Raises PipelineError if an earlier batch failed, because its messages may still be on their way.
        """
        self._begin_run()
        self._keeps_outputs, self._needs_loss = schedule.kind == FORWARD_ONLY, needs_loss
        actions = list(schedule.actions(self._module.stage))
        coming = Counter(action.kind for action in actions if action.kind in _RECEIVES)
        try:
            self._expect(coming, schedule.stages)
            for action, is_last in _with_last(actions):
                begun = self.clock.now() if action.kind.computes else None
                self._act(action, batches, schedule.stages, is_last)
                if action.kind in _RECEIVES:
                    coming[action.kind] -= 1
                    self._expect(coming, schedule.stages)
                if action.kind.computes:
                    self.timed.append((action, begun, self.clock.now()))
            if self._p2p is not None:
                board.enter(Phase.PIPELINE)
                self._p2p.finish()
            self._failed = False
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._kept = {}  # it holds graphs, whose hooks refer to the engine

    def spans(self, since: Any = None) -> list[Span]:
        """When each computation began and ended, in seconds from ``since`` or from the first. The device must be done."""
        first = self.timed[0][1] if since is None and self.timed else since
        return [Span(act, self.clock.between(first, one), self.clock.between(first, two)) for act, one, two in self.timed]

    @property
    def is_stuck(self) -> bool:
        """True if a batch failed on this stage, so that other stages may still wait for its messages."""
        return self._failed and self._p2p is not None

    def refuse_stuck(self) -> None:
        """Raise PipelineError if a batch failed on this stage. To be called before other stages wait for this one."""
        if self.is_stuck:
            raise PipelineError(
                f"an earlier batch failed on its way through the pipeline, with {self._error}, and stages may be at "
                "different places. Remedy: mend that, initialize() again and load a checkpoint."
            )

    def _begin_run(self) -> None:
        self.refuse_stuck()
        self._failed = True
        self._kept, self.losses, self.outputs, self.timed = {}, [], [], []

    def _act(self, action: Action, batches: list[Any], stages: int, is_last: bool) -> None:
        kind, key = action.kind, (action.micro_batch, action.chunk)
        board.enter(_PHASES.get(kind, Phase.PIPELINE))
        if kind is ActionKind.FORWARD:
            self._forward(key, batches[action.micro_batch])
        elif kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            self._last_backward(is_last)
            self._backward(key, held=kind is ActionKind.INPUT_GRADIENT)
        elif kind is ActionKind.WEIGHT_GRADIENT:
            self._last_backward(is_last)
            self._weight_gradients(key)
        else:
            self._exchange(kind, key, peer(kind, self._module.stage, stages))

    # -- messages ------------------------------------------------------------------------------------------------

    def _expect(self, coming: Counter[ActionKind], stages: int) -> None:
        """Let the next message of each sort travel while this stage computes."""
        for kind in +coming:
            assert self._p2p is not None
            self._p2p.expect(peer(kind, self._module.stage, stages), _RECEIVES[kind])

    def _exchange(self, kind: ActionKind, key: Key, other: int) -> None:
        p2p = self._p2p
        assert p2p is not None
        if kind is ActionKind.RECEIVE_ACTIVATION:
            arrived: list[list[torch.Tensor]] = []
            value = _pytree.tree_map(lambda leaf: _arrive(leaf, arrived), p2p.receive(other, ACTIVATIONS))
            self._kept[key] = _Kept(value, arrived)
        elif kind is ActionKind.SEND_ACTIVATION:
            kept = self._kept[key]
            p2p.send(kept.value, other, ACTIVATIONS)
            kept.value = None
        elif kind is ActionKind.RECEIVE_GRADIENT:
            self._kept[key].gradients = p2p.receive(other, GRADIENTS)
        else:
            kept = self._kept[key]
            p2p.send([gradient[0] if gradient else None for gradient in kept.arrived], other, GRADIENTS)
            kept.arrived = []

    # -- computation ---------------------------------------------------------------------------------------------

    def _forward(self, key: Key, batch: Any) -> None:
        module, (micro_batch, chunk) = self._module, key
        if module.is_first(chunk):
            self._kept[key] = _Kept(self._begin(module.inputs_of(batch)))
        kept, last = self._kept[key], module.is_last(chunk)
        with self._runtime.running(self._parts[chunk]), self._around():
            output = module(kept.value, chunk, batch if last else None)
        kept.passes = self._runtime.take_passes()
        if not last:
            kept.value, kept.outputs = output, [_edge(tensor) for tensor in tensors_of(output)]
            return
        kept.value = None
        if self._keeps_outputs:
            self.outputs.append(output)
        if not self._needs_loss:
            return
        with self._runtime.running(self._parts[chunk]), self._around():
            loss = module.loss_of(output, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(f"the loss must be a scalar, got {found}. Remedy: pass a loss_fn that gives one.")
        self.losses.append(loss.detach())
        if torch.is_grad_enabled():
            root = self._root_of(loss, micro_batch)
            kept.outputs, kept.gradients = [_edge(root)], [torch.ones_like(root)]

    def _backward(self, key: Key, *, held: bool) -> None:
        kept, part = self._kept[key], self._parts[key[1]]
        pairs = [(e, g) for e, g in zip(kept.outputs, kept.gradients, strict=True) if e is not None and g is not None]
        if pairs:
            self._runtime.expect(kept.passes)
            with self._runtime.running(replace(part, held=held)):
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        kept.outputs, kept.gradients, kept.passes = [], [], []
        if held:
            kept.jobs = self._later.take()
        elif not pairs:
            self._runtime.complete(part)

    @torch.no_grad()
    def _weight_gradients(self, key: Key) -> None:
        jobs, watch = self._kept[key].jobs, self._runtime.comm.statistics.watch
        with nullcontext() if watch is None else watch.during("backward"):
            while jobs:
                jobs.pop()()
        self._runtime.complete(self._parts[key[1]])


def _with_last(actions: list[Action]) -> Iterator[tuple[Action, bool]]:
    """Pair each action with a flag that is True for the last backward or weight gradient."""
    final = {ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT}
    last = max((index for index, action in enumerate(actions) if action.kind in final), default=-1)
    return ((action, index == last) for index, action in enumerate(actions))


class _Arrived(torch.autograd.Function):
    """A tensor received from another stage. Its gradient is appended to ``slot``.

    It is not a leaf, so a layer may change it in place, as it may if the previous layer runs in the same process.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, slot: list[torch.Tensor]) -> torch.Tensor:
        ctx.slot = slot
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.slot.append(gradient)
        return None, None, None


def _arrive(leaf: Any, arrived: list[list[torch.Tensor]]) -> Any:
    """Turn one leaf of a received value into what the layers get; enter the place for its gradient into ``arrived``."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    slot: list[torch.Tensor] = []
    arrived.append(slot)
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return leaf.detach()
    anchor = torch.empty(0, requires_grad=True)
    return _Arrived.apply(anchor, leaf.detach(), slot)  # type: ignore[no-untyped-call]


def _edge(tensor: torch.Tensor) -> GradientEdge | None:
    """Return where the gradient of ``tensor`` goes, so that the tensor itself need not be kept; None if it needs none."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def units_of_chunks(module: Pipelined, units: Iterable[Any]) -> list[ModelPart]:
    """Return one ModelPart for each chunk, with the units that the chunk needs."""
    if module.chunks == 1:
        return [ModelPart()]
    found = []
    for chunk in range(module.chunks):
        inside = {id(sub) for layer in module.modules_of(chunk) for sub in layer.modules()}
        needed = {unit.index for unit in units if unit.index and any(id(part) in inside for part in unit.modules)}
        found.append(ModelPart(chunk, frozenset({0, *needed})))
    return found
