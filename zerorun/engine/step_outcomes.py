"""The outcome of steps: how far training is, whether a step was applied or skipped, and why training cannot go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from ..config.parse import Config
from ..distributed.topology import Topology
from ..errors import LossScaleError, NonFiniteError, StepError, ZerorunError
from ..log import is_rank_zero, listed, logger, warn_once
from ..monitors.device_sample import DeviceSample
from ..monitors.monitor import Monitor
from ..monitors.observer import RunObserver, StepRecord
from ..monitors.step_trace import StepTrace
from ..optim.loss_scaler import LossScaler
from ..pipeline.schedule.actions import Action
from ..plan.replaced_forwards import uncompiled
from ..watch.board import board
from ..zero.norm import Decision, Differing, Outcome, StageState, Summary, Told, summand
from ..zero.placeholders import released_parameter
from ..zero.sharded_model import ShardedModel
from ..zero.tied_copies import CopyState, TiedCopy, state_of, unlike_copies
from .accumulation import UNUSABLE_WEIGHT, Notes, is_in_a_step, refuse_no_weight, warn_of_kept
from .batches import Batches
from .reports import LoopQueries, Reports

# Relative differences between losses that ranks compute from the same activations: the most that sums in another order
# make, and that from which on the step is refused.
_ALIKE, _APART = 1e-6, 1e-4
_MOST_NAMED = 3
_ROUNDING = 1e-5  # of rates that ranks compute by themselves, relative
COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")  # that a checkpoint stores
# Training ends after so many steps in a row without finite gradients: in bf16, where no loss scale can mend it, and in fp16
# with a static loss scale, which an overflow leaves as it is.
SKIPS_IN_A_ROW, SKIPS_WITH_STATIC_SCALE = 3, 10
# In fp16, the first SKIPS_TOLD skipped steps in a row are logged one by one; after that, one in SKIPS_BETWEEN is.
SKIPS_TOLD, SKIPS_BETWEEN = 10, 100


@dataclass
class Progress:
    """The counts of a run. ``global_steps``: steps at an accumulation boundary, including skipped ones.

    ``samples``: those of all these steps, over all ranks; ``last_samples``: of the last of them.
    ``grad_norm``: that of the last step that was applied; None before the first.
    """

    global_steps: int = 0
    samples: int = 0
    last_samples: int = 0
    skipped_steps: int = 0
    skips_in_a_row: int = 0
    grad_norm: float | None = None
    calls: int = 0  # of step()
    applied_in: int = 0  # the number of the last call that changed the weights

    @property
    def applied(self) -> bool:
        """True if the last step() changed the weights."""
        return 0 < self.applied_in == self.calls

    def begin(self) -> None:
        """Note that a step() has begun."""
        self.calls += 1

    def count(self, samples: int) -> None:
        """Count a step at an accumulation boundary with so many samples."""
        self.global_steps += 1
        self.samples += samples
        self.last_samples = samples

    def uncount(self) -> None:
        """The last step that was counted was none."""
        self.global_steps -= 1
        self.samples -= self.last_samples

    def go_on_from(self, global_steps: int, skipped_steps: int, samples: int) -> None:
        """Continue from other counts, such as those of an earlier run. A row of skipped steps ends with it."""
        self.global_steps, self.skipped_steps, self.samples = global_steps, skipped_steps, samples
        self.skips_in_a_row = 0

    def skip(self) -> None:
        """Count a step that was not applied."""
        self.skipped_steps += 1
        self.skips_in_a_row += 1

    def apply(self, grad_norm: float, call: int) -> None:
        """Note that the step in call number ``call`` was applied, with the norm of its gradient."""
        self.grad_norm, self.applied_in, self.skips_in_a_row = grad_norm, call, 0


@dataclass(frozen=True)
class UnsettledStep:
    """A step whose outcome the program may not know yet.

    ``call``: the number of the step() call. ``not_finite`` gives the names of this rank's parameters whose gradient is not.
    ``take_back``: if the program went on as if the step had been applied, undo what was then in vain.
    """

    call: int
    decision: Decision
    is_weighted: bool
    notes: Notes
    not_finite: Callable[[], list[str]]
    take_back: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class History:
    """What came of the steps so far: counts and loss scale, up to the last step of which the program knows the outcome."""

    scaler: LossScaler
    progress: Progress = field(default_factory=Progress)
    unsettled: UnsettledStep | None = None  # the step after that
    failure: Callable[[], None] | None = None  # raises the error of a step that failed, on all ranks
    advised: set[str] = field(default_factory=set)  # what all ranks have been warned of

    def expect(self, step: UnsettledStep) -> None:
        """The outcome of this step is to be read later."""
        self.unsettled = step

    def settled(self) -> None:
        """The outcome of the last step is known."""
        self.unsettled = None

    def fail(self, failure: Callable[[], None] | None) -> None:
        """Remember an error to be raised by all ranks, or forget it."""
        self.failure = failure


class Counters(Batches):
    """The counts of an engine, as training loops read and set them."""

    history: History
    progress: Progress

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, including skipped ones."""
        return self.history.progress.global_steps

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.progress.go_on_from(count, self.skipped_steps, count * self.train_batch_size())

    @property
    def global_samples(self) -> int:
        """Samples of all optimizer steps so far, over all ranks."""
        return self.history.progress.samples

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that left the weights as they were, because gradients were not finite."""
        return self.progress.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.progress.go_on_from(self.global_steps, count, self.global_samples)

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        each = self.gradient_accumulation_steps()
        self.accumulation.go_on_from(count, begun_at=count - count % each)

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the averaged, unclipped gradient of the last step that was applied; the same on all ranks.

        A skipped step does not change it. It is None before the first applied step.
        """
        return self.progress.grad_norm

    def was_step_applied(self) -> bool:
        """True if the last step() changed the weights."""
        return self.progress.applied

    def counters(self) -> dict[str, int]:
        """The counts that a checkpoint stores: of micro-batches, those of steps that are over."""
        return {name: getattr(self, name) for name in COUNTERS} | {"micro_steps": self.accumulation.begun_at}

    def set_counters(self, counters: dict[str, int]) -> None:
        """Continue from ``counters``, where a step begins: earlier ones may have had other numbers of micro-batches."""
        found = self.counters() | counters
        samples = counters.get("global_samples", found["global_steps"] * self.train_batch_size())
        self.progress.go_on_from(found["global_steps"], found["skipped_steps"], samples)
        self.accumulation.go_on_from(found["micro_steps"], begun_at=found["micro_steps"])


