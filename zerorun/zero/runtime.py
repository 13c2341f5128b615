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
they belong to is over. The ways into them are the gradients of a unit's inputs and of its parameters: a hook there needs
the unit once more, in the same backward as its ordinary hook, which comes later. Gradients of parameters are complete after
that. Parameters get such hooks by the first backward of that kind in a step.

Recomputation (activation checkpointing) enters a unit's forward during a backward: the unit is needed as ever.

[Note: what a forward keeps]
A loss may depend on what a unit's forward has left in attributes, or shown to the script's hooks on layers inside, and not
on outputs of the unit. So that gets hooks as outputs do. The attributes of all modules of a unit are looked through after
its first forwards, which takes about a tenth of a millisecond; later only those that held something then. But what was made
after the output is always looked for: a backward comes to it before it comes to the output. Where the script keeps things
elsewhere nobody finds them: see [Note: versions] in placeholders.py for what becomes of that.

[Note: forwards within forwards]
A forward may call its own module again: a recursive block, or a trainer that lets the model's forward run its training
step, which calls the model. The pass is that of the outermost call, and a unit stays until its outermost call is left.
A backward that runs within a forward ends the pass as far as it has come. After it, what was running is needed again,
and the rest of the forward is a pass of its own.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from ..distributed.transport.communicator import Communicator
from ..distributed.transport.quantised_sum import GradientCodes
from ..errors import ModelError, StepError
from ..log import warn_once
from ..plan.replaced_forwards import ReplacedForward, methods_with_parts, uncompiled
from ..plan.sharding_plan import ShardingPlan
from .builder import ShardedParameters
from .gathers import ExecutionTrace, Gathers, renew
from .offloaded_states import GRADIENTS, SLOTS, WEIGHTS
from .parameter_guards import ReadGuard, ScriptGuard
from .placeholders import tensors_held_by, tensors_in
from .reducer import Backwards, Reducer
from .unit import Unit

# How many forwards are remembered for a backward to come. No loop needs more, and forwards without one must not pile up.
_MAX_OUTSTANDING = 32
# Of the frames of forwards: hooks and all.
_MODULE_CALL = nn.Module._call_impl.__code__
# Key in the metadata of an autograd node: the index of the unit whose output the node makes.
MADE_BY = "zerorun unit"


@dataclass(frozen=True)
class ModelPart:
    """A part of the model that has forwards and backwards of its own. ``units``: that it needs; None: all.

    ``held``: gradients of its backwards are not complete yet when these end; ``complete`` says when they are.
    """

    name: Hashable = None
    units: frozenset[int] | None = None
    held: bool = False

    def has(self, unit: Unit) -> bool:
        """True if the part needs ``unit``."""
        return self.units is None or unit.index in self.units


class Removable(Protocol):
    """A change to a module or an optimizer that can be undone."""

    def remove(self) -> None: ...


def _no_hook(*unused: Any) -> None:
    """In place of a hook, in copies of a layer and in files: nothing manages their parameters."""


def _hookless() -> Callable[..., None]:
    return _no_hook


class ModuleHook:
    """A hook that stays with the engine: copies and pickles of a layer work, and are those of an ordinary layer."""

    def __reduce__(self) -> Any:
        return _hookless, ()


class _ForwardHook(ModuleHook, partial[Any]):
    """A method of a runtime, with its unit, as a hook on a module."""


class _LayerHook(_ForwardHook):
    """The same, on a layer inside of a unit."""


