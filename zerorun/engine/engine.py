"""Engine: orders the events of training, which are forward, backward and step."""

from __future__ import annotations

import math
import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar

import torch
from torch import nn

from ..config.parse import Config
from ..data import EpochLoader, has_state
from ..distributed.agreement import agree
from ..distributed.device import on_host
from ..distributed.same_data import checksum, is_cheap
from ..distributed.topology import Topology
from ..errors import StepError
from ..log import listed, logger, warn_once
from ..monitors.device_sample import DeviceSample
from ..monitors.observer import RunObserver
from ..optim.loss_scale_borders import Border
from ..optim.loss_scaler import DTYPES, LossScaler
from ..optim.lr_schedules import step_reversibly
from ..optim.nested_containers import cast_floats
from ..plan.replaced_forwards import between_graphs, compiled, compiled_by, compiler, innermost, uncompiled
from ..watch.board import Phase, board, during
from ..zero.gradients import not_finite
from ..zero.norm import Decision, Summary
from ..zero.placeholders import explained_reads, released_parameter
from ..zero.runtime import ModelPart
from ..zero.sharded_model import ShardedModel, may_change
from ..zero.unit import links_of
from ..zero.value_access import find_released_use, restore_module
from .accumulation import Accumulation, ScaledBackward, check_loss, refuse_no_backward, running, samples_of_step
from .compilation import show_compilation
from .curvature import CurvatureTaking
from .saving import automatic_saves_of
from .step_outcomes import (
    History,
    UnsettledStep,
    advise_losses,
    advise_own_data,
    is_refused,
    refuse_changes,
    refuse_differing,
    refuse_unlike,
    stage_state,
    told_alike,
)

# The number of first steps in which data and losses of tensor ranks are compared where that means waiting for the device.
COMPARED_STEPS = 10
_NONE: Mapping[str, Any] = {}

T = TypeVar("T")


def _refuse_copy(engine: Engine, protocol: SupportsIndex) -> NoReturn:
    raise StepError(
        "an engine cannot be copied or pickled: it is one of several processes that train together. Remedy: "
        "engine.save_checkpoint(dir) to go on later, engine.state_dict() for the weights, or copy.deepcopy(engine.module) "
        "inside `with zerorun.zero.GatheredParameters(list(engine.module.parameters())):`. A DataLoader whose dataset has "
        'the engine needs multiprocessing_context="fork".'
    )