# -- what makes a step wrong before it is one: all ranks must know, so that none takes it alone ---------------------


def _tell_of_parts(topology: Topology, step: int, *, far: bool) -> None:
    """Raise StepError if ranks that should have had the same loss had others; warn if they were nearly the same."""
    what = "layers" if topology.context == 1 else "sequences"
    parts = (
        f"a loss may not read {what} that they divide, as a penalty on weights does, nor what lies between them: each "
        "rank has a part (`zerorun verify` shows where)"
    )
    if not far:
        warn_once(f"ranks that divide the same {what} had losses that are apart by more than rounding. Remedy: {parts}.")
        return
    raise StepError(
        f"ranks that divide the same {what} had different losses or random numbers at step {step}"
        ": they saw different data, drew different random numbers, or their loss looks at what they divide. Weights "
        "are those before this step. Remedy: choose data by engine.topology.data_parallel_rank, not by the rank of the "
        "world, and seed all ranks of a group alike. What one of them does alone must draw from a generator of its "
        f"own, as DataLoader(generator=...) does. And {parts}."
    )


def is_refused(model: ShardedModel) -> bool:
    """Whether this rank refuses the step."""
    try:
        refuse_changes(model)
    except ZerorunError:
        return True
    return False


def refuse_changes(model: ShardedModel) -> None:
    """Raise StepError for what a script has changed in the model and must not, or if an update or a load broke off."""
    assert model.optimizer is not None
    model.half_loaded.refuse()
    model.runtime.guard.refuse_edits()
    model.runtime.guard.refuse_thawed()
    model.runtime.guard.added.refuse_trained()
    model.optimizer.refuse_changed_needs()