class UnitMethod(ReplacedForward):
    """The forward of a unit's module, or another method, which has the weights even if it is called by itself.

    ``hooks``: what runs before and after the module's forward, and after it in any case. ``runs``: whether the unit runs.
    """

    def __init__(
        self, module: nn.Module, name: str, hooks: Sequence[Callable[..., None]], runs: Callable[[], bool]
    ) -> None:
        super().__init__(module, name)
        self._enter, self._leave, self._after = hooks
        self._runs = runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._had or getattr(type(self.module), self._name).__get__(self.module)
        if torch.compiler.is_compiling() or self._runs():
            return own(*args, **kwargs)
        return self.run(own, args, kwargs)

    def run(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method ``own`` as a forward of the unit."""
        output = None
        try:
            self._enter(self.module, args, kwargs)
            output = own(*args, **kwargs)
            self._leave(self.module, args, kwargs, output)
        finally:
            self._after(self.module, args, output)
        return output


# Of the frames of methods that run as forwards.
_METHOD_CALL = UnitMethod.run.__code__


_LOOKS = 3  # forwards after which all attributes of a unit's modules are looked through
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that all modules have


class KeptTensors:
    """What forwards of ``unit`` leave in attributes, and show to hooks of the script: see [Note: what a forward keeps]."""

    def __init__(self, unit: Unit) -> None:
        self._modules = [] if unit.resident else [part for root in unit.modules for part in root.modules()]
        self._inside = [part for part in self._modules if part not in unit.modules]
        self._places: dict[tuple[int, str], nn.Module] = {}  # attributes that have held tensors with gradients
        self._looks = 0
        self._hooks: dict[int, int] = {}  # of each layer inside, as many as it had when it was last looked at

    def find(self, made: Mapping[int, torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield what a forward has kept beside ``made``, its output, by id. Its nodes have the numbers [begin, end)."""
        last = max(map(_number, made.values()), default=begin - 1)
        some_are_late, found_late = last + 1 < end, False
        if self._looks < _LOOKS or some_are_late:
            self._looks += 1
            self._look()
        for (_, name), module in self._places.items():
            for tensor in _in_graphs(vars(module).get(name)):
                if begin <= _number(tensor) < end and id(tensor) not in made:
                    found_late |= _number(tensor) > last
                    yield tensor
        if made and some_are_late and not found_late:
            warn_once(
                f"{type(self._modules[0]).__name__} computes something with gradients after its output, and keeps it where "
                "it is not found at stage 3. Where a loss depends on it, the backward ends in an error. Remedy: keep it as "
                "an attribute of the module, return it, or compute it under torch.no_grad()."
            )

    def _look(self) -> None:
        for module in self._modules:
            for name, value in vars(module).items():
                if name not in _OF_MODULES and next(_in_graphs(value), None) is not None:
                    self._places[id(module), name] = module

    def newly_hooked(self) -> Iterator[nn.Module]:
        """Yield each layer inside on which the script has put a forward hook, once."""
        for layer in self._inside:
            hooks = layer._forward_hooks
            if hooks and len(hooks) != self._hooks.get(id(layer), 0):
                of_script = any(not isinstance(hook, ModuleHook) for hook in hooks.values())
                is_new = of_script and not any(isinstance(hook, _LayerHook) for hook in hooks.values())
                self._hooks[id(layer)] = len(hooks) + is_new
                if is_new:
                    yield layer


def _in_graphs(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_held_by(value) if tensor.grad_fn is not None)


def _number(tensor: torch.Tensor) -> int:
    """Of the node that has made ``tensor``, in the order in which this thread makes nodes."""
    return tensor.grad_fn._sequence_nr()  # type: ignore[union-attr, no-any-return]


def _next_number() -> int:
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined, no-any-return]


