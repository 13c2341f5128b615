"""Engine: orders the events of training. Forward, backward, step, and what a loop may ask in between."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..activations.blocks import BlockForward
from ..checkpoint.automatic import AutomaticSaves
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.inventory import Subject
from ..checkpoint.load import Wanted
from ..checkpoint.requests import translate
from ..config.parse import Config, EffectiveValue
from ..data import EpochLoader
from ..distributed.same_data import checksum, is_cheap
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..errors import LossScaleError, NonFiniteError, StepError
from ..log import in_bytes, info_once, is_rank_zero, logger, warn_once
from ..ops.single_pass import SinglePassOptimizer
from ..optim.loss_scaler import DTYPES, LossScaler, cast_floats
from ..startup.parallelize import ParallelizedModel
from ..zero.access import Registry, find_released_use, full_state_dict, restore_module
from ..zero.gradients import not_finite
from ..zero.memory_report import memory_by_kind
from ..zero.placeholders import released_parameter, tensors_in
from ..zero.runtime import Runtime
from ..zero.sharded_optimizer import ShardedOptimizer, Summary
from ..zero.unit import Unit, links_of
from .label_counts import LabelCounts
from .loss_given import check_loss, weight_of
from .queries import LoopQueries

# How far losses may differ, relatively, that are computed from the same activations; and for how many steps that is looked
# at where looking means to wait for the device.
_APART, COMPARED_STEPS = 1e-4, 10
# After so many steps in a row without finite gradients training in bf16 ends: no loss scale can mend it.
SKIPS_IN_A_ROW = 3
# In fp16 so many skipped steps in a row have a line each; after that, one of so many has.
SKIPS_TOLD, SKIPS_BETWEEN = 10, 100


class Engine(LoopQueries):
    """A module in training. Made by ``zerorun.initialize``.

    [Note: one divisor]
    Gradients are summed as they come and divided once, in ``step``: by the data-parallel size and the accumulation steps,
    or by the total weight if losses came with weights, and by the loss scale. Nothing is divided on the way, so all stages
    round alike, and a loss may reach the parameters by any path.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        topology: Topology,
        comm: Communicator,
        units: list[Unit],
        runtime: Runtime,
        sharded: ShardedOptimizer | None,
        scaler: LossScaler,
        lr_scheduler: Any,
        dataloader: EpochLoader | Any,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.module, self.config, self.topology, self.comm = module, config, topology, comm
        self.units, self.runtime, self.sharded, self.scaler = units, runtime, sharded, scaler
        self.lr_scheduler, self.dataloader = lr_scheduler, dataloader
        self.compute_dtype = compute_dtype
        self.device = comm.device
        self.parallelized = ParallelizedModel()
        self.owns_topology = False  # made by initialize(): its groups go with the engine
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self._skips_in_a_row = 0
        self._calls = 0  # that are going on, one inside the other
        self._boundary: bool | None = None
        self._in_no_sync = self._in_engine_backward = self._applied = False
        self._grad_norm: float | None = None
        self._stepping_now = False
        self._loss_mode: str | None = None
        self._frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        self._labels = LabelCounts(config.gradient_accumulation_steps * topology.data_parallel_size)
        self._begin_accumulation()
        runtime.on_backward_end = self._count_backward
        self.registry: Registry | None = None
        self.automatic_saves: AutomaticSaves | None = None  # saves that the script does not ask for
        self._checkpointer: Checkpointer | None = None
        if sharded is not None:
            sharded.optimizer.register_step_pre_hook(self._refuse_direct_step)
            sharded.own_hooks = 1
            sharded.optimizer.register_state_dict_pre_hook(lambda _: runtime.finish_updates())
            if isinstance(sharded.optimizer, SinglePassOptimizer):
                sharded.optimizer.before_access = runtime.finish_updates

    # -- forward and backward ------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating inputs are cast to the compute dtype in bf16 and fp16.

        Raises StepError, on all of them alike, if tensor-parallel ranks are given different data.
        """
        self._compare_data((inputs, kwargs))
        if torch.is_grad_enabled() and not self._calls:
            self._labels.look(kwargs)
        if self.compute_dtype is not None:
            inputs, kwargs = cast_floats(inputs, self.compute_dtype), cast_floats(kwargs, self.compute_dtype)
        autocast = self.config.torch_autocast
        self._calls += 1
        try:
            if autocast.enabled:
                with torch.autocast(self.device.type, DTYPES[autocast.dtype]):
                    output = self.module(*inputs, **kwargs)
            else:
                output = self.module(*inputs, **kwargs)
        finally:
            self._calls -= 1
        if self._calls:  # the model's forward has called the engine, and what that returns will be scaled
            return output
        if self.scaler.scale != 1.0 and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._scale_plain_backward)
        return output

    forward = __call__

    def _compare_data(self, given: Any) -> None:
        axis = self.parallelized.axis
        if axis is None or (not is_cheap(given) and self.global_steps >= COMPARED_STEPS):
            return
        mine = torch.tensor([checksum(given) or 0], device=axis.channel.device)
        found = axis.all_gather(mine, 0, range(axis.size + 1), "comparison of data").tolist()
        if len(set(found)) > 1:
            other = next(rank for rank, theirs in enumerate(found) if theirs != found[0])
            ranks = self.topology.ranks_along("tensor")
            raise StepError(
                f"ranks {ranks[0]} and {ranks[other]} were given different data at step {self.global_steps}, and divide "
                "the same layers. Remedy: choose data by engine.topology.data_parallel_rank, not by the rank of the world."
            )

    def _scale_plain_backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        """fp16: a plain ``loss.backward()`` has not been scaled; scale where it enters the model."""
        return None if self._in_engine_backward else grad * self.scaler.scale

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        scale_wrt_gas: bool = True,
        retain_graph: bool = False,
    ) -> torch.Tensor:
        """Compute gradients of ``loss`` (a scalar) and return loss / accumulation steps.

        ``weight``: how much this micro-batch counts, usually its number of tokens. Then the step's gradient is that of
        sum(weight * loss) / sum(weight) over all ranks and micro-batches. ``scale_wrt_gas=False``: the loss is already
        divided by the accumulation steps. Raises StepError for anything but a scalar that depends on parameters.
        """
        self._check_loss(loss)
        mode = "weight" if weight is not None else "mean" if scale_wrt_gas else "sum"
        if self._loss_mode not in (None, mode):
            raise StepError(
                f"backward() was called with {_MODES[self._loss_mode]} and then {_MODES[mode]} within one step. "
                "Remedy: call it the same way for all micro-batches of a step."
            )
        factor = self.scaler.scale
        if weight is not None:
            value = weight_of(weight)
            self._weight += value
            factor *= value
        self._loss_mode = mode
        self._note_bad_loss(loss, ignore=weight is not None and factor == 0)
        self._in_engine_backward = True
        try:
            (loss * factor if factor != 1.0 else loss).backward(retain_graph=retain_graph)
        finally:
            self._in_engine_backward = False
        result = loss.detach()
        return result / self.config.gradient_accumulation_steps if mode == "mean" else result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, for ``engine.scale(loss).backward()`` in fp16."""
        check_loss(loss, "scale()")
        scaled = loss * self.scaler.scale

        def entered(grad: torch.Tensor) -> None:
            self._in_engine_backward = True

        scaled.register_hook(entered)
        return scaled

    def _check_loss(self, loss: Any) -> None:
        if self.sharded is None:
            raise StepError(
                "backward() needs an optimizer, and this engine has none. Remedy: add an 'optimizer' section to the "
                "configuration or pass optimizer= to zerorun.initialize()."
            )
        check_loss(loss)

    def _note_bad_loss(self, loss: torch.Tensor, *, ignore: bool) -> None:
        """Remember a NaN or infinite loss for step(), where all ranks learn of it. In fp16 it counts as an overflow."""
        if self.topology.tensor > 1 and (self.device.type == "cpu" or self.global_steps < COMPARED_STEPS):
            value = float(loss.detach())
            self._compared += value if math.isfinite(value) else 0.0
        if self.device.type != "cpu" or math.isfinite(float(loss.detach())):
            return
        if ignore:
            self._empty.append(self._backwards)
            return
        name = find_released_use(loss, self.units)
        if name is not None:
            raise released_parameter(*name)
        if not self.scaler.dynamic:
            self._bad_losses.append(self._backwards)

    def _count_backward(self) -> None:
        self._backwards += 1
        self._in_engine_backward = False

    # -- accumulation --------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next step() updates the weights."""
        if self._in_no_sync:
            return False
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the loop says itself which step() updates the weights."""
        self._boundary = bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside never update. At stages 0 and 1 they do not communicate either; stages 2 and 3 keep only
        shards of gradients and reduce in every backward, with the same result."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def _reduce_in_this_backward(self) -> bool:
        return self.config.managed_gradient_accumulation and self.is_gradient_accumulation_boundary()

    def _begin_accumulation(self) -> None:
        self._backwards = 0  # backwards since the last update
        self._steps_seen = 0  # of them, followed by a step()
        self._loss_mode = None
        self._weight = 0.0
        self._compared = 0.0  # sum of losses, where ranks must have the same
        self._bad_losses: list[int] = []  # micro-batches, counted from 0
        self._empty: list[int] = []  # those of weight 0 whose loss is not finite: it may be a mean of nothing
        self._culprits: list[tuple[int, str]] = []  # (micro-batch, parameter) with non-finite gradients
        self.runtime.inspect = self._inspect if self.scaler.at_minimum else None

    # -- step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a micro-batch and, at the accumulation boundary, update the weights and the learning rate.

        Raises StepError without a backward since the last call, NonFiniteError for NaN losses or gradients (fp32, bf16),
        LossScaleError if fp16 overflows at the minimum scale. Weights are as before the step when an error is raised.
        """
        if self._in_no_sync:
            raise StepError("step() inside no_sync(). Remedy: call it after the block.")
        if self._backwards == self._steps_seen:
            raise StepError(
                "step() without backward(): no gradients since the last step(). "
                "Remedy: call engine.backward(loss) or loss.backward() first."
            )
        assert self.sharded is not None
        backwards, self._steps_seen = self._backwards - self._steps_seen, self._backwards
        boundary = self.is_gradient_accumulation_boundary()
        if not boundary and self._boundary is None and backwards == self.config.gradient_accumulation_steps:
            warn_once(
                f"step() after {backwards} backwards counts as one of gradient_accumulation_steps = {backwards} "
                "micro-batches, so the weights are not updated yet. If they were to be one update: call step() after every "
                "backward, or engine.set_gradient_accumulation_boundary(True) once."
            )
        self.micro_steps += 1
        if not boundary:
            self._applied = False
            return
        if not self.runtime.reduces_now:
            self.runtime.reduce_accumulated()
        self._step_now()

    def _step_now(self) -> None:
        """Update the weights from the reduced gradients of all micro-batches, and what else is due after a step."""
        assert self.sharded is not None
        wishes = self.automatic_saves.wishes() if self.automatic_saves is not None else ()
        summary = self.sharded.summarise(self.runtime, len(self._bad_losses), self._weight, self._compared, wishes)
        try:
            self._update(summary)
        finally:
            self._forget_gradients()
        if self.automatic_saves is not None:
            self._save_if_due(self.automatic_saves, *summary.wishes)

    def _update(self, summary: Summary) -> None:
        assert self.sharded is not None
        self._applied = False
        self._refuse_thawed()
        if self._loss_mode in (None, "mean"):
            self._labels.advise()
        if summary.bad_losses:
            self.sharded.tell_overflow(True)
            raise NonFiniteError(self._explain("the loss is NaN or infinite", self._bad_losses))
        if summary.apart > _APART:
            raise StepError(
                f"ranks of one tensor-parallel group had different losses at step {self.global_steps}: they saw different "
                "data, or drew different random numbers. Weights are those before this step. Remedy: choose data by "
                "engine.topology.data_parallel_rank, not by the rank of the world, and seed all ranks of a group alike."
            )
        unscale = 1.0 / (self._divisor(summary) * self.scaler.scale)
        self.global_steps += 1
        self.sharded.tell_overflow(not summary.finite)
        if summary.finite:
            self._grad_norm = math.sqrt(summary.square_sum) * unscale
            limit = self.config.gradient_clipping
            clip = min(1.0, limit / (self._grad_norm + 1e-6)) if limit else 1.0
            with self._stepping():
                self.sharded.update(unscale * clip, unused=summary.unused, order=self.runtime.forward_order())
            self.runtime.gather_updated()
            self._applied, self._skips_in_a_row = True, 0
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self._skip()
        self._update_scale(overflow=not summary.finite)
        self._print_progress()

    def _refuse_thawed(self) -> None:
        """Parameters that were frozen when room for gradients and optimizer states was made would never be updated."""
        thawed = [name for name, param in self._frozen if param.requires_grad]
        if thawed:
            more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
            raise StepError(
                f"parameter {thawed[0]!r}{more} requires a gradient now, and was frozen when initialize() was called: it "
                "has no optimizer state and would never change. Weights are those before this step. Remedy: let every "
                "parameter that is ever trained require a gradient when initialize() is called, and freeze it after that "
                "with requires_grad_(False) for as long as it is not trained."
            )

    def _divisor(self, summary: Summary) -> float:
        if self._loss_mode == "weight":
            if summary.weight <= 0:
                raise StepError(
                    "the weights of all losses of this step are zero on all ranks, so their mean does not exist. "
                    "Remedy: leave out steps without a token, or pass a positive weight."
                )
            return summary.weight
        divisor = 1 if self._loss_mode == "sum" else self.config.gradient_accumulation_steps
        return divisor * (self.topology.data_parallel_size if self.config.gradient_allreduce_op == "mean" else 1)

    def gradient_factor(self) -> float:
        """From accumulated to averaged, unscaled gradients, as of the losses so far. All ranks must call it."""
        if self._loss_mode != "weight":
            return 1.0 / (self._divisor(Summary(0.0, 0, 0.0, False)) * self.scaler.scale)
        weight = torch.tensor([self._weight if self.topology.tensor_rank == 0 else 0.0], dtype=torch.float64)
        total = float(self.comm.control_sum(weight)[0])
        return 1.0 / (self._divisor(Summary(0.0, 0, total, False)) * self.scaler.scale)

    def _skip(self) -> None:
        """Gradients are not finite: leave the weights as they are, or stop where nothing would mend it."""
        self.skipped_steps += 1
        self._skips_in_a_row += 1
        if self.scaler.dynamic:
            return
        if self.config.bf16.enabled and self.config.bf16.check_grad_overflow and self._skips_in_a_row < SKIPS_IN_A_ROW:
            if is_rank_zero():
                what = "step %d skipped: gradients are NaN or infinite; %d such steps in a row are an error"
                logger.warning(what, self.global_steps, SKIPS_IN_A_ROW)
            return
        raise NonFiniteError(self._explain("gradients are NaN or infinite", self._empty, not_finite(self.units)))

    def _update_scale(self, *, overflow: bool) -> None:
        before = self.scaler.scale
        try:
            self.scaler.update(overflow)
        except LossScaleError as error:
            found = sorted(
                (micro, rank, name)
                for rank, culprits in enumerate(self.comm.control_objects(self._culprits))
                for micro, name in culprits
            )
            where = "none was found in the gradients of a single rank: the sum over ranks overflows."
            if found:
                micro, rank, name = found[0]
                where = f"first in parameter {name!r} on rank {rank} in micro-batch {micro} of this step."
            raise LossScaleError(
                f"{error} Non-finite values: {where} Weights are those before this step and can be saved."
                f"{self._hint_of_placeholders()} Remedy: train in bf16, or lower the learning rate; fp16 rarely works for "
                "weights made in bf16."
            ) from None
        count = self._skips_in_a_row
        told = count <= SKIPS_TOLD or count % SKIPS_BETWEEN == 0
        if overflow and self.scaler.dynamic and told and is_rank_zero():
            what = "step %d skipped (%d in a row): gradients overflow in fp16; loss scale %.10g -> %.10g"
            logger.warning(what, self.global_steps, count, before, self.scaler.scale)

    def _inspect(self, unit: Unit) -> None:
        """Note non-finite gradients of one backward. On while the loss scale is at its minimum, before the last chance."""
        for flat_group in unit.trainable:
            for index, (name, param) in enumerate(zip(flat_group.names, flat_group.params, strict=True)):
                for gradient in (param.grad, flat_group.late.get(index)):
                    if gradient is not None and not bool(torch.isfinite(gradient).all()):
                        self._culprits.append((self._backwards, name))

    def _explain(self, what: str, micro_batches: list[int], names: Sequence[str] = ()) -> str:
        """A message that is the same on all ranks: the first that saw it, and the parameters concerned, if that is known.

        ``micro_batches``: that had a bad loss; those that are known to weigh nothing if there are ``names``.
        """
        answers = self.comm.control_objects((micro_batches, names))
        seen = [(rank, found[0]) for rank, (found, _) in enumerate(answers) if found]
        bad = list(dict.fromkeys(name for _, found in answers for name in found))
        where = f" in {_listed(bad)}" if bad else ""
        hint = ""
        if seen and bad:
            hint = (
                f" Rank {seen[0][0]} gave micro-batch {seen[0][1]} a weight of 0 and a loss that is not finite: divide by "
                "mask.sum().clamp(min=1), so that a mean of nothing has a gradient of 0."
            )
        elif seen:
            where = f", first on rank {seen[0][0]} in micro-batch {seen[0][1]} of this step"
        return (
            f"{what} at step {self.global_steps}{where}. Weights are those before this step."
            f"{hint}{self._hint_of_placeholders()} Remedy: look at the data of this step, lower the learning rate, or clip "
            "gradients."
        )

    def _hint_of_placeholders(self) -> str:
        if not self.runtime.shares_params:
            return ""
        return " A stage-3 parameter used outside its module's forward reads as NaN, too."

    def _forget_gradients(self) -> None:
        for unit in self.units:
            for flat_group in unit.flat_groups:
                flat_group.forget_gradients()
        self.runtime.forget()
        self._begin_accumulation()

    def _refuse_direct_step(self, *unused: Any) -> None:
        if not self._stepping_now:
            raise StepError("optimizer.step() was called directly. Remedy: call engine.step().")

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._stepping_now = True
        try:
            yield
        finally:
            self._stepping_now = False

    def _print_progress(self) -> None:
        every = self.config.steps_per_print
        if every and math.isfinite(every) and self.global_steps % int(every) == 0 and self.topology.rank == 0:
            rates = ", ".join(f"{rate:.3e}" for rate in self.get_lr())
            scale = f", loss scale {self.loss_scale:g}" if self.scaler.dynamic else ""
            logger.info("step %d, skipped %d, lr %s%s", self.global_steps, self.skipped_steps, rates, scale)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        dir: str | Path = "",
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool = False,
        **others: Any,
    ) -> Path:
        """Save everything that the run needs to go on exactly, into ``dir/tag``; returns that path. All ranks must call it.

        ``tag``: ``global_step<n>`` by default. ``client_state``: numbers, strings, lists, dicts and tensors of the script.
        ``save_latest``: let ``dir/latest`` name it. ``exclude_frozen_parameters``: leave them out and keep their checksums;
        the model that loads it must have them. ``trainable_only`` is another name for it, and ``save_dir`` for ``dir``.
        ``asynchronous``: return when this rank's part is copied, and write it in the background (``wait_for_checkpoint``).

        Raises CheckpointError on all ranks alike, naming the rank and the file, with the checkpoints before untouched;
        StepError in the middle of an accumulation, whose gradients would be lost.
        """
        named = translate(others, {"save_dir": "dir", "trainable_only": "trainable_only"}, "save_checkpoint")
        self._refuse_unfinished_step()
        path = self.checkpointer.save(
            named.get("dir", dir),
            tag,
            client_state,
            trainable_only=named.get("trainable_only", exclude_frozen_parameters),
            asynchronous=asynchronous,
            latest=save_latest,
            keep=self.config.checkpoint.keep_last,
        )
        if self.automatic_saves is not None:
            self.automatic_saves.saved()
        return path

    def load_checkpoint(
        self,
        dir: str | Path = "",
        tag: str | None = None,
        *,
        strict: bool = True,
        load_optimizer: bool = True,
        load_scheduler: bool = True,
        allow_missing: Sequence[str] = (),
        **deepspeed: Any,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load ``dir/tag`` and return (its path, the script's client_state). All ranks must call it.

        Works at any number of ranks, stage and precision. Without ``tag``: what ``dir/latest`` names, or if that is not
        complete or damaged, with a warning, the newest that is; (None, {}) with a warning if there is none.
        ``strict``: the names of the weights must be those of the model. ``allow_missing``: names or patterns of weights,
        or of "optimizer", "scheduler", "data", "rng", that may be missing. DeepSpeed's keywords (``load_module_strict``,
        ``load_optimizer_states``, ``load_lr_scheduler_states``, ``load_module_only``, ``load_dir``) are understood.

        Raises CheckpointError on all ranks alike. What was restored is logged.
        """
        names = {
            "load_dir": "dir",
            "load_module_strict": "strict",
            "load_optimizer_states": "optimizer",
            "load_lr_scheduler_states": "scheduler",
            "load_module_only": "weights_only",
        }
        named = translate(deepspeed, names, "load_checkpoint")
        wanted = Wanted(
            strict=named.get("strict", strict),
            optimizer=named.get("optimizer", load_optimizer),
            scheduler=named.get("scheduler", load_scheduler),
            weights_only=named.get("weights_only", False),
            allow_missing=(allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing),
        )
        self.zero_grad()
        return self.checkpointer.load(named.get("dir", dir), tag, wanted)

    def resume(self, dir: str | Path | None = None) -> tuple[Path | None, dict[str, Any]]:
        """``load_checkpoint`` of the newest in ``dir`` (default: ``checkpoint.dir`` of the configuration)."""
        return self.load_checkpoint(dir or self.config.checkpoint.dir or "")

    def wait_for_checkpoint(self) -> None:
        """Return when no save is going on in the background; raises its CheckpointError if it failed."""
        self.checkpointer.wait()

    def export(self, dir: str | Path, dtype: torch.dtype | str | None = None, *, merge_adapter: bool = False) -> Path:
        """Write the weights, whole, as safetensors (and config.json of a Hugging Face model) into the directory ``dir``.

        Of a model with adapters of PEFT: the adapters alone, as ``PeftModel.save_pretrained`` does; with ``merge_adapter``
        the model that ``merge_and_unload()`` makes of it. ``dtype``: of floating tensors; None: as the model computes. All
        ranks must call it. Appears whole or not at all. Raises CheckpointError on all ranks alike.
        """
        return self.checkpointer.export(dir, dtype, merge_adapter=merge_adapter)

    @property
    def checkpointer(self) -> Checkpointer:
        """Made when it is first needed."""
        if self._checkpointer is None:
            subject = Subject(
                self.module, self.units, self.runtime, self.sharded, self.comm, self.topology, self.parallelized
            )
            self._checkpointer = Checkpointer(subject, self)
        return self._checkpointer

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps of the progress."""
        return {name: getattr(self, name) for name in ("global_steps", "micro_steps", "skipped_steps")}

    def set_counters(self, counters: dict[str, int]) -> None:
        """Go on from ``counters``. Micro-batches are counted anew if a step has another number of them now."""
        for name, value in counters.items():
            setattr(self, name, value)
        each = self.config.gradient_accumulation_steps
        if self.micro_steps % each:
            self.micro_steps = self.global_steps * each

    def _refuse_unfinished_step(self) -> None:
        if self._backwards:
            raise StepError(
                f"save_checkpoint() in the middle of a step: gradients of {self._backwards} micro-batches would be lost. "
                "Remedy: call it after a step() that updates the weights (is_gradient_accumulation_boundary() before it)."
            )

    def _save_if_due(self, automatic_saves: AutomaticSaves, told_to_end: int, due: int) -> None:
        if told_to_end:
            self.save_checkpoint(automatic_saves.directory)
            self.automatic_saves = None
            automatic_saves.end()
        elif due or automatic_saves.due(self.global_steps):
            self.save_checkpoint(automatic_saves.directory, asynchronous=automatic_saves.asynchronous)

    # -- what a loop may ask -------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer, over pieces of this rank's shards. Its parameter groups are the user's."""
        self.runtime.finish_updates()
        return self.sharded.optimizer if self.sharded is not None else None

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the averaged, unclipped gradient of the last step that was applied; the same on all ranks.

        A skipped step leaves it as it was. None before the first.
        """
        return self._grad_norm

    def was_step_applied(self) -> bool:
        """True if the last step() changed the weights."""
        return self._applied

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def zero_grad(self) -> None:
        """Gradients are forgotten by step(); this drops those that are not stepped yet."""
        self.runtime.finish_reductions()
        if self.sharded is not None:
            self.sharded.drain()
        self._forget_gradients()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The full weights under the model's own names, of all pipeline stages, in CPU memory. All ranks must call it."""
        own = full_state_dict(self.module, self.units, self.runtime, self.parallelized)
        return self.comm.of_all_stages(own)

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds by kind: parameters, gradients, master, moments, slots, buffers."""
        self.runtime.finish_updates()
        return memory_by_kind(self.module, self.runtime, self.sharded)

    def effective_config(self) -> dict[str, EffectiveValue]:
        """What is in force, by dotted key: the value, its source ("file", "auto", "derived", "default"), and a note.

        The note of a key of the file that has no effect in this run is the reason.
        """
        return self.config.effective()

    def communication_report(self) -> dict[str, dict[str, int]]:
        """Calls and bytes sent by this rank so far, by label (unit and phase)."""
        found = dict(self.comm.traffic)
        for channel in self.comm.model_axes.values():
            found.update(channel.statistics.traffic)
        return {label: {"calls": t.calls, "bytes": t.bytes} for label, t in sorted(found.items())}

    def compile(self, **options: Any) -> None:
        """torch.compile the forward of every unit but the root; hooks stay outside the graphs."""
        self.runtime.do_not_watch()
        for unit in self.units[1:]:
            for module in unit.modules:
                if isinstance(module.forward, BlockForward):  # recompute what is compiled, and do not compile that
                    module.forward.inner = torch.compile(module.forward.inner, **options)
                else:
                    module.forward = torch.compile(module.forward, **options)  # type: ignore[method-assign]
        if len(self.units) == 1:
            warn_once("engine.compile(): the model has no repeated blocks, so nothing is compiled.")

    def destroy(self) -> None:
        """Give back an ordinary module with full weights, and free everything else. All ranks must call it."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self.automatic_saves is not None:
            self.automatic_saves.unwatch()
        self.runtime.finish_reductions()
        try:
            restore_module(self.module, self.units, self.runtime)
            self.parallelized.undo()
        finally:  # a failed update must not keep memory, hooks and files
            self._let_go()
        self.sharded = self._checkpointer = self.automatic_saves = None
        self.parallelized = ParallelizedModel()
        self.units.clear()
        if self.owns_topology:
            self.topology.close()

    def _let_go(self) -> None:
        """Of what is not the module's; nobody else is needed for it."""
        self.runtime.remove_hooks()
        for link in links_of(self.units):
            link.close()

    def describe(self) -> str:
        """The layout in a few lines: stage, units, bytes by kind, dtypes."""
        held = {kind: size for kind, size in self.memory_report().items() if size}
        kinds = ", ".join(f"{kind} {in_bytes(size)}" for kind, size in held.items())
        compute = str(self.compute_dtype or torch.float32).removeprefix("torch.")
        wire = str(self.comm.wire_dtype).removeprefix("torch.")
        stage, topology = self.config.zero_optimization.stage, self.topology
        degrees = f"{topology.pipe} stages x {topology.tensor} tensor x " if topology.pipe * topology.tensor > 1 else ""
        return (
            f"stage {stage}, {degrees}{topology.replicate} x {topology.shard} data-parallel ranks, "
            f"{len(self.units)} units; "
            f"compute {compute}, master, accumulation and sums float32, gradients on the wire {wire}; "
            f"per rank, before optimizer states: {kinds}"
        )

    def announce(self) -> None:
        info_once(self.describe())

    # -- as DeepSpeed's ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """``engine, optimizer, dataloader, lr_scheduler = zerorun.initialize(...)``."""
        return iter((self, self.optimizer, self.dataloader, self.lr_scheduler))

    def __getattr__(self, name: str) -> Any:
        """Whatever the engine lacks is looked up on the module."""
        module = self.__dict__.get("module")
        if module is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(module, name)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(repr(name) for name in names[:3])}{more}"


_MODES = {"weight": "a weight", "mean": "a loss to be averaged", "sum": "scale_wrt_gas=False", None: ""}