def stage_state(model: ShardedModel, history: History) -> StageState:
    """What the ranks of a pipeline stage must have alike in this step, without what they were warned of already.

    It finds the writes since the last step: to be called once for each.
    """
    assert model.optimizer is not None
    guard, rates = model.runtime.guard, tuple(f"{value:.5g}" for _, value in model.optimizer.rates())
    found = StageState(rates, guard.take_writes(), len(guard.frozen_since()))
    if "writes" in history.advised:
        found = found._replace(writes=0)
    return found._replace(frozen=0) if "frozen" in history.advised else found


def told_alike(model: ShardedModel, history: History, stage: StageState) -> int:
    """What this rank adds to a sum that is 0 if a script treats all ranks of a pipeline stage alike, and all tied copies.

    ``stage``: that of this step, which must have been found before.
    """
    topology = model.comm.topology
    ranks = topology.world_size // topology.pipe  # of a stage, one after the other
    number, place = divmod(topology.rank, ranks)
    told = summand((number, stage), first=place == 0, count=ranks)
    for copy, state in _copies_now(model, history):
        told += summand((copy.name, state), first=copy.stage == copy.stages[0], count=len(copy.stages))
    return told


def _copies_now(model: ShardedModel, history: History) -> Iterator[tuple[TiedCopy, CopyState]]:
    assert model.optimizer is not None
    written, groups = model.runtime.guard.written, model.optimizer.optimizer.param_groups
    for copy in model.parts.tied:
        state = state_of(copy, groups, is_written=id(copy.param) in written)
        yield copy, state._replace(hooks=0) if "hooks" in history.advised else state


def refuse_unlike(model: ShardedModel, history: History, stage: StageState) -> None:
    """Raise StepError, on all ranks alike, for what a script has not done alike; warn once where training can go on.

    All ranks must call it, if ``told_alike`` of all is not 0.
    """
    assert model.optimizer is not None
    mine = _StageOfRank(model.comm.topology.pipe_rank, list(model.optimizer.rates()), stage, _names_of(model))
    found = model.comm.control.values(mine)
    for pipe_rank in range(model.comm.topology.pipe):
        ranks = {rank: of_rank for rank, of_rank in enumerate(found) if of_rank.pipe_rank == pipe_rank}
        _refuse_rates({rank: of_rank.rates for rank, of_rank in ranks.items()})
        _advise_unlike(ranks, history)
    _refuse_unlike_copies(model, history)


class _StageOfRank(NamedTuple):
    """What a rank tells of its stage. ``rates``: by key. ``names``: of parameters written to, and of frozen ones."""

    pipe_rank: int
    rates: list[tuple[str, float]]
    state: StageState
    names: tuple[list[str], list[str]]


def _names_of(model: ShardedModel) -> tuple[list[str], list[str]]:
    guard = model.runtime.guard
    return list(map(repr, guard.written.values()))[:_MOST_NAMED], list(map(repr, guard.frozen_since()))[:_MOST_NAMED]


def _refuse_rates(rates: Mapping[int, list[tuple[str, float]]]) -> None:
    """Raise StepError if these ranks, which are those of a stage, have different ones."""
    (first, usual), *others = rates.items()
    for rank, own in others:
        apart = [key for (key, ours), (_, theirs) in zip(own, usual, strict=False) if not _are_close(ours, theirs)]
        if apart or len(own) != len(usual):
            key = apart[0] if apart else "lr"
            theirs, ours = ([value for name, value in found if name == key] for found in (own, usual))
            raise StepError(
                f"the optimizer of rank {rank} has {theirs} as {key!r} of its groups, and that of rank {first} {ours}. "
                "Weights are as before the step. Remedy: give all ranks the same rates, settings and schedule, and one "
                "that watches a metric its mean over all ranks. A schedule made from the length of the data, as Trainer's, "
                "differs where ranks have different numbers of batches: give all of them the same number."
            )


def _are_close(rate: float, other: float) -> bool:
    return math.isclose(rate, other, rel_tol=_ROUNDING)