class RunningForwards:
    """The units whose forward is running, outermost first, and what their inputs were made by when they began."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._inside: list[int] = []
        self._inputs: dict[int, list[tuple[int, dict[int, Any]]]] = {}  # unit -> of each forward: see note_inputs
        self.kept = [KeptTensors(unit) for unit in units]

    def __bool__(self) -> bool:
        return bool(self._inside)

    def enter(self, unit: Unit) -> None:
        """Raises ModelError if another unit that shares slots is running."""
        outer = self.around(unit)
        if outer is not None:
            raise ModelError(
                f"unit {unit.name!r} was entered while unit {outer.name!r} is running; at stage 3 units "
                "share slots and cannot contain one another. Remedy: name the class of the outer module only in "
                "zero_optimization.unit_policy."
            )
        self._inside.append(unit.index)

    def has(self, unit: Unit) -> bool:
        """True if ``unit`` is running."""
        return unit.index in self._inside

    def leave(self, unit: Unit) -> bool:
        """The forward of ``unit`` ends. False if an outer forward of the same unit is still running."""
        while self._inside and self._inside.pop() != unit.index:
            pass  # an exception, which the script caught, has left that one
        return unit.index not in self._inside

    def note_inputs(self, unit: Unit, given: Any) -> None:
        """A forward of ``unit`` begins, which may change what it is ``given``, and return it.

        Noted are the number of the next node, and for each tensor the node that has made it.
        """
        nodes = {id(tensor): tensor.grad_fn for tensor in tensors_held_by(given)}
        self._inputs.setdefault(unit.index, []).append((_next_number(), nodes))

    def made_by(self, unit: Unit, given: Any, output: Any) -> Iterator[torch.Tensor]:
        """The forward of ``unit`` ends: yield what it has made, in ``output`` and in what it was ``given``, and kept.

        What it has only passed through was made, and has its hooks, elsewhere.
        """
        noted, end = self._inputs.get(unit.index), _next_number()  # looking at a view may make its node anew
        begin, before = noted.pop() if noted else (end, {})
        found = {id(one): one for one in (*tensors_in(given), *tensors_held_by(output)) if one.grad_fn is not None}
        made = {key: one for key, one in found.items() if before.get(key, self) is not one.grad_fn}
        yield from made.values()
        if not unit.resident:
            yield from self.kept[unit.index].find(made, begin, end)

    def forget_inputs(self) -> None:
        """Forget the inputs of forwards that an exception, or the end of a recomputation, has left."""
        self._inputs.clear()

    def each(self) -> Iterator[Unit]:
        """The running units, without repetition."""
        return (self._units[index] for index in dict.fromkeys(self._inside))

    def forget_left(self) -> None:
        """Forget forwards that an exception has ended."""
        del self._inside[self.on_the_stack() :]

    def on_the_stack(self) -> int:
        """How many forwards of units, besides the one that is being entered, are on this thread's stack."""
        modules = {id(module) for unit in self._units for module in unit.modules} if self._inside else set()
        frame, count = inspect.currentframe() if modules else None, 0
        while frame is not None:
            if frame.f_code in (_MODULE_CALL, _METHOD_CALL):
                called = frame.f_locals["self"]
                count += id(called.module if isinstance(called, UnitMethod) else called) in modules
            frame = frame.f_back
        return max(count - 1, 0)

    def around(self, unit: Unit) -> Unit | None:
        """Another unit whose forward is running and that shares slots with ``unit``."""
        others = (other for other in self.each() if other is not unit and not other.resident)
        return None if unit.resident else next(others, None)


def _has(tensors: Iterable[torch.Tensor], whole: torch.Tensor) -> bool:
    """True if ``whole``, or a view of it, is among ``tensors``."""
    return any(tensor is whole or tensor._base is whole for tensor in tensors)


def _weak_hook(method: Callable[..., None], unit: Unit, *given: Any) -> Callable[[torch.Tensor], None]:
    """A hook on a tensor that calls ``method(unit, *given, gradient)``. Whoever keeps the tensor keeps neither."""
    known, of = WeakMethod(method), ref(unit)

    def hook(grad: torch.Tensor) -> None:
        found, unit = known(), of()
        if found is not None and unit is not None:
            found(unit, *given, grad)

    return hook