class Engine(CurvatureTaking):
    """A module in training. ``zerorun.initialize`` makes it."""

    __reduce_ex__ = _refuse_copy

    # How to get such a mean, in words.
    mean_over_labels: ClassVar = "engine.backward(loss, weight=(labels != -100).sum()) averages over all labels of a step"

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        topology: Topology,
        sharded_model: ShardedModel,
        accumulation: Accumulation,
        scaler: LossScaler,
        lr_scheduler: Any,
        dataloader: EpochLoader | Any,
        observer: RunObserver | None,
        *,
        owns_topology: bool,
    ) -> None:
        """``owns_topology``: initialize() made the topology, so the engine closes its process groups."""
        self.module, self.config, self.topology = module, config, topology
        self.sharded_model, self.accumulation, self.history = sharded_model, accumulation, History(scaler)
        self.lr_scheduler, self.dataloader, self.observer = lr_scheduler, dataloader, observer
        self.automatic_saves = automatic_saves_of(config, first=topology.rank == 0)
        self._owns_topology, self._trace = owns_topology, None
        self._sample = DeviceSample.make(self.device, self.comm)
        self._calls = 0  # calls in progress, one nested in the other
        self._border = Border(scaler, lambda: self.loss_scale, running.scale, accumulation.arrivals.enter)
        self.checkpointer  # noqa: B018  it remembers the model as it is now
        if self.sharded is not None:
            self.sharded.settle_by(_settling(self))
        sharded_model.ownership.pass_to(OwningEngine(self, topology if owns_topology else None))
        if observer is not None:
            progress = self.history.progress
            observer.count_steps_by(lambda: progress.global_steps)

    # -- forward and backward ------------------------------------------------------------------------------------

    @between_graphs
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. In bf16 and fp16, floating-point inputs are cast to the compute dtype.

        Raises StepError, on all ranks of a tensor or context group alike, if they are given different data.
        """
        return self._run(compiler(), inputs, kwargs)

    @uncompiled
    @during(Phase.FORWARD)
    def _run(self, compiler: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward; ``compiler`` compiles the module, if the script does so around the call."""
        self._compare_data((inputs, kwargs))
        if torch.is_grad_enabled() and not self._calls:
            self.accumulation.look_at(kwargs, (inputs, kwargs))
        # If the model's own forward has called the engine, only the outer call has to do with the script.
        # Where one engine scales losses, gradients that come to another one may be scaled, too.
        scaler = self.history.scaler
        scaled = scaler.dynamic or scaler.scale != 1.0 or Border.scaling
        passes_border = scaled and not self._calls and torch.is_grad_enabled()
        if passes_border:
            inputs, kwargs = self._border.inwards((inputs, kwargs))
        dtype = self.sharded_model.runtime.plan.compute_dtype
        if dtype is not None:
            inputs, kwargs = cast_floats(inputs, dtype), cast_floats(kwargs, dtype)
        try:
            with self._around_forward():
                module = self.module if compiler is None else compiled_by(compiler, self.module)
                output = module(*inputs, **kwargs)
        except RuntimeError as error:
            if dtype is not None and re.search("dtype|scalar type", str(error)):
                _name_buffers(error, self.module, dtype)
            raise
        return self._border.outwards(output) if passes_border else output

    forward = __call__

    @contextmanager
    def _around_forward(self) -> Iterator[None]:
        """Autocast, and the comparison of what ranks with the same batch draw in training."""
        autocast = self.config.torch_autocast
        trains = self.module.training and torch.is_grad_enabled() and not self._calls
        draws = self.sharded_model.parts.common_draws(self.device) if trains and self.topology.same_batch > 1 else None
        self._calls += 1
        try:
            with torch.autocast(self.device.type, DTYPES[autocast.dtype]) if autocast.enabled else nullcontext():
                yield
        finally:
            self._calls -= 1
        if draws is not None:
            self.accumulation.compare(draws.mark())

    def _compare_data(self, given: Any) -> None:
        own = self.topology.context > 1 and not (self.module.training or self.config.context_parallel.in_evaluation)
        if self.topology.same_batch == 1 or own or (not is_cheap(given) and self.global_steps >= COMPARED_STEPS):
            return
        if not self.sharded_model.units:  # the module was given back, and this is a call of it
            return
        found = self.sharded_model.parts.of_same_batch(checksum(given) or 0)
        if len(set(found)) > 1:
            other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
            first = self.topology.rank - self.topology.same_batch_rank
            what = "layers" if self.topology.context == 1 else "sequences"
            raise StepError(
                f"ranks {first} and {first + other} were given different data at step {self.global_steps + 1}, and divide "
                f"the same {what}. Remedy: choose data by engine.topology.data_parallel_rank, not by the rank of the world."
            )

    @uncompiled
    @during(Phase.BACKWARD)
    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        scale_wrt_gas: bool = True,
        retain_graph: bool = False,
        curvature: bool = False,
    ) -> torch.Tensor:
        """Compute gradients of ``loss`` (a scalar) and return loss / accumulation steps.

        ``weight``: how much this micro-batch counts, usually its number of tokens. The step's gradient is then that of
        sum(weight * loss) / sum(weight) over all ranks and micro-batches. ``scale_wrt_gas=False``: the loss is already
        divided by the accumulation steps. With either, the loss is returned undivided. ``curvature``: ``loss`` is against
        ``zerorun.sampled_labels(logits)``. Its gradients go to Sophia's curvature alone, and count for no step; the mean is
        over as many micro-batches as a step has, or fewer. Raises StepError for anything but a scalar that depends on
        parameters.
        """
        if not self.sharded_model.units:
            raise StepError(
                "backward() of an engine that has given its module back, by destroy() or to another engine. Remedy: call "
                "backward() of the engine that has the module now, or make one by zerorun.initialize()."
            )
        if self.sharded_model.optimizer is None:
            raise StepError(
                "backward() needs an optimizer, and this engine has none. Remedy: add an 'optimizer' section to the "
                "configuration or pass optimizer= to zerorun.initialize()."
            )
        check_loss(loss)
        if curvature:
            return self._take_curvature(loss, weight, scale_wrt_gas=scale_wrt_gas, retain_graph=retain_graph)
        mode, counts = self.accumulation.take_loss(weight, scale_wrt_gas=scale_wrt_gas)
        scale = self.loss_scale
        factor = scale * counts
        self._note_loss(loss, counts)
        said = {"weight": weight, "scale_wrt_gas": scale_wrt_gas}
        released = partial(find_released_use, loss, self.sharded_model.runtime)
        seen = self.accumulation.backwards
        with running.inside(ScaledBackward(scale, said, heard=[self.accumulation])), explained_reads(released):
            scaled = loss * factor if isinstance(factor, torch.Tensor) or factor != 1.0 else loss
            scaled.backward(retain_graph=retain_graph)
            unseen = self.accumulation.backwards == seen and any(unit.has_gradient() for unit in self.units)
            if unseen and not any(unit.placement.optimizer for unit in self.units):  # updates on the host go on, unwaited
                # It has met no output of a unit: its loss is of parts of the root unit, or of what blocks keep.
                self.runtime.complete(ModelPart())
                self.accumulation.ended()
        result = loss.detach()
        return result / self.accumulation.batch.accumulation if mode == "mean" else result

    @uncompiled
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale, for ``engine.scale(loss).backward()`` in fp16."""
        check_loss(loss, "scale()")
        scale = self.loss_scale
        scaled = loss * scale

        def entered(grad: torch.Tensor) -> None:
            running.enter(scale)

        scaled.register_hook(entered)
        return scaled

    def _note_loss(self, loss: torch.Tensor, weight: torch.Tensor | float = 1.0) -> None:
        """Remember a NaN or infinite loss for step(), where all ranks learn of it. A device finds out by itself.

        With a loss scale it counts as an overflow. Losses of tensor ranks are noted for comparison.
        """
        self.accumulation.observe(loss, weight)
        if self.topology.same_batch > 1 and (on_host(self.device) or self.global_steps < COMPARED_STEPS):
            self.accumulation.compare(float(loss.detach()))
        notes = self.accumulation.notes
        scaled = self.history.scaler.dynamic or self.config.fp16.enabled
        if self.sharded_model.comm.queues:
            self.accumulation.note_unread(None if scaled else loss, weight)
            if self.history.progress.applied_in == 0 and (name := find_released_use(loss, self.runtime)) is not None:
                notes.released.append(name)
            return
        if math.isfinite(float(loss.detach())):
            return
        if weight == 0:
            notes.empty.append(self.accumulation.backwards)
            return
        name = find_released_use(loss, self.runtime)
        if name is not None:
            raise released_parameter(*name)
        if not scaled:
            notes.bad_losses.append(self.accumulation.backwards)

    # -- accumulation --------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next step() updates the weights."""
        return self.accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Let the training loop decide from now on which step() updates the weights; None: the engine counts again."""
        self.accumulation.set_boundary(None if is_boundary is None else bool(is_boundary))

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside the block without an update; step() raises StepError there.

        At stages 0 and 1, backward does not communicate inside the block. Stages 2 and 3 keep only shards of gradients and
        reduce in every backward, with the same result.
        """
        return self.accumulation.no_sync()

    coalesce_grad_reduction = no_sync  # DeepSpeed's name, for several backwards of one step

    # -- step ----------------------------------------------------------------------------------------------------

    @uncompiled
    @during(Phase.UPDATE)
    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch and, at the accumulation boundary, update the weights and the learning rate.

        ``lr_kwargs``: for the ``step`` of the learning-rate schedule, such as ``{"epoch": 3}`` or a metric that it watches.
        Raises StepError if there was no backward since the last call (one to inputs alone, as that of torch.autograd.grad,
        does not count), NonFiniteError for NaN losses or gradients (fp32,
        bf16), and LossScaleError if fp16 overflows at the minimum scale. An error leaves the weights as before the step.
        On a GPU, which decides by itself whether a step is applied, these come from the next call.
        """
        over = self.accumulation.count_step()
        if over:
            self._step_now(lr_kwargs or {})
        else:
            self.history.progress.begin()
        self._end_step(over=over)
        if board.agreed_trace:
            self._trace_as_agreed()

    def _step_now(self, lr_kwargs: Mapping[str, Any] = _NONE) -> None:
        """Update the weights from the gradients of all micro-batches, and save a checkpoint if one is due."""
        saves = self.automatic_saves
        if self._estimates is not None:
            self._end_curvature(self._estimates)
        self.history.progress.begin()
        self.sharded_model.reduce()
        asked = saves.wishes() if saves is not None else ()
        stage = stage_state(self.sharded_model, self.history)
        alike = told_alike(self.sharded_model, self.history, stage)
        wishes = (board.wanted_trace, self.accumulation.backwards, is_refused(self.sharded_model), alike, *asked)
        must_know = self.lr_scheduler is not None and not has_state(self.lr_scheduler)
        told = self.accumulation.told(wishes, must_know=must_know)
        summary = self.sharded_model.norm(told)
        trace, backwards, refusals, unlike, *others = summary.wishes
        backwards = -(-backwards // self.topology.world_size)  # some ranks may have had no gradients in some of them
        board.agree_on_trace(trace)
        if self.memory_copies is not None:
            self.memory_copies.settle()  # a step is finished only when the one before it is kept
        try:
            if refusals:
                agree(lambda: refuse_changes(self.sharded_model), self.sharded_model.comm.control.values)
            self.refuse_failed()  # the step before. If another rank has ended, norm() has told: nobody waits in vain
            refuse_no_backward(backwards)
            refuse_differing(summary.differing)
            if unlike:
                refuse_unlike(self.sharded_model, self.history, stage)
            advise_losses(self.sharded_model, self.history, told, summary.differing)
            if summary.same_data:
                advise_own_data(self.topology.data_parallel_size)
            self._update(summary, backwards, lr_kwargs)
        finally:
            self._forget_gradients()
        if self.sharded_model.parts.loads is not None and self.config.has_monitor:
            found = self.expert_load()
            if self.observer is not None:
                self.observer.write_loads(found, self.global_samples)
        if saves is not None:
            self._save_if_due(saves, *others)
        if self.memory_copies is not None and self.memory_copies.due(self.global_steps):
            self.memory_copies.keep_step()

    def _update(self, summary: Summary, backwards: int, lr_kwargs: Mapping[str, Any]) -> None:
        model = self.sharded_model
        assert model.optimizer is not None
        self.accumulation.advise(self.mean_over_labels)
        self._refuse_losses(summary)
        unscale = self.accumulation.unscale(summary.weight)
        decision = model.decide(summary, unscale, self.config.gradient_clipping)
        culprits = summary.own.not_finite if summary.own is not None else partial(not_finite, model.units)
        step = UnsettledStep(
            self.history.progress.calls, decision, self.accumulation.is_weighted, self.accumulation.notes, culprits
        )
        batch = self.accumulation.batch
        managed, by_loop = self.config.managed_gradient_accumulation, self.accumulation.given_boundary is not None
        self.history.progress.count(samples_of_step(batch, backwards, managed=managed, ended_by_loop=by_loop))
        if summary.deferred:
            self._apply_update(decision, summary)
            step.take_back.append(model.optimizer.take_back)
            self.history.expect(step)
            if self.lr_scheduler is not None:
                with _errors_told(self.lr_scheduler):
                    step.take_back.append(step_reversibly(self.lr_scheduler, model.optimizer.optimizer, **lr_kwargs))
            return
        if decision.outcome.finite:
            self._apply_update(decision, summary)
        self.history.expect(step)
        if decision.outcome.finite and self.lr_scheduler is not None:
            with _errors_told(self.lr_scheduler):
                self.lr_scheduler.step(**lr_kwargs)
        self.refuse_failed()

    def _apply_update(self, decision: Decision, summary: Summary) -> None:
        with may_change(self.sharded_model), self.sharded_model.half_loaded.updating():
            self.sharded_model.update(decision.coefficient, unused=summary.unused)
            self.sharded_model.publish()

    # -- what a loop may ask -------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer over pieces of this rank's shards. It has the user's parameter groups."""
        self.sharded_model.finish_updates()
        return self.sharded.optimizer if self.sharded is not None else None

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode, or with ``mode=False`` in evaluation mode, and return the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode and return the engine."""
        return self.train(False)

    def compile(self, *, compile_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Apply torch.compile to the forward of every unit but the root. Hooks stay outside the graphs.

        ``options`` are torch.compile's; ``compile_kwargs``, as in DeepSpeed, are more of them.
        """
        options |= compile_kwargs or {}
        show_compilation()
        for unit in self.units[1:]:
            for module in unit.modules:
                module.forward = compiled(module.forward, **options)  # type: ignore[method-assign]
        if len(self.units) == 1:
            warn_once("engine.compile(): the model has no repeated blocks, so nothing is compiled.")

    @property
    def is_compiled(self) -> bool:
        """True after ``compile`` of a model with repeated blocks."""
        forwards = (module.forward for unit in self.units[1:] for module in unit.modules)
        return any(hasattr(innermost(forward), "_torchdynamo_orig_callable") for forward in forwards)

    def destroy(self, *, exact: bool = False) -> None:
        """Give back an ordinary module with full weights, and free everything else. All ranks must call it.

        The weights have the dtype that the model computes in; with ``exact``, those that have fp32 masters become fp32, and
        have the masters' values.
        """
        try:
            self.refuse_failed(to_load=False)  # that has been told, and a new engine is its remedy
        finally:
            self.give_back(exact=exact)

    def give_back(self, *, exact: bool = False, as_given: bool = False) -> None:
        """Do what ``destroy`` does, whatever became of the last step. ``as_given``: weights get the dtype they came in."""
        self.end_saving()
        self._end_trace()
        topology = self.topology if self._owns_topology else None
        give_back(self.sharded_model, topology, self._let_go, exact=exact, as_given=as_given)
        self.forget_saved()

    def _let_go(self) -> None:
        """Remove the hooks and close the links to host memory and disks. Other ranks are not needed for it."""
        self._border.close()
        if self.sharded is not None:
            self.sharded.settle_by(lambda: None)
        let_go(self.sharded_model, self.observer, self.communication_report())

    # -- as in DeepSpeed -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Allow ``engine, optimizer, dataloader, lr_scheduler = zerorun.initialize(...)``."""
        return iter((self, self.optimizer, self.dataloader, self.lr_scheduler))

    def __getattr__(self, name: str) -> Any:
        """Look up on the module what the engine lacks."""
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(module, name)
        except AttributeError as error:
            if error.obj is not module or error.name != name:
                raise  # of something that the model's own attribute needs
            message = f"neither zerorun's engine nor the model, a {type(module).__name__}, has an attribute {name!r}"
            raise AttributeError(message, name=name, obj=self) from None