def _advise_unlike(ranks: Mapping[int, _StageOfRank], history: History) -> None:
    """Warn, once, if these ranks, which are those of a stage, have other numbers of writes or frozen parameters."""
    most, least, found = _extremes({rank: of_rank.state.writes for rank, of_rank in ranks.items()})
    if found[most] != found[least]:
        history.advised.add("writes")
        warn_once(
            f"rank {most} has written in place to parameters {found[most]} times since the last step, and rank {least} "
            f"{found[least]} times ({', '.join(ranks[most].names[0])}). From here on ranks have different weights at stage "
            "0; at the others, each part of them is that of the rank which keeps it. Remedy: write the same on all ranks, "
            "or in a block of zerorun.zero.GatheredParameters(params, modifier_rank=...), which gives all ranks the values "
            "of one."
        )
    most, least, found = _extremes({rank: of_rank.state.frozen for rank, of_rank in ranks.items()})
    if found[most] != found[least]:
        history.advised.add("frozen")
        warn_once(
            f"rank {most} has frozen {found[most]} parameters that others train ({', '.join(ranks[most].names[1])}), and "
            f"rank {least} {found[least]}. They are trained on all ranks, as if the data of rank {most} gave them no "
            "gradient. Remedy: call requires_grad_() alike on all ranks."
        )


def _refuse_unlike_copies(model: ShardedModel, history: History) -> None:
    """Raise StepError for a tied parameter whose copies the script has treated in different ways; warn once of hooks."""
    mine = [(copy.name, copy.local, copy.stage, state) for copy, state in _copies_now(model, history)]
    unlike = unlike_copies(model.comm.control.values(mine))
    for name, found, _ in (entry for entry in unlike if not entry.only_hooks):
        raise StepError(
            f"{name!r} is one parameter of several pipeline stages, and the script has treated its copies in different "
            f"ways: {found}. They do not stay equal by that. This step was not taken. Remedy: do the same on every stage "
            "that has it, under the name that it has there. Where a layer writes to it in its forward, as nn.Embedding "
            "with max_norm, train with one stage."
        )
    for name, found, _ in unlike:
        history.advised.add("hooks")
        warn_once(
            f"{name!r} is one parameter of several pipeline stages, and its copies have different hooks: {found}. A hook "
            "gets the gradient of its own stage alone, before those of other stages are added. Remedy: register it on "
            "every stage that has the parameter, under the name that it has there, if it changes gradients."
        )


def refuse_differing(differing: Differing) -> None:
    """Raise StepError, on all ranks alike, if ranks divide gradients by different numbers."""
    if differing.divisor:
        raise StepError(
            "ranks divide the gradients of this step by different numbers: backward() was called with weight=... or "
            "scale_wrt_gas=False on some, and without on others, or micro-batches are counted otherwise. Weights are those "
            "before this step. Remedy: do the same on all ranks; where nothing counts, pass weight=0."
        )


def advise_losses(model: ShardedModel, history: History, told: Told, differing: Differing) -> None:
    """Warn, once, if ranks have ``told`` of other numbers of losses."""
    assert told.alike is not None
    if differing.losses and "losses" not in history.advised:
        history.advised.add("losses")
        numbers = enumerate(model.comm.control.values(told.alike.losses))
        most, least, found = _extremes({rank: number for rank, number in numbers if number is not None})
        warn_once(
            f"rank {most} has called backward() {found[most]} times for this step, and rank {least} {found[least]} times. "
            "All losses are divided by the same number, so those of ranks with more count more. Remedy: let each rank call "
            "step() after every micro-batch, also after one that failed; where ranks mean to have different numbers of "
            "them, pass weight=... to backward() on all."
        )


def _extremes(found: Mapping[int, int]) -> tuple[int, int, Mapping[int, int]]:
    """(the rank with the largest of these numbers, the one with the smallest, all of them)."""
    return max(found, key=found.__getitem__), min(found, key=found.__getitem__), found


def advise_own_data(ranks: int) -> None:
    """Warn that all data-parallel ranks have read the same first micro-batch."""
    warn_once(
        f"all {ranks} data-parallel ranks were given the same data for their first micro-batch. If they are in all others, "
        "they do the work of one. Remedy: let each read its own part, by initialize(training_data=...), whose loader "
        "divides data, by torch.utils.data.DistributedSampler, or by engine.topology.data_parallel_rank."
    )