class GradientHooks:
    """Hooks on gradients, for when these are differentiated: see [Note: gradients of gradients]."""

    def __init__(self, need: Callable[[Unit, torch.Tensor], None]) -> None:
        """``need`` is called with a unit, and the gradient that was differentiated."""
        self._need = need
        self._handles: deque[Any] = deque()  # on inputs that belong to the script, oldest first
        self._units: dict[int, list[Any]] = {}  # index -> hooks on its parameters

    @property
    def differentiates(self) -> bool:
        """True if a backward of this step has built a graph."""
        return bool(self._units)

    def add_parameters(self, unit: Unit) -> None:
        """Add hooks to the parameters of ``unit``, to which a backward comes that builds a graph."""
        if unit.index not in self._units:
            found = [param for group in unit.trainable for param in group.params if param.requires_grad]
            self._units[unit.index] = [param.register_hook(partial(self._on_gradient, unit)) for param in found]

    def add(self, unit: Unit, inputs: list[torch.Tensor]) -> None:
        """Add hooks to those of ``inputs`` that require gradients."""
        for tensor in inputs:
            if not tensor.requires_grad:
                continue
            handle = tensor.register_hook(_weak_hook(self._on_gradient, unit))
            if tensor.is_leaf:  # may be used again and again, and would keep all hooks
                self._handles.append(handle)
                if len(self._handles) > _MAX_OUTSTANDING:
                    self._handles.popleft().remove()

    @uncompiled
    def _on_gradient(self, unit: Unit, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled() and grad.requires_grad:
            grad.register_hook(partial(self._need, unit))

    def remove(self) -> None:
        """Remove the hooks from parameters, and from inputs that the script may use again."""
        for handle in (*self._handles, *chain.from_iterable(self._units.values())):
            handle.remove()
        self._handles.clear()
        self._units.clear()


class Runtime:
    """The hooks on the modules of all units, and the pass that is running."""

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        made: ShardedParameters,
        comm: Communicator,
        backwards: Backwards,
        coding: GradientCodes,
    ) -> None:
        """``backwards`` is asked at the beginning of each backward, and told of its end."""
        self.module, self.plan, self.made, self.comm = module, plan, made, comm
        self.gathers = Gathers(made.units, made.param_slots, comm)
        self.reducer = Reducer(plan, made.units, comm, backwards, coding)
        self.guard = ScriptGuard(module, made.units, comm.device)
        self.reads = ReadGuard(module, made.units, comm.device, watches=plan.shares_params)
        self._part = ModelPart()  # that is running, or will next
        self._forward: ExecutionTrace | None = None  # that is running
        self._backward: ExecutionTrace | None = None
        self._outstanding: deque[ExecutionTrace] = deque(maxlen=_MAX_OUTSTANDING)  # forwards whose backward may still come
        self._inside = RunningForwards(made.units)
        self.gradient_hooks = GradientHooks(lambda unit, grad: self._pre_backward(unit, None, grad))
        self._handles: list[Removable] = list(self._install_hooks())
        # Shards that are updated in host memory, in the background, are ready only when their rank says so.
        still = [unit for unit in made.units if not unit.resident and not unit.placement.optimizer]
        exposed = [flat_group for unit in still for flat_group in unit.flat_groups if not flat_group.plan.resident]
        for family in {flat_group.plan.family: None for flat_group in exposed}:
            comm.of(family).shard.expose([flat_group.shard for flat_group in exposed if flat_group.plan.family is family])

    @property
    def units(self) -> list[Unit]:
        return self.made.units

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _install_hooks(self) -> Iterator[Removable]:
        yield from self.guard.watched()
        for unit in self.units:
            for module in unit.modules:
                enter, leave = _ForwardHook(self._pre_forward, unit), _ForwardHook(self._post_forward, unit)
                yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                yield module.register_forward_hook(leave, with_kwargs=True)
                if self.plan.shares_params:
                    yield module.register_forward_hook(_ForwardHook(self._after_any), always_call=True)

    def open_methods(self) -> Iterator[Removable]:
        """Let methods of units' modules that are called by themselves have the weights: around all other forwards."""
        for unit in (unit for unit in self.units if not unit.resident):
            around = _ForwardHook(self._pre_forward, unit), _ForwardHook(self._post_forward, unit)
            for module in unit.modules:
                for name in ("forward", *methods_with_parts(module)):
                    yield UnitMethod(module, name, (*around, self._after_any), partial(self._inside.has, unit))

    def keep(self, handles: Iterable[Removable]) -> None:
        """Take care of further ``handles``: they are removed with the hooks."""
        self._handles += handles

    def remove_hooks(self) -> None:
        for handle in reversed(self._handles):
            handle.remove()
        self._handles = []
        self._inside.forget_inputs()

    @uncompiled
    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        if unit.index == 0:
            self._recover()
        if torch.is_grad_enabled():
            self._inside.note_inputs(unit, (args, kwargs))
            for layer in self._inside.kept[unit.index].newly_hooked():  # ours comes first: others may put another output
                self._handles.append(layer.register_forward_hook(_LayerHook(_layer_made, self, unit), prepend=True))
        if self._backward is not None:  # recomputation, which may stop half-way and never leave
            if unit.index:
                self._need(self._backward, unit)
            return
        if self._inside.around(unit) is not None:
            self._recover()
        self._inside.enter(unit)
        trace = self._forward or self._begin_forward(unit)
        if unit.index:
            self._need(trace, unit)

    @uncompiled
    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.guard.refuse_repacked(unit)
        if self._backward is None:
            if self._inside.leave(unit) and not unit.resident:
                unit.reshard()
                self.guard.refuse_written(unit)
            if not self._inside and self._forward is not None:
                self.reads.look_at(output, self._forward)
                self._end_forward(self._forward)
        if torch.is_grad_enabled():
            self._hook_outputs(unit, (args, kwargs), output)

    @uncompiled
    def _after_any(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the watch with the outermost forward, even if that raises."""
        if self.reads.is_watching and not self._inside.on_the_stack():
            self.reads.end()

    def _hook_outputs(self, unit: Unit, given: Any, output: Any) -> None:
        inputs = list(tensors_in(given))
        if not unit.resident:
            self.gradient_hooks.add(unit, inputs)
        pre_backward = _pre_backward_of(self, unit)
        for tensor in self._inside.made_by(unit, given, output):
            tensor.register_hook(pre_backward)
            whole = tensor._base
            if whole is not None and whole.grad_fn is not None and not _has(inputs, whole):
                # Whoever changes a view in place takes its node, and the hook, out of the graph, but not the whole's node.
                whole.grad_fn.register_prehook(pre_backward)
            if not unit.resident:
                tensor.grad_fn.metadata[MADE_BY] = unit.index  # type: ignore[union-attr, index]

    @uncompiled
    def _pre_backward(self, unit: Unit, updates: int | None, grad: torch.Tensor) -> None:
        """A backward comes to ``unit``. ``updates``: of the weights until its forward; None if that does not matter."""
        if updates not in (None, self.gathers.updates):
            raise StepError(
                f"a backward has come to {unit.name!r} by a forward from before the last step(): its weights are others "
                "now, and gradients would be wrong. Remedy: run the forward again, or call step() after all its backwards."
            )
        if self._backward is not None and self._backward.has_failed:
            self._recover()
        if not unit.resident and torch.is_grad_enabled():  # a backward that builds a graph
            self.gradient_hooks.add_parameters(unit)
        with torch.no_grad():
            trace = self._backward or self._begin_backward()
            if unit.index:
                self._need(trace, unit)

    # -- what is running -----------------------------------------------------------------------------------------

    def _need(self, trace: ExecutionTrace, unit: Unit) -> None:
        self.reducer.use(unit, in_backward=trace is self._backward)
        self.gathers.need(trace, unit, self._leaving(trace))

    def _leaving(self, trace: ExecutionTrace) -> Callable[[Unit], None] | None:
        """What to call for each unit that a pass leaves: in a backward, unless held, its gradients are complete then."""

        def leave(unit: Unit) -> None:
            if self._part.has(unit):  # the agreed order has the units of other parts, too
                self.reducer.leave(unit)

        return leave if trace is self._backward and not self._part.held else None

    def _recover(self) -> None:
        """Forget a forward or backward that ended in an exception which the program has caught."""
        if self._backward is not None and (self._backward.has_failed or torch._C._current_graph_task_id() == -1):
            self._backward = None
            self.gathers.end_backward()
        if self._backward is None:
            self._inside.forget_left()
            if not self._inside:
                self._forward = None

    # -- forward -------------------------------------------------------------------------------------------------

    def _begin_forward(self, entry: Unit, *, watched: bool = True) -> ExecutionTrace:
        self.guard.refuse_joined()
        if not self.reads.is_watching:
            self.guard.look()
        if self.made.states.away:
            self.made.states.bring_back(WEIGHTS, SLOTS)
        self._forward = self.gathers.begin_forward(("forward", entry.index, torch.is_grad_enabled(), self._part.name))
        if watched:
            self.reads.begin(self._forward.key)
        return self._forward

    def _end_forward(self, trace: ExecutionTrace) -> None:
        if self.plan.shares_params:
            self.gathers.end_of_order(trace, None)
            self.gathers.agree_at_end(trace)
        self._forward = None
        if trace.with_gradients and trace.recorded:
            self._outstanding.append(trace)

    # -- backward ------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> ExecutionTrace:
        # No matter of other ranks: weights are here, and it leaves no gradients of them.
        is_own = not self.plan.shares_params and not leaves_gradients(self.units)
        interrupted = None if is_own else self._forward
        if interrupted is not None:
            self._end_forward(interrupted)
        if self.made.states.away:
            self.made.states.bring_back(WEIGHTS, SLOTS, *(() if is_own else GRADIENTS))
        if is_own:
            self._backward, end = ExecutionTrace(("own",), None), partial(setattr, self, "_backward", None)
        else:
            self.reducer.begin(watches=not self._part.held)
            self._backward = self.gathers.begin_backward(self.take_passes())
            end = partial(self._post_backward, self._backward, interrupted)
        self._backward.ends_by(end)
        Variable._execution_engine.queue_callback(end)
        return self._backward

    @uncompiled
    @torch.no_grad()
    def _post_backward(self, trace: ExecutionTrace, interrupted: ExecutionTrace | None) -> None:
        held = self._part.held
        try:
            self.gathers.end_of_order(trace, self._leaving(trace))
            self.gathers.agree_at_end(trace)
            if not held:
                self._complete_rest()
            for unit in self.units:
                if not unit.resident:
                    unit.reshard()
            self.reducer.end(held=held, in_slot=self.gathers.holds)
        finally:
            self._backward = None
            self.gathers.end_backward(trace)
        if interrupted is not None:
            self._resume(with_gradients=interrupted.with_gradients)

    def _resume(self, *, with_gradients: bool) -> None:
        """Go on with the forward that a backward has interrupted: unshard the running units again."""
        with torch.set_grad_enabled(with_gradients):
            for unit in self._inside.each():
                if not unit.resident:  # what is switched on in a backward ends with it, and so would a watch
                    self._need(self._forward or self._begin_forward(unit, watched=False), unit)

    def _complete_rest(self) -> None:
        """Complete the units whose turn has not come in this backward, the deferred ones last."""
        inside = [unit for unit in reversed(self.units) if self._part.has(unit)]
        self.reducer.complete(sorted(inside, key=lambda unit: unit.deferred))

    # -- parts of the model --------------------------------------------------------------------------------------

    @contextmanager
    def running(self, part: ModelPart) -> Iterator[None]:
        """Forwards and backwards inside are those of ``part``."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def complete(self, part: ModelPart) -> None:
        """The held gradients of ``part`` are complete now: collect and reduce them."""
        with self.running(replace(part, held=False)):
            self.reducer.begin(watches=False)
            self._complete_rest()

    def take_passes(self) -> list[ExecutionTrace]:
        """Take away the forwards whose backward has not come yet. ``expect`` must be given them before it does."""
        passes = list(self._outstanding)
        self._outstanding.clear()
        return passes

    def expect(self, passes: list[ExecutionTrace]) -> None:
        """The next backward is that of ``passes``."""
        self._outstanding.clear()
        self._outstanding.extend(passes)

    def forget(self) -> None:
        """After a step: nothing is outstanding."""
        self._outstanding.clear()
        self.reducer.forget()
        self.gradient_hooks.remove()
        self._inside.forget_inputs()


def _pre_backward_of(runtime: Runtime, unit: Unit) -> Callable[[torch.Tensor], None]:
    """The hook on what a forward of ``unit`` has made."""
    return _weak_hook(runtime._pre_backward, unit, runtime.gathers.updates if unit.trainable else None)


def _layer_made(runtime: Runtime, unit: Unit, layer: nn.Module, args: Any, output: Any) -> None:
    """A layer inside of ``unit`` has made ``output``, which a hook of the script is about to see."""
    if not torch.compiler.is_compiling():
        for tensor in _in_graphs(output):
            tensor.register_hook(_pre_backward_of(runtime, unit))


def leaves_gradients(units: Iterable[Unit]) -> bool:
    """True unless the backward that is running is certain to leave no trained parameter of ``units`` a gradient.

    A plain backward goes to all leaves, of which some may be hidden in a node that has a backward of its own inside. Others
    have told autograd where they go: torch.autograd.grad, which returns gradients, and backward(inputs=...).
    """
    is_plain = torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
    if is_plain:
        return True
    for param in (param for unit in units for group in unit.trainable for param in group.params if param.requires_grad):
        try:
            if torch._C._will_engine_execute_node(get_gradient_edge(param).node):  # type: ignore[attr-defined]
                return True
        except (RuntimeError, AttributeError):  # its gradient is returned, or it is a constant of a torch.func transform
            return False
    return False


def weights_edited(runtime: Runtime, unit: Unit) -> None:
    """A script has changed the shards of ``unit``, maybe in a forward. All data-parallel ranks must call it."""
    renew(runtime.gathers, unit, runtime._backward or runtime._forward)


def runtimes_in(module: nn.Module) -> Iterator[tuple[str, Runtime]]:
    """(The name of a module inside ``module``, the runtime that has a hook there), for each such hook."""
    for name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            runtime = getattr(hook.func, "__self__", None) if isinstance(hook, partial) else None
            if isinstance(runtime, Runtime):
                yield name, runtime


def refuse_managed(module: nn.Module) -> None:
    """Raise ModelError if a runtime has hooks in ``module``: a second one would train parameters that nobody reads."""
    for name, _ in runtimes_in(module):
        raise ModelError(
            f"{f'its module {name!r}' if name else 'the model'} belongs to an engine already, which has its parameters. "
            "Remedy: call destroy() of that engine first, on all ranks: with accelerate and transformers' Trainer, "
            "trainer.accelerator.free_memory() or trainer.model_wrapped.destroy(). Or build the model anew."
        )