def give_back(
    model: ShardedModel,
    topology: Topology | None,
    let_go: Callable[[], None],
    *,
    exact: bool = False,
    as_given: bool = False,
) -> None:
    """Let the module of ``model`` be an ordinary one with full weights, see ``restore_module``. All ranks must call it.

    ``let_go`` releases what other ranks are not needed for. ``topology``: whose process groups are closed, if there are any
    that initialize() made.
    """
    model.finish_reductions()
    try:
        restore_module(model, exact=exact, as_given=as_given)
        model.parts.undo()
    finally:  # memory, hooks and files must be released even if an update failed
        let_go()
    model.close()
    if topology is not None:
        topology.close()


def let_go(model: ShardedModel, observer: RunObserver | None, report: dict[str, dict[str, int]]) -> None:
    """Remove the hooks of ``model``, and close its links to host memory and disks, and what tells of it."""
    model.runtime.remove_hooks()
    for link in links_of(model.units):
        link.close()
    if observer is not None:
        observer.close(model.comm, report)


class OwningEngine:
    """The engine of a model, and what closes with it, so that the module can be given back when the engine is gone.

    Nothing that the module's hooks keep may keep the engine: this alone tells whether somebody still has it.
    """

    def __init__(self, engine: Engine, topology: Topology | None) -> None:
        """``topology``: that initialize() made for the engine."""
        self._engine, self._topology = weakref.ref(engine), topology
        self._observer, self._saves = engine.observer, engine.automatic_saves

    def is_gone(self) -> bool:
        return self._engine() is None

    def has_trained(self) -> bool:
        engine = self._engine()
        return engine is None or engine.sharded is not None

    def give_back(self, model: ShardedModel) -> None:
        engine = self._engine()
        if engine is not None:
            engine.give_back(exact=True, as_given=True)
            return
        if self._saves is not None:
            self._saves.unwatch()
        give_back(model, self._topology, partial(let_go, model, self._observer, {}), exact=True, as_given=True)