class Outcomes(Reports, Counters, LoopQueries):
    """The part of an engine that tells the outcome of a step."""

    observer: RunObserver | None

    _trace: StepTrace | None
    _sample: DeviceSample | None

    def _end_step(self, *, over: bool) -> None:
        """Tell of a micro-batch; with ``over``, of a step."""
        board.end_batch(self.global_steps, self.micro_steps, over=over)
        if over and self._trace is not None and self._trace.end_step(self._actions):
            self._trace = None
        if over and self._sample is not None:
            self._sample.end_step()

    @property
    def _actions(self) -> Sequence[tuple[Action, Any, Any]]:
        """What a pipeline stage computed in the last step, and when."""
        return ()

    @property
    def monitor(self) -> Monitor:
        """Where the configuration's monitors write: ``write_events([(name, value, samples), ...])`` adds values.

        All ranks may call it; rank 0 writes. Without a monitor in the configuration it does nothing.
        """
        return self.observer.monitor if self.observer is not None else Monitor(())

    @property
    def progress(self) -> Progress:  # type: ignore[override]
        """The counts of the run, with the outcome of the last step."""
        self.settle()
        return self.history.progress

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler, with the outcome of the last step."""
        self.settle()
        return self.history.scaler

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied, where gradients are in fp16; 1.0 elsewhere."""
        return self.scaler.scale if self.history.scaler.dynamic else self.history.scaler.scale

    @uncompiled
    def zero_grad(self, *, counted: bool = False) -> None:
        """Drop the gradients of backwards that no step() has followed; step() itself drops those that it has used.

        Where step() has counted micro-batches of an accumulation, all their gradients are kept, with a warning: loops for
        DeepSpeed, which keeps them, too, call this before each micro-batch. ``counted``: drop these as well, and begin a
        new step. All ranks must call it.
        """
        found = self.accumulation
        if found.micro_steps > found.begun_at and not counted:
            warn_of_kept("zero_grad() after step()", found.backwards)
            return
        self.sharded_model.finish_reductions()
        self._forget_gradients()

    def verify(self, batch: Any, loss: Callable[[Any, Any], torch.Tensor] | None = None) -> str:
        """Compare one forward and backward of ``batch`` with a whole copy of the model in one process; see docs/verify.md.

        ``batch``: this rank's micro-batch. ``loss``: called as loss(model, batch); by default the model gives it. All ranks
        must call it, after a step. Weights, states and random numbers stay as they are. Returns a line that tells how many
        values are equal. Raises StepError, on all ranks alike, with the first value that differs, and in a step that has
        begun, which goes on.
        """
        from ..verify.in_loop import refuse_to_verify, verify_batch  # nobody pays for it who does not verify

        refuse_to_verify(self, in_a_step=is_in_a_step(self.accumulation))
        try:
            return verify_batch(self, batch, loss)
        finally:
            self._forget_gradients()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce what was accumulated so far. ``step`` does it by itself, so that nobody needs it. All ranks must call it.

        ``bucket_size`` has no effect.
        """
        self.sharded_model.reduce_accumulated()

    def _forget_gradients(self) -> None:
        loads = self.sharded_model.parts.loads
        if loads is not None:
            loads.end_step()
        self.sharded_model.forget_gradients()
        self.accumulation.begin(partial(_looks_for_culprits, self.history, self.config))  # which the module's hooks keep

    # -- the outcome of a step -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Learn what has come of the last step, if that is not known yet. Waits for the device, and for no other rank."""
        step = self.history.unsettled
        if step is None:
            return
        optimizer = self.sharded_model.optimizer
        assert optimizer is not None
        outcome, progress = step.decision.outcome, self.history.progress
        self.history.settled()
        optimizer.tell_overflow(not outcome.finite)
        if outcome.finite:
            progress.apply(outcome.norm, step.call)
        else:
            for take_back in step.take_back:
                take_back()
            step.notes.read()
            self._skip(step, outcome)
        if self.history.scaler.dynamic and self.history.failure is None:  # a loss that is of no use is no overflow
            self._update_scale(step.notes, overflow=not outcome.finite)
        if self.history.failure is None and self.observer is not None:
            self.observer.observe(self._record(outcome), self.communication_report)

    def refuse_failed(self, *, to_load: bool = True) -> None:
        """Learn what has come of the last step, and raise its error if it failed; ``to_load``: also if a load did.

        All ranks must call it.
        """
        self.settle()
        if to_load:
            self.sharded_model.half_loaded.refuse()
        failure = self.history.failure
        if failure is not None:
            self.history.fail(None)
            self.zero_grad(counted=True)
            failure()

    def _refuse_losses(self, summary: Summary) -> None:
        if summary.bad_losses:
            assert self.sharded is not None
            self.sharded.tell_overflow(True)
            self.accumulation.notes.read()
            self._raise_bad_losses(self.accumulation.notes)
        if summary.apart > _ALIKE:
            _tell_of_parts(self.topology, self.global_steps + 1, far=summary.apart > _APART)

    def _skip(self, step: UnsettledStep, outcome: Outcome) -> None:
        """Skip a step, and remember the error if that does not help.

        A dynamic loss scale may help in fp16. With a static one, and in bf16 with ``check_grad_overflow``, some steps in a
        row may be skipped.
        """
        progress, notes, scaler = self.history.progress, step.notes, self.history.scaler
        if outcome.bad_losses:
            self.history.fail(partial(self._raise_uncounted, partial(self._raise_bad_losses, notes)))
        elif step.is_weighted and outcome.weight <= 0:
            self.history.fail(partial(self._raise_uncounted, partial(refuse_no_weight, outcome.weight)))
        else:
            progress.skip()
            if scaler.dynamic:
                return
            fp16, bf16, most = self.config.fp16, self.config.bf16, _most_skips(self.config)
            why = f"overflow in fp16 with the static loss scale {scaler.scale:g}" if fp16.enabled else "are NaN or infinite"
            may_skip = fp16.enabled or (bf16.enabled and bf16.check_grad_overflow)
            if may_skip and progress.skips_in_a_row < most:
                if is_rank_zero():
                    what = "step %d skipped: gradients %s; %d such steps in a row are an error"
                    logger.warning(what, self.global_steps, why, most)
                return
            if fp16.enabled:
                what = f"gradients {why} in {most} steps in a row: set a smaller fp16.loss_scale, or 0 for a dynamic one."
                self.history.fail(partial(self._raise_no_scale, notes, what))
                return
            self.history.fail(partial(self._raise_not_finite, notes, step.not_finite()))

    def _update_scale(self, notes: Notes, *, overflow: bool) -> None:
        scaler = self.history.scaler
        before = scaler.scale
        try:
            scaler.update(overflow)
        except LossScaleError as error:
            self.history.fail(partial(self._raise_no_scale, notes, str(error)))
            return
        count = self.history.progress.skips_in_a_row
        told = count <= SKIPS_TOLD or count % SKIPS_BETWEEN == 0
        if overflow and told and is_rank_zero():
            what = "step %d skipped (%d in a row): gradients overflow in fp16; loss scale %.10g -> %.10g"
            logger.warning(what, self.global_steps, count, before, scaler.scale)

    # -- errors, which all ranks raise together ------------------------------------------------------------------

    def _raise_uncounted(self, failure: Callable[[], None]) -> None:
        """The step does not count. Until here it does, on all ranks alike, whichever of them knows already."""
        self.history.progress.uncount()
        failure()

    def _refuse_released(self, notes: Notes) -> None:
        """Raise ReleasedParameterError if a loss of this step was computed from a placeholder. Collective."""
        for released in self.comm.control.values(notes.released):
            if released:
                raise released_parameter(*released[0])

    def _raise_bad_losses(self, notes: Notes) -> NoReturn:
        weights = [(rank, *found[0]) for rank, found in enumerate(self.comm.control.values(notes.bad_weights)) if found]
        if weights:
            rank, micro_batch, weight = weights[0]
            raise StepError(f"{UNUSABLE_WEIGHT.format(weight)} It is that of micro-batch {micro_batch} on rank {rank}.")
        self._refuse_released(notes)
        step = self.global_steps + 1  # which does not count
        raise NonFiniteError(self._explain("the loss is NaN or infinite", step, notes.bad_losses))

    def _raise_not_finite(self, notes: Notes, names: Sequence[str]) -> NoReturn:
        self._refuse_released(notes)
        first = self._first_culprit(notes)
        raise NonFiniteError(self._explain("gradients are NaN or infinite", self.global_steps, notes.empty, names, first))

    def _raise_no_scale(self, notes: Notes, what: str) -> NoReturn:
        self._refuse_released(notes)
        where = self._first_culprit(notes) or "none in the gradients of a single rank: the sum over ranks overflows"
        raise LossScaleError(
            f"{what} Non-finite values: {where}. Weights are those before this step and can be saved."
            f"{self._hint_of_placeholders()} Remedy: train in bf16, or lower the learning rate; fp16 rarely works for "
            "weights made in bf16."
        )

    def _first_culprit(self, notes: Notes) -> str:
        """Return, in words, where the first non-finite gradient of this step was; empty if none was seen. Collective."""
        found = sorted(
            (micro, rank, name)
            for rank, culprits in enumerate(self.comm.control.values(notes.culprits))
            for micro, name in culprits
        )
        if not found:
            return ""
        micro, rank, name = found[0]
        return f"first in parameter {name!r} on rank {rank} in micro-batch {micro} of this step"

    def _explain(self, what: str, step: int, micro_batches: list[int], names: Sequence[str] = (), first: str = "") -> str:
        """Return a message that is the same on all ranks. All ranks must call it.

        It names the first rank that had a bad loss, or the parameters concerned, if known. ``micro_batches``: those with a
        bad loss, or where there are ``names`` of parameters, those of weight 0 whose loss is not finite. ``first``: what
        ``_first_culprit`` returned.
        """
        answers = self.comm.control.values((micro_batches, names))
        seen = [(rank, found[0]) for rank, (found, _) in enumerate(answers) if found]
        bad = list(dict.fromkeys(name for _, found in answers for name in found))
        where = (f" in {listed(list(map(repr, bad)), 3)}" if bad else "") + (f", {first}" if first else "")
        hint = ""
        if seen and bad:
            hint = (
                f" Rank {seen[0][0]} gave micro-batch {seen[0][1]} a weight of 0 and a loss that is not finite: divide by "
                "mask.sum().clamp(min=1), so that a mean of nothing has a gradient of 0."
            )
        elif seen:
            where = f", first on rank {seen[0][0]} in micro-batch {seen[0][1]} of this step"
        return (
            f"{what} at step {step}{where}. Weights are those before this step."
            f"{hint}{self._hint_of_placeholders()} Remedy: look at the data of this step, lower the learning rate, or clip "
            "gradients."
        )

    def _hint_of_placeholders(self) -> str:
        if self.plan.overlap_param_gather:
            return " With overlap_param_gather, a parameter used before its module's forward reads as NaN, too."
        return (
            " A stage-3 parameter used outside its module's forward reads as NaN, too." if self.plan.shares_params else ""
        )

    def _record(self, outcome: Outcome) -> StepRecord:
        """What is known of the last step."""
        norm = outcome.norm if outcome.finite else None
        scale = self.history.scaler.scale if self.config.scales_loss else None
        own = self.history.progress.last_samples, self.train_micro_batch_size_per_gpu()
        counts = self.global_steps, self.global_samples, self.skipped_steps, *own
        return StepRecord(*counts, outcome.loss, norm, self.get_lr(), scale)


def _looks_for_culprits(history: History, config: Config) -> bool:
    """Looking at gradients means waiting for the device, so only the last step is looked at that may be skipped.

    Where no step may be, as in fp32, each would have to be.
    """
    scaler, unknown = history.scaler, history.unsettled is not None
    if scaler.dynamic:
        return scaler.at_minimum
    return history.progress.skips_in_a_row + unknown >= _most_skips(config) - 1


def _most_skips(config: Config) -> int:
    """So many skipped steps in a row are an error, where no scale changes with them."""
    return SKIPS_WITH_STATIC_SCALE if config.fp16.enabled else SKIPS_IN_A_ROW
