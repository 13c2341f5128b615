"""PipelineEngine: the engine of a model cut into pipeline stages. It takes whole batches; the schedule orders the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

from ..data import EpochLoader, RepeatingLoader
from ..distributed.device import CPU, Clock, on_device, synchronize
from ..distributed.same_data import agree, all_alike, checksum, inputs_and_labels, is_cheap, summands
from ..distributed.transport.connect import connect_links
from ..distributed.transport.control import Control
from ..distributed.transport.gloo import Gloo
from ..errors import PipelineError
from ..log import logger, ranks_in_words
from ..monitors.breakdown import EVALUATION
from ..optim.nested_containers import cast_floats
from ..pipeline.executor import Executor, Timed, units_of_chunks
from ..pipeline.p2p import PointToPoint, links_of
from ..pipeline.pipelined import Pipelined, evaluating
from ..pipeline.schedule.actions import FORWARD_ONLY, ActionKind, PipelineSchedule
from ..pipeline.schedule.schedules import ZERO_BUBBLE, make_schedule
from ..pipeline.schedule.times import Times
from ..pipeline.schedule.trace import Trace, write_trace
from ..pipeline.split_backward import SplitLayers, WeightGradients
from ..plan.replaced_forwards import uncompiled
from ..watch.board import Phase, board, during
from .engine import COMPARED_STEPS, Engine
from .step_outcomes import advise_own_data

_WARM_UP_BATCHES = 2  # the times of the last of these are what the zero-bubble schedule is made from


class PipelineEngine(Engine):
    """One pipeline stage of a model in training. ``zerorun.initialize`` makes it.

    ``train_batch`` and ``eval_batch`` take the place of forward, backward and step, which raise PipelineError. Only the
    first and the last stage read data, and both must read the same micro-batches.
    """

    module: Pipelined
    mean_over_labels = (
        'give each micro-batch "num_items_in_batch", the mean of (labels != -100).sum() over all micro-batches and '
        "data-parallel ranks of the step, or equally many labels"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        section, topology = self.config.pipeline, self.topology
        if self.sharded is not None:
            self.module.train()  # pretrained layers come in evaluation mode. From here on, what a script sets is wanted
        self._later = WeightGradients()
        if section.schedule == ZERO_BUBBLE:
            self.runtime.keep([SplitLayers(self.module, self._later)])
        p2p = None
        if topology.pipe > 1:
            group, place = topology.group("pipe"), (topology.pipe_rank, topology.pipe)
            transport = Gloo("pipe", group, *place, torch.device(CPU), self.comm.statistics)
            links = connect_links(
                "pipe", links_of(topology.pipe, self.module.chunks), topology, self.device, self.comm.statistics
            )
            p2p = PointToPoint(transport, self.comm.control.finish_message, self.device, links)
        self._executor = Executor(
            self.module,
            self.runtime,
            p2p,
            units_of_chunks(self.module, self.units),
            self._later,
            self._root_of,
            self._begin,
            self.accumulation.tell_last,
            self._around_forward,
            Clock(self.device),
        )
        self._batch_fn: Callable[[Any], Any] | None = None
        self._given: Iterator[Any] | None = None  # by set_dataiterator()
        self._repeated: tuple[int, RepeatingLoader] | None = None  # (loads that had moved the loader, over the loader)
        self._schedules: dict[int, PipelineSchedule] = {}  # by number of micro-batches
        self._times: Times | None = None
        self._batches = 0

    # -- training ------------------------------------------------------------------------------------------------

    @uncompiled
    @during(Phase.PIPELINE)
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on ``gradient_accumulation_steps`` micro-batches and update the weights. All ranks must call it.

        The stage is put into training mode if it is not in it. Parts that are in evaluation mode in one that is stay so.
        Returns the mean loss over micro-batches and data-parallel ranks, a scalar, on all stages. Micro-batches
        come from ``data_iter``, or else from the training data given to initialize(), which is repeated without end. Raises
        StopIteration on all ranks if the data of any rank ends, and the errors that ``Engine.step`` raises.
        """
        if not self.units:
            raise PipelineError("the engine was destroyed. Remedy: call initialize() again.")
        if self.sharded is None:
            raise PipelineError("train_batch() needs an optimizer. Remedy: configure an 'optimizer' section.")
        count = self.gradient_accumulation_steps()
        if self.history.scaler.dynamic:
            self.settle()  # on all stages alike: whether a step overflowed at the smallest scale decides what is looked at
        if not self.module.training:  # else parts that are to stay in evaluation mode do
            self.module.train()
        batches = self._take(data_iter, count)
        for batch in batches:  # on the first stage, too: rank 0 is there, which alone writes what is advised
            if isinstance(batch, Mapping):
                self.accumulation.look_at(batch)
        schedule = self._schedule(count)
        self._executor.run(schedule, batches)
        self.accumulation.count_batch(count)
        loss = self._mean(self._executor.losses, count)
        board.enter(Phase.UPDATE)
        self._step_now()
        self._end_step(over=True)
        if board.agreed_trace:
            self._trace_as_agreed()
        if schedule.kind == ZERO_BUBBLE and self._times is None:
            self._measure()
        return loss

    @uncompiled
    @during(Phase.PIPELINE)
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of micro-batches of ``data_iter``, without gradients. All ranks must call it.

        ``return_logits``: return (loss, list of the last part's outputs); the list is empty on all but the last stage.
        ``reduce_output`` None: return the losses of this rank's micro-batches instead of the mean. ``bcast_loss`` False:
        all stages but the last get None. Raises PipelineError for another ``reduce_output`` than these.
        """
        if reduce_output is not None and reduce_output.lower() != "avg":
            raise PipelineError(f"eval_batch(reduce_output={reduce_output!r}). Remedy: 'avg', or None for each loss.")
        count = num_micro_batches or self._evaluated
        watch = self.comm.statistics.watch
        with evaluating(self.module), torch.no_grad(), nullcontext() if watch is None else watch.during(EVALUATION):
            batches = self._take(data_iter, count)
            schedule = make_schedule(FORWARD_ONLY, self.topology.pipe, count, chunks=self.module.chunks)
            self._executor.run(schedule, batches, needs_loss=compute_loss)
            result: Any = None
            if compute_loss:
                losses = self._executor.losses
                result = losses if reduce_output is None else self._mean(losses, count)
                if not bcast_loss and not self.is_last_stage():
                    result = None
        return (result, self._executor.outputs) if return_logits else result

    @property
    def _evaluated(self) -> int:
        """How many micro-batches ``eval_batch`` takes if it is not told."""
        return self.gradient_accumulation_steps()

    @property
    def _actions(self) -> Sequence[Timed]:
        return self._executor.timed

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Apply ``fn`` to each micro-batch that is read."""
        self._batch_fn = fn

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator from which ``train_batch`` without an argument takes its data."""
        self._given = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Let ``train_batch`` without an argument take its data from this loader, which is repeated without end."""
        super().set_dataloader(loader)
        self._given = self._repeated = None

    def is_first_stage(self) -> bool:
        return self.topology.pipe_rank == 0

    def is_last_stage(self) -> bool:
        return self.topology.pipe_rank == self.topology.pipe - 1

    def __call__(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(_WHOLE_BATCHES.format("forward"))

    forward = __call__

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(_WHOLE_BATCHES.format("backward"))

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> NoReturn:
        raise PipelineError(_WHOLE_BATCHES.format("step"))

    def destroy(self, *, exact: bool = False) -> None:
        if not self._executor.is_stuck:
            super().destroy(exact=exact)
            return
        # Other stages may wait for a message from this one and never join a collective, so that destroy() would hang. The
        # error must be seen instead, and the process must end.
        logger.error("a batch failed on its way through the pipeline: the module keeps its part of the weights as it is")
        self._let_go()

    # -- schedules -----------------------------------------------------------------------------------------------

    def _schedule(self, count: int) -> PipelineSchedule:
        if count not in self._schedules:
            kind, chunks = self.config.pipeline.schedule, self.module.chunks
            self._schedules[count] = make_schedule(kind, self.topology.pipe, count, chunks=chunks, times=self._times)
        return self._schedules[count]

    def _measure(self) -> None:
        """After the warm-up batches, gather the times of all stages, so that the next schedule is made from them."""
        self._batches += 1
        if self._batches < _WARM_UP_BATCHES:
            return
        synchronize(self.device)  # this once
        spans = self._executor.spans()
        kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        mine = [median([s.end - s.start for s in spans if s.action.kind is kind] or [0.0]) for kind in kinds]
        found = self.comm.control.values((self.topology.pipe_rank, mine))
        stages = [[times for stage, times in found if stage == wanted] for wanted in range(self.topology.pipe)]
        columns = [[median(times[k] for times in stage) for stage in stages] for k in range(len(kinds))]
        self._times = Times.make(self.topology.pipe, *columns)
        self._schedules.clear()

    def record(self, path: str | Path, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Call ``train_batch`` and write when each stage did what to ``path``, for ``zerorun-schedule --measured``.

        The file describes the pipeline that rank 0 is in. All ranks must call it.
        """
        synchronize(self.device)
        self.comm.control.barrier()
        zero = self._executor.clock.now()  # about the same moment on all ranks, whose clocks may differ
        loss = self.train_batch(data_iter)
        synchronize(self.device)
        found = self.comm.control.values(tuple(self._executor.spans(zero)))
        if self.topology.rank == 0:
            rows = tuple(found[rank] for rank in self.topology.ranks_along("pipe", 0))
            count, section = self.gradient_accumulation_steps(), self.config.pipeline
            write_trace(path, Trace(section.schedule, self.topology.pipe, count, self.module.chunks, rows))
        return loss

    # -- data and losses -----------------------------------------------------------------------------------------

    def _take(self, given: Iterator[Any] | None, count: int) -> list[Any]:
        """Return ``count`` micro-batches; each is None if this rank reads no data.

        Raises, on all ranks alike, StopIteration if any rank has too few, and PipelineError if a rank has no data or if
        ranks that must read the same data read different data.
        """
        self._executor.refuse_stuck()
        found: list[Any] = [None] * count
        ended, lacks, failure = False, "", None
        if self.is_first_stage() or self.is_last_stage():
            source = given if given is not None else self._own_data()
            if not isinstance(source, Iterator):
                lacks = "nothing" if source is None else f"a {type(source).__name__}, which is no iterator"
            try:
                board.enter(Phase.DATA)
                found = [next(source) for _ in range(count)] if isinstance(source, Iterator) else found
            except StopIteration:
                ended = not isinstance(source, RepeatingLoader)
                lacks = "" if ended else "a data loader with no micro-batch for this rank (see dataloader_drop_last)"
            except Exception as error:  # all stages are told, and none goes on without the others
                failure = error
        if self._batch_fn is not None and found[0] is not None:
            try:
                found = [self._batch_fn(batch) for batch in found]
            except Exception as error:
                failure = error
        board.enter(Phase.PIPELINE)
        self._agree_on_data(lacks, ended, failure, *self._checksums(found))
        return [on_device(batch, self.device) for batch in found]

    def _checksums(self, batches: list[Any]) -> tuple[int | None, int | None]:
        """Return the checksums (of the labels, which the first and last stage read; of the inputs, on the first stage)."""
        if not is_cheap(batches) and self.global_steps >= COMPARED_STEPS:
            return None, None
        pairs = [inputs_and_labels(batch) for batch in batches if batch is not None]
        inputs = checksum([inputs for inputs, _ in pairs]) if self.is_first_stage() else None
        return checksum([labels for _, labels in pairs]), inputs

    def _agree_on_data(
        self, lacks: str, ended: bool, failure: Exception | None, labels: int | None, inputs: int | None
    ) -> None:
        place, places = self.topology.data_parallel_rank, self.topology.data_parallel_size
        trains = self.module.training
        flags = torch.tensor([bool(lacks), ended, failure is not None, trains], dtype=torch.float64)
        told = [summands(found, place, places) for found in (labels, inputs)]
        total = self.comm.control.sum(torch.cat([flags, *told]))
        (nothing, too_few, failed, training), *totals = total.split([len(flags), 3 * places, 3 * places])
        if 0 < training < self.topology.world_size:
            _name_evaluating(self.comm.control, trains=trains, step=self.global_steps + 1)
        if failed:
            _raise_for_all(self.comm.control, failure)
        if nothing:
            raise PipelineError(
                f"train_batch() and eval_batch() need an iterator over micro-batches on the first and the last stage"
                f"{f', and got {lacks}' if lacks else '; another stage got none'}. Remedy: pass iter(...), or give "
                "training_data to initialize(), with at least train_micro_batch_size_per_gpu samples for each rank."
            )
        if too_few:
            reads = self.is_first_stage() or self.is_last_stage()
            raise StopIteration(_whose_data_ended(self.comm.control, ended if reads else None))
        for kind, own, total in zip(("labels", "inputs"), (labels, inputs), totals, strict=True):
            if not agree(total):
                self._name_different(kind, own)
        if self.module.training and self.global_steps == 0 and places > 1 and all_alike(totals[1]):
            advise_own_data(places)

    def _name_different(self, kind: str, own: int | None) -> NoReturn:
        """Raise PipelineError for two ranks that read different data. All ranks must call it."""
        first: dict[int, tuple[int, int]] = {}  # data-parallel rank -> (checksum, rank that has it)
        who = ""
        for rank, (place, found) in enumerate(self.comm.control.values((self.topology.data_parallel_rank, own))):
            known, other = first.setdefault(place, (found, rank)) if found is not None else (None, rank)
            if known != found:
                who = who or f"ranks {other} and {rank} read"
        raise PipelineError(
            f"{who} different {kind} at step {self.global_steps + 1}, and belong to the same data-parallel rank, where the "
            "first stage takes the inputs and the last the labels of the same samples. Weights are those before this step. "
            "Remedy: choose data by engine.topology.data_parallel_rank, not by the rank of the world, and shuffle with a "
            "generator of its own: stages draw different numbers for dropout. training_data in initialize() does both."
        )

    def _own_data(self) -> Iterator[Any] | None:
        """Return what goes on with each step: the iterator that was set, or one over the data loader, without end.

        After a load, loaders go on from there with a new iterator. Those of our own move the one that there is, too.
        """
        if self._given is not None or self.dataloader is None:
            return self._given
        moves = 0 if isinstance(self.dataloader, EpochLoader) else self.checkpointer.data_moves
        if self._repeated is None or self._repeated[0] != moves:
            self._repeated = moves, RepeatingLoader(self.dataloader)
        return self._repeated[1]

    def _begin(self, value: Any) -> Any:
        return cast_floats(value, self.compute_dtype) if self.compute_dtype is not None else value

    def _root_of(self, loss: torch.Tensor, micro_batch: int) -> torch.Tensor:
        self.accumulation.at_micro_batch(micro_batch)
        self._note_loss(loss)
        scale = self.loss_scale
        return loss * scale if scale != 1.0 else loss

    def _mean(self, losses: list[torch.Tensor], count: int) -> torch.Tensor:
        """Return the mean over all micro-batches and data-parallel ranks, on all ranks. A device adds up by itself."""
        on_devices = self.comm.sums_on_device
        device = self.device if on_devices else torch.device(CPU)
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if losses and self.topology.tensor_rank == 0:
            total += torch.stack(losses).double().sum().to(device)
        found = self.comm.sum_on_device(total, "losses") if on_devices else self.comm.control.sum(total)
        return (found[0] / (count * self.topology.data_size)).float()


_WHOLE_BATCHES = (
    "{0}() cannot be called on one stage of a pipeline: the schedule orders the work of all stages. Remedy: call "
    "engine.train_batch(data_iter) or engine.eval_batch(data_iter)."
)


def _raise_for_all(control: Control, failure: Exception | None) -> NoReturn:
    """Raise ``failure`` on this rank, or PipelineError that tells of another rank's. All ranks must call it."""
    found = control.values(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    rank, text = next((rank, text) for rank, text in enumerate(found) if text is not None)
    raise PipelineError(
        f"rank {rank} could not read its micro-batches: {text}. All stages have left them out. Remedy: mend the data, or "
        "go on with the next ones on all ranks."
    )


def _name_evaluating(control: Control, *, trains: bool, step: int) -> NoReturn:
    """Raise PipelineError for ranks that evaluate while others train. All ranks must call it."""
    found = control.values(trains)
    training, other = (ranks_in_words([rank for rank, theirs in enumerate(found) if theirs is it]) for it in (True, False))
    raise PipelineError(
        f"train_batch() was called on {training}, and eval_batch() on {other}, at step {step}. Weights are those before "
        "this step. Remedy: let all ranks, of all stages, make the same calls in the same order."
    )


def _whose_data_ended(control: Control, ended: bool | None) -> str:
    """Say it. ``ended``: whether that of this rank has; None if it reads none. All ranks must call it."""
    found = control.values(ended)
    remedy = "Remedy: begin it anew, or wrap it so that it repeats itself."
    if False not in found:
        return f"the data has ended. {remedy}"
    ranks = ranks_in_words([rank for rank, theirs in enumerate(found) if theirs])
    return f"the data of {ranks} has ended, and that of other ranks has not. {remedy}"