def _settling(engine: Engine) -> Callable[[], None]:
    """Return ``engine.settle`` for its optimizer, which scripts may keep longer: it does nothing without the engine."""
    found = weakref.ref(engine)

    def settle() -> None:
        if (alive := found()) is not None:
            alive.settle()

    return settle


@contextmanager
def _errors_told(schedule: Any) -> Iterator[None]:
    """Tell what an error means that ``schedule`` raises in the block, its step, which comes after the update.

    Raises StepError for the schedules of torch and zerorun. That of a script may mean something to it, and gets a note.
    """
    try:
        yield
    except Exception as error:
        told = (
            f"the learning-rate schedule {type(schedule).__name__} failed after the weights were updated, with "
            f"{type(error).__name__}: {error}. This step counts, and the optimizer keeps the rates that it has. Remedy: "
            "correct the schedule, or what it was told, such as its number of steps. To go on here with these rates, set "
            "engine.lr_scheduler = None, and go on with the next batch."
        )
        if type(schedule).__module__.startswith(("torch.", "zerorun.")):
            raise StepError(told) from error
        _add_note(error, told)
        raise


def _name_buffers(error: RuntimeError, module: nn.Module, dtype: torch.dtype) -> None:
    """Add to an error over dtypes which buffers may be the cause: what one is added to gets its dtype.

    They are the tables, and what the layer has in which the error was raised, such as running means.
    """
    inside = {id(buffer) for buffer in _where_it_was_raised(error, module).buffers(recurse=False)}
    found = [
        f"{name!r} ({buffer.dtype})"
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != dtype and (buffer.dim() > 1 or id(buffer) in inside)
    ]
    if not found:
        return
    note = (
        f"These buffers keep their own dtype, while parameters are in {dtype}: {listed(found, 3)}. What one of them is "
        'added to or multiplied with has its dtype. Remedy: cast them where the model uses them, or "data_types": '
        f'{{"buffer_dtype": "{_NAMES[dtype]}"}} in the configuration, which casts all.'
    )
    _add_note(error, note)


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # before Python 3.11
        logger.warning(note)


def _where_it_was_raised(error: BaseException, module: nn.Module) -> nn.Module:
    """The innermost module in whose call ``error`` was raised; ``module`` if that is not known."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    called = [found for frame in frames if isinstance(found := frame.f_locals.get("self"), nn.Module)]
    return called[-1] if called else module


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
