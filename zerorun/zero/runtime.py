"""Runtime: hooks that turn the forward and backward of an unmodified module into gathers, releases and reductions.

[Note: one pass]
A *pass* is one forward or one backward of the model. In both, units are needed in turn:

    forward    pre-forward hook   -> unshard the unit, prefetch the next            post-forward hook -> reshard
    backward   pre-backward hook  -> the same, and reduce the unit before           end of backward   -> reduce the rest

The pre-backward hook sits on the gradients of the unit's outputs.

When the hook of an earlier unit's output fires in a backward, autograd has finished the later unit: its nodes were made
later, ready nodes run latest first, and gradients of leaves are stored before anything else. So there is no hook for a
parameter; a unit's gradients are collected when the next unit is needed. Gradients that come even later stay on the
parameter. They are found at the end of the backward and reduced in ``reduce_late``, where ranks also agree on the order
that this backward had. A unit that is late again is from then on *deferred* to the end of the backward, on all ranks.

Where one micro-batch's forward is not followed by its backward, as in a pipeline, the program says which forwards a
backward is for (``take_passes``, ``expect``) and in which part of the model both are (``ModelPart``).

[Note: gradients of gradients]
A backward with ``create_graph`` makes nodes that read the weights again when they are differentiated, after the pass that
they belong to is over. The way into them is the gradient of a unit's input: a hook there needs the unit once more, in
the same backward as its ordinary hook, which comes later. Gradients of parameters are complete after that.

Recomputation (activation checkpointing) enters a unit's forward during a backward: the unit is needed as ever.

[Note: forwards within forwards]
A forward may call its own module again: a recursive block, or a trainer that lets the model's forward run its training
step, which calls the model. The pass is that of the outermost call, and a unit stays until its outermost call is left.
A backward that runs within a forward ends the pass as far as it has come. After it, what was running is needed again,
and the rest of the forward is a pass of its own.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ..distributed.transport.channel import Pending
from ..distributed.transport.communicator import Communicator
from ..errors import ModelError, OrderError, ReleasedParameterError
from ..log import warn_once
from ..plan.reductions import Reductions
from ..plan.sharding_plan import ShardingPlan
from ..plan.weights import repacking
from .builder import ShardedParameters
from .execution_trace import ExecutionTrace, merge_orders
from .placeholders import ReadWatch, released_parameter, tensors_in
from .unit import Unit, links_of

# Seconds that a rank which left the agreed order waits for the others to ask as well. See order.py.
ORDER_TIMEOUT_S = float(os.environ.get("ZERORUN_ORDER_TIMEOUT_S", "60"))
# Forwards that a backward may still come for. More than any loop keeps; bounds what forwards without one leave behind.
_MAX_OUTSTANDING = 32
_END = -1
# Of the frames of forwards: hooks and all.
_MODULE_CALL = nn.Module._call_impl.__code__
# In the metadata of a node of autograd: the index of the unit whose output it makes.
MADE_BY = "zerorun unit"
# Passes in which it is looked at what the script has written, where looking means to wait for the device.
_LOOKED_AT = 20
_BY_COPY = (
    "do it before initialize(), or copy values with param.data.copy_(...) inside zerorun.zero.GatheredParameters(param, "
    "modifier_rank=0)"
)


@dataclass(frozen=True)
class ModelPart:
    """A part of the model that has forwards and backwards of its own. ``units``: that it needs; None: all.

    ``held``: gradients of its backwards are not complete yet when these end; ``complete`` says when they are.
    """

    name: Hashable = None
    units: frozenset[int] | None = None
    held: bool = False


class Runtime:
    """Executes the stage: owns the hooks, the execution traces and the collectives in flight.

    ``reduce_now`` is asked at the beginning of each backward: may gradients that accumulate be reduced in it?
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        made: ShardedParameters,
        comm: Communicator,
        reduce_now: Callable[[], bool],
    ) -> None:
        self.module, self.plan, self.policy, self.comm = module, plan, plan.policy, comm
        self.units = units = made.units
        self.param_slots, self.grad_slots = made.param_slots, made.grad_slots
        self.reduce_now = reduce_now
        self.shares_params, self.shares_grads = plan.shares_params, plan.shares_grads
        self.plans: dict[Hashable, list[int] | None] = {}  # agreed, by kind of pass; None: cannot be agreed
        self.forward_trace: ExecutionTrace | None = None  # of the forward that is running
        self.backward_trace: ExecutionTrace | None = None  # of the backward that is running
        self.reduces_now = False
        self.is_last_backward = False  # no other backward comes before the step, as far as is known
        self.outstanding: deque[ExecutionTrace] = deque(maxlen=_MAX_OUTSTANDING)  # forwards whose backward has not come yet
        self.forwarded: set[int] = set()  # units with a forward since the last step
        self.completed: set[int] = set()  # units reduced in this backward
        self.late: set[int] = set()  # units whose gradients came after their turn
        self._late_before: set[int] = set()
        self._last_backward: ExecutionTrace | None = None
        self.reductions = Reductions(self._start_reduction, self._finish_reduction, Unit.vacate, overlap=plan.overlap)
        self.sharing: list[Pending] = []  # stage 0: reduced gradients on their way to every rank
        self.inspect: Callable[[Unit], None] | None = None  # sees a unit before its gradients are collected
        self.state_dict_allowed = False
        self.held: set[int] = set()  # ids of parameters inside a GatheredParameters block
        self.part = ModelPart()  # that is running, or will next
        self.on_backward_end: Callable[[], None] = lambda: None
        self._published = False  # new values of the shards, so far
        self._leaf_hooks: deque[Any] = deque()  # on inputs that belong to the script, oldest first
        self._phases = 0
        self._watch: ReadWatch | None = None  # for those who read placeholders; on in the first pass of each kind
        self._watches = True
        self._watched: set[Hashable] = set()  # kinds of passes
        self._seen_nan: set[Hashable] = set()
        self._interrupted: ExecutionTrace | None = None  # the pass in whose forward the backward runs
        self._inside: list[int] = []  # units whose forward is running, outermost first
        self._handles = self._install_hooks()
        # Host memory is updated behind the program: those shards are ready when their rank says so.
        still = [unit for unit in units if not unit.resident and not unit.placement.optimizer]
        comm.expose([flat_group.shard for unit in still for flat_group in unit.flat_groups])

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _install_hooks(self) -> list[Any]:
        handles = []
        for unit in self.units:
            for module in unit.modules:
                enter, leave = partial(self._pre_forward, unit), partial(self._post_forward, unit)
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
                if self.shares_params:
                    handles.append(module.register_forward_hook(self._after_watch, always_call=True))
        return handles

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if unit.index == 0:
            self._recover()
        if self.backward_trace is not None:  # recomputation, which may stop half-way and never leave
            if unit.index:
                self._need(self.backward_trace, unit)
            return
        if not unit.resident:
            self._refuse_nesting(unit)
        self._inside.append(unit.index)
        if self.forward_trace is None:
            self._begin_pass(unit)
        assert self.forward_trace is not None
        if unit.index:
            self._need(self.forward_trace, unit)

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if unit.has_packed:
            self._refuse_repacked(unit)
        if self.backward_trace is None:
            while self._inside and self._inside.pop() != unit.index:
                pass  # an exception, which the script caught, has left that one
            if not unit.resident and unit.index not in self._inside:
                unit.reshard()
            if not self._inside and self.forward_trace is not None:
                self._look_at(output, self.forward_trace)
                self._end_pass()
        if torch.is_grad_enabled():
            pre_backward = partial(self._pre_backward, unit)
            inputs = list(tensors_in((args, kwargs)))
            if not unit.resident:
                self._watch_inputs(unit, inputs)
            passed_through = {id(tensor) for tensor in inputs}  # made, and hooked, elsewhere
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None and id(tensor) not in passed_through:
                    tensor.register_hook(pre_backward)
                    if not unit.resident:
                        tensor.grad_fn.metadata[MADE_BY] = unit.index  # type: ignore[index]

    def _pre_backward(self, unit: Unit, grad: torch.Tensor) -> None:
        with torch.no_grad():  # a backward that builds a graph has gradients on
            if self.backward_trace is None:
                self._begin_backward()
            assert self.backward_trace is not None
            if unit.index:
                self._need(self.backward_trace, unit)

    def _watch_inputs(self, unit: Unit, inputs: list[torch.Tensor]) -> None:
        """Need ``unit`` also when the gradients of its inputs are differentiated. See [Note: gradients of gradients]."""
        for tensor in inputs:
            if not tensor.requires_grad:
                continue
            handle = tensor.register_hook(partial(self._watch_gradient, unit))
            if tensor.is_leaf:  # may be used again and again, and would keep all hooks
                self._leaf_hooks.append(handle)
                if len(self._leaf_hooks) > _MAX_OUTSTANDING:
                    self._leaf_hooks.popleft().remove()

    def _watch_gradient(self, unit: Unit, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled() and grad.requires_grad:
            grad.register_hook(partial(self._pre_backward, unit))

    def _recover(self) -> None:
        """An exception left a forward or backward half-way, and the program went on: forget it."""
        if self.backward_trace is not None and torch._C._current_graph_task_id() == -1:
            self.backward_trace = None
        if self.backward_trace is None:
            del self._inside[self._running() :]
            if not self._inside:
                self.forward_trace = None

    def _running(self) -> int:
        """How many forwards of units, besides the one that is being entered, are on this thread's stack."""
        modules = {id(module) for unit in self.units for module in unit.modules} if self._inside else set()
        frame, count = inspect.currentframe() if modules else None, 0
        while frame is not None:
            if frame.f_code is _MODULE_CALL and id(frame.f_locals["self"]) in modules:
                count += 1
            frame = frame.f_back
        return max(count - 1, 0)

    def _around(self, unit: Unit) -> int | None:
        """The index of another unit, of those that share slots, whose forward is running."""
        return next((i for i in self._inside if i != unit.index and not self.units[i].resident), None)

    def _refuse_nesting(self, unit: Unit) -> None:
        if self._around(unit) is not None:
            self._recover()
        outer = self._around(unit)
        if outer is not None:
            raise ModelError(
                f"unit {unit.name!r} was entered while unit {self.units[outer].name!r} is running; at stage 3 units "
                "share slots and cannot contain one another. Remedy: name the class of the outer module only in "
                "zero_optimization.unit_policy."
            )

    # -- forward -------------------------------------------------------------------------------------------------

    def _refuse_foreign_values(self) -> None:
        """Raise if the script has given a parameter values that the shards do not have: they would be lost."""
        for unit in self.units:
            for name, param in unit.replaced():
                if id(param) not in self.held:
                    raise ModelError(
                        f"parameter {name!r} was given another tensor after initialize(), by param.data = ... or by a call "
                        f"like model.half() or model.to(...); its optimizer does not know. Remedy: {_BY_COPY}."
                    )
        if self.comm.device.type == "cpu" or self._phases < _LOOKED_AT:
            for name in (name for unit in self.units for name in unit.overwritten()):
                raise ReleasedParameterError(
                    f"parameter {name!r} was written to where only a placeholder of it is on this rank, so the values are "
                    f"lost. Remedy: {_BY_COPY}."
                )

    def _refuse_repacked(self, unit: Unit) -> None:
        """Raise if a layer has packed its frozen weight anew: what it says of the bytes is not true of those here."""
        for name, param in unit.replaced():
            if repacking(param) and id(param) not in self.held:
                raise ModelError(
                    f"the layer of parameter {name!r}, a {type(param).__name__}, gave it another tensor in its forward, "
                    f"which would be lost, and may have changed its scales to fit: {repacking(param)}. Remedy: set that "
                    "before initialize(), and build the model anew."
                )

    def _begin_pass(self, entry: Unit, *, watched: bool = True) -> None:
        if self._watch is None:
            self._refuse_foreign_values()
        self._phases += 1
        key = ("forward", entry.index, torch.is_grad_enabled(), self.part.name)
        self.forward_trace = ExecutionTrace(key, self.plans.get(key))
        kind = (key, self.module.training)
        wanted = watched and self.shares_params and self._watches and kind not in self._watched
        if wanted and self._watch is None:
            self._watched.add(kind)
            self._watch = ReadWatch(
                (flat_group.marks, flat_group.names, unit.name)
                for unit in self.units
                for flat_group in (unit.flat_groups if not unit.resident else ())
            )
            self._watch.__enter__()

    def do_not_watch(self) -> None:
        """Forwards are compiled, in their first pass: under a watch they would not be."""
        self._watches = False

    def _after_watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the watch with the outermost forward, also where that raises."""
        if self._watch is not None and not self._running():
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)

    def _look_at(self, output: Any, trace: ExecutionTrace) -> None:
        """Watch the next pass of this kind, too, once, if an evaluation gives NaN: it may have come from a placeholder."""
        key = (trace.key, self.module.training)
        if trace.key[2] or not self.shares_params or self.comm.device.type != "cpu" or key in self._seen_nan:  # type: ignore[index]
            return
        if any(bool(tensor.sum().isnan()) for tensor in tensors_in(output) if tensor.is_floating_point()):
            self._seen_nan.add(key)
            self._watched.discard(key)

    def _end_pass(self) -> None:
        trace = self.forward_trace
        assert trace is not None
        if self.shares_params:
            self._finish_plan(trace)
            if trace.plan is None:
                self._ask_until_all_end(trace)
                self._agree(trace, self._universe())
        self.forward_trace = None
        if trace.key[2] and trace.recorded:  # type: ignore[index]
            self.outstanding.append(trace)

    def _universe(self) -> list[int]:
        """All units but the root, in the order in which the model defines them."""
        return [unit.index for unit in self.units if unit.index]

    # -- backward ------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self._interrupted = self.forward_trace
        if self.forward_trace is not None:
            self._end_pass()
        self._phases += 1
        self._begin_completing()
        passes = list(self.outstanding)
        self.outstanding.clear()
        for trace in passes:
            if trace.key not in self.plans:
                self._agree(trace, self._universe())
        key = ("backward", *(trace.key for trace in passes))
        if key not in self.plans:
            forward = [self.plans[trace.key] for trace in reversed(passes)]
            agreed = all(plan is not None for plan in forward)
            self.plans[key] = [unit for plan in forward for unit in reversed(plan or [])] if agreed else None
        self.backward_trace = ExecutionTrace(key, self.plans[key])
        Variable._execution_engine.queue_callback(self._post_backward)

    @torch.no_grad()
    def _post_backward(self) -> None:
        trace = self.backward_trace
        assert trace is not None
        try:
            self._finish_plan(trace)
            if self.shares_params and trace.plan is None:
                self._ask_until_all_end(trace)
                self._agree(trace, self._universe()[::-1])
            for unit in reversed(self.units):
                if unit.trainable and unit.index not in self.completed and not unit.deferred:
                    self._complete(unit)
            if not self.part.held:
                self._complete_rest()
            for unit in self.units:
                if not unit.resident:
                    unit.reshard()
            late = {unit.index for unit in self.units if unit.has_gradient()}
            for index in late:
                if not self.part.held:
                    self._refuse_lost_slot(self.units[index])
                for flat_group in self.units[index].trainable:
                    flat_group.set_late_aside()
            self.late = set() if self.part.held else late
            self.on_backward_end()
        finally:
            self.backward_trace, self._last_backward = None, trace
        if self._interrupted is not None:
            self._resume(grad_mode=self._interrupted.key[2])  # type: ignore[index]

    def _resume(self, *, grad_mode: bool) -> None:
        """The forward that this backward interrupted goes on: what is running has to be there again."""
        self._interrupted = None
        with torch.set_grad_enabled(grad_mode):
            for unit in (self.units[index] for index in dict.fromkeys(self._inside)):
                if not unit.resident:
                    if self.forward_trace is None:
                        self._begin_pass(unit, watched=False)  # what is switched on in a backward ends with it
                    self._need(self.forward_trace, unit)  # type: ignore[arg-type]

    def _complete_rest(self) -> None:
        """Complete the units whose turn has not come in this backward."""
        for unit in reversed(self.units):
            inside = self.part.units is None or unit.index in self.part.units
            if unit.trainable and inside and unit.index not in self.completed:
                self._complete(unit)

    def complete(self, part: ModelPart) -> None:
        """The gradients of ``part``, which were held, are complete: collect them, and reduce them where they are."""
        self.part = replace(part, held=False)
        self._begin_completing()
        self._complete_rest()

    def _begin_completing(self) -> None:
        """No unit's gradients are complete yet; find out whether those that will be are reduced."""
        self.is_last_backward = self.reduce_now()
        self.reduces_now = self.shares_grads or self.is_last_backward
        self.completed.clear()

    def take_passes(self) -> list[ExecutionTrace]:
        """The forwards whose backward has not come yet, which ``expect`` is given before it."""
        passes = list(self.outstanding)
        self.outstanding.clear()
        return passes

    def expect(self, passes: list[ExecutionTrace]) -> None:
        """The next backward is that of ``passes``."""
        self.outstanding.clear()
        self.outstanding.extend(passes)

    def _refuse_lost_slot(self, unit: Unit) -> None:
        """A gradient that came after its unit's slot went to another unit may be made from the other's weights."""
        names = unit.names_with_gradient()
        if unit.resident or self.param_slots.occupant[unit.param_slot] == unit.index or not names:
            return
        raise OrderError(
            f"a gradient of parameter {names[0]!r} came when its unit {unit.name!r} had been left: the backward "
            "goes back and forth between units. Remedy: name the module around both units in "
            "zero_optimization.unit_policy, or use stage 2."
        )

    def _refuse_stray_gradient(self, unit: Unit) -> None:
        """A gradient for a unit that never had its slot comes from a use of a placeholder."""
        if unit.resident or unit.index in self.forwarded or not unit.has_gradient():
            return
        names = unit.names_with_gradient()
        raise released_parameter(names[0], unit.name)

    def _complete(self, unit: Unit) -> None:
        """Collect the gradients of ``unit`` and, where this backward reduces, start their reduction."""
        self._refuse_stray_gradient(unit)
        self.completed.add(unit.index)
        if unit.grad_slot < 0 and any(flat_group.reduced for flat_group in unit.trainable):
            self.finish_reductions(of=unit)
        if self.inspect is not None:
            self.inspect(unit)
        if not (self.reduces_now and unit.take_loose()):
            self.reductions.free_slot(unit)
            unit.accumulate()
        if self.reduces_now:
            self.reductions.begin(unit)

    def _start_reduction(self, unit: Unit) -> None:
        unit.start_reduce(self.comm, final=self.is_last_backward)

    def _finish_reduction(self, unit: Unit) -> None:
        unit.finish_reduce()
        if not self.policy.shard_optimizer and self.comm.topology.shard > 1:
            for flat_group in unit.trainable:
                label = f"{unit.name}: all-gather gradients"
                self.sharing.append(self.comm.all_gather(flat_group.grad_full, flat_group.layout.bounds, label))

    # -- needs ---------------------------------------------------------------------------------------------------

    def _need(self, trace: ExecutionTrace, unit: Unit) -> None:
        """``unit`` is needed now: go along the agreed list up to it, or ask the other ranks."""
        self.forwarded.add(unit.index)
        if trace.current != unit.index:
            trace.recorded.append(unit.index)
            position = trace.find(unit.index)
            if position is not None:
                self._advance(trace, position)
            elif self.shares_params:
                self._ask(trace, unit)
            trace.current = unit.index
        unit.unshard()

    def _advance(self, trace: ExecutionTrace, position: int) -> None:
        """Take every step of the plan up to ``position``: the same steps, in the same order, on every rank."""
        assert trace.plan is not None
        backward = trace is self.backward_trace
        while trace.cursor < position:
            if backward and trace.cursor >= 0:
                self._pass_by(trace)
            trace.cursor += 1
            self._prefetch(trace)

    def _pass_by(self, trace: ExecutionTrace) -> None:
        """The unit under the cursor has been left for good: reduce it, if it is not needed again."""
        assert trace.plan is not None
        if self.part.held:
            return
        unit = self.units[trace.plan[trace.cursor]]
        if trace.finished(trace.cursor) and unit.trainable and not unit.deferred and unit.index not in self.completed:
            self._complete(unit)

    def _finish_plan(self, trace: ExecutionTrace) -> None:
        """Take the steps that this rank had no need for: other ranks may be waiting in them."""
        if trace.plan:
            self._advance(trace, len(trace.plan) - 1)
            if trace is self.backward_trace:
                self._pass_by(trace)

    def _prefetch(self, trace: ExecutionTrace) -> None:
        """Issue gathers from the cursor on, as far as slots are free, in the order of the plan."""
        assert trace.plan is not None
        if not self.shares_params:
            return
        last = min(trace.cursor + self.param_slots.count - 1, len(trace.plan) - 1)
        while trace.issued < last:
            unit = self.units[trace.plan[trace.issued + 1]]
            waiting = trace.plan[trace.cursor : trace.issued + 1]  # in use, or gathered for their turn
            if any(self.units[other].param_slot == unit.param_slot >= 0 and other != unit.index for other in waiting):
                return
            trace.issued += 1
            self._gather(unit, "for backward" if trace is self.backward_trace else "for forward")

    def _gather(self, unit: Unit, phase: str) -> None:
        """Start to fill the slot of ``unit``, unless its bytes are there already."""
        if unit.resident or self.param_slots.occupant[unit.param_slot] == unit.index:
            return
        self.evict(unit.param_slot)
        unit.start_gather(self.comm, phase)
        self.param_slots.occupant[unit.param_slot] = unit.index

    def evict(self, slot: int) -> None:
        """Nothing is in shared slot ``slot`` from here on. All ranks must do it at the same point."""
        occupant = self.param_slots.occupant[slot]
        if occupant is not None:
            if self.backward_trace is not None:  # gradients that are there by now were made from its own weights
                for flat_group in self.units[occupant].trainable:
                    flat_group.set_late_aside()
            self.units[occupant].finish_gather()
            self.units[occupant].reshard()
            if not self.units[occupant].plan.keeps_others:
                self.units[occupant].let_go_of_others()
            self.param_slots.occupant[slot] = None

    # -- agreement -----------------------------------------------------------------------------------------------

    def _ask(self, trace: ExecutionTrace, unit: Unit | None) -> bool:
        """One round: tell which unit this rank needs next, and gather what any rank needs. True if all have ended."""
        need = unit.index if unit is not None else _END
        message = torch.tensor([self._phases, trace.issued, need], dtype=torch.int64)
        try:
            answers = [tuple(answer.tolist()) for answer in self.comm.data_gather(message, ORDER_TIMEOUT_S)]
        except OrderError as error:
            raise OrderError(self._unanswered(trace, unit)) from error
        if len({(phase, issued) for phase, issued, _ in answers}) > 1:
            raise OrderError(self._different_positions(answers))
        trace.plan = None
        for index in sorted({needed for *_, needed in answers} - {_END}):
            self._gather_for_some(self.units[index], needed_here=index == need)
        return all(needed == _END for *_, needed in answers)

    def _gather_for_some(self, unit: Unit, *, needed_here: bool) -> None:
        if unit.resident:
            return
        if needed_here:
            self.evict(unit.param_slot)
            unit.start_gather(self.comm, "as asked")
            self.param_slots.occupant[unit.param_slot] = unit.index
            return
        unit.updated()
        for flat_group in unit.flat_groups:  # other ranks need our shard; what we receive goes to scratch
            scratch = torch.empty_like(flat_group.full)
            label = f"{unit.name}: all-gather as asked"
            self.comm.all_gather(scratch, flat_group.layout.bounds, label, flat_group.shard).wait()

    def _ask_until_all_end(self, trace: ExecutionTrace) -> None:
        while not self._ask(trace, None):
            pass
        for slot in range(self.param_slots.count):  # ranks may hold different units: start afresh
            self.evict(slot)

    def _agree(self, trace: ExecutionTrace, universe: list[int]) -> None:
        """Merge what the ranks needed into the plan of this kind of pass."""
        if trace.key in self.plans and self.plans[trace.key] is None:
            return
        merged = merge_orders(self.comm.data_objects(trace.recorded), universe)
        if merged is None:
            warn_once(
                "ranks run their units in contradictory orders: results are right, but nothing is prefetched, and "
                "ranks ask one another before every gather."
            )
        self.plans[trace.key] = merged

    def _unanswered(self, trace: ExecutionTrace, unit: Unit | None) -> str:
        name = unit.name if unit is not None else "the end of the pass"
        return (
            f"rank {self.comm.topology.rank} reached {name!r} outside the order agreed for this pass ({trace.key}), and "
            f"other ranks did not within {ORDER_TIMEOUT_S:.0f} s: they run the model's units in another order or "
            "another number of times. Remedy: call the model equally often on all ranks. If some ranks take a "
            "branch that none has taken before, let all take it in the first step, or define its modules in the order "
            "that they run in, or make the modules that differ one unit (zero_optimization.unit_policy with the class name "
            "of the module around them)."
        )

    def _different_positions(self, answers: list[tuple[int, ...]]) -> str:
        rank = next(rank for rank, answer in enumerate(answers) if answer[:2] != answers[0][:2])

        def where(phase: int, issued: int, need: int) -> str:
            unit = self.units[need].name if need >= 0 else "none"
            return f"forward or backward number {phase}, after {issued + 1} units of its plan, needing unit {unit!r}"

        return (
            f"rank 0 is in {where(*answers[0])}, but rank {rank} in {where(*answers[rank])}. "
            "Remedy: call the model and backward equally often, and its units in the same order, on all ranks."
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    def reduce_accumulated(self) -> None:
        """Reduce what accumulated in backwards that did not (the boundary was not known then)."""
        for unit in reversed(self.units):
            if any(flat_group.accumulated for flat_group in unit.trainable):
                self.reductions.begin(unit)
        self.finish_reductions()

    def finish_reductions(self, of: Unit | None = None) -> None:
        """Wait for all reductions in flight, or until that of one unit is done."""
        self.reductions.end(of)
        for pending in self.sharing:
            pending.wait()
        self.sharing.clear()

    def reduce_late(self) -> None:
        """Reduce the gradients that came late on any rank. All data-parallel ranks must call it.

        The next backward follows the order of this one; a unit that is late again waits for the end of the backward.
        """
        if self._last_backward is not None:
            self._agree(self._last_backward, self._universe()[::-1])
        for index in sorted(set().union(*self.comm.data_objects(self.late))):
            unit = self.units[index]
            if index in self._late_before:
                unit.defer()
            self._late_before.add(index)
            self.reductions.free_slot(unit)
            unit.accumulate()
            self.reductions.begin(unit)
        self.finish_reductions()
        self.late.clear()

    def forward_order(self) -> list[Unit]:
        """The units in the order in which the next forward needs them, as far as is known; the root first."""
        plans = [plan or [] for key, plan in self.plans.items() if key[0] == "forward" and key[2]]  # type: ignore[index]
        order = dict.fromkeys([0, *(index for plan in plans for index in plan), *self._universe()])
        return [self.units[index] for index in order]

    def finish_updates(self) -> None:
        """Wait for the updates that go on behind the program: masters, moments and weights may be used by anybody then."""
        for unit in self.units:
            unit.updated()
        for link in links_of(self.units):
            link.flush()

    def gather_updated(self) -> None:
        """The shards have new values: gather units with slots of their own, let go of what shared slots hold.

        Returns when that is done, on all ranks: loops that read parameters after step(), for a moving average say, must see
        new values, and those that write to them must not change what others have still to read.
        """
        for slot in range(self.param_slots.count if self.shares_params else 0):
            self.evict(slot)
        for unit in self.units:  # what a backward touched after its unit's turn
            unit.let_go_of_others()
            if not self._published:
                unit.use_huge_pages()
        self._published = True
        resident = [unit for unit in self.units if unit.resident]
        if not self.policy.shard_optimizer or self.comm.topology.shard == 1:
            for unit in resident:
                unit.updated()
            return
        for unit in resident:
            unit.start_gather(self.comm, "updated parameters")
        for unit in resident:
            unit.finish_gather()
        self.comm.fence()

    def forget(self) -> None:
        """After a step: nothing is outstanding."""
        self.outstanding.clear()
        self.forwarded.clear()
        self.late.clear()
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()


def refuse_managed(module: nn.Module) -> None:
    """Raise ModelError if a runtime has hooks in ``module``: a second one would train parameters that nobody reads."""
    for name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), Runtime):
                raise ModelError(
                    f"{f'its module {name!r}' if name else 'the model'} belongs to an engine already, which has its "
                    "parameters. Remedy: call destroy() of that engine first, or build the model anew."
                )
