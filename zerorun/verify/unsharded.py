"""The reference: the same training in plain PyTorch, in one process that has the whole model and all micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.device import on_device
from ..model_setup.checked_arguments import is_scheduler, take_in
from ..model_setup.float8 import Float8Layers, float8_layers
from ..ops.rounding import MasterFormat, Origin, join
from ..ops.single_pass import SinglePassOptimizer
from ..ops.state_format import StateFormat
from ..optim.in_fp32 import KeptTensor, StepsInFp32
from ..optim.loss_scaler import DTYPES, LossScaler
from ..optim.lr_schedules import build_schedule
from ..optim.nested_containers import cast_floats
from ..optim.optimizers import build_optimizer
from ..optim.requested_optimizer import RawOptimizer
from ..pipeline.pipelined import Pipelined
from ..plan.make_plan import buffer_dtype, compute_dtype
from ..plan.units import stored_name
from .recorder import Named, Recorder
from .records import Kind, Records, Value, joined
from .task import Loss, RunSetting, Sizes, TrainingTask


class Whole:
    """A whole model in one process, which computes as an engine does: in the compute dtype, or under autocast."""

    def __init__(self, model: nn.Module, loss: Loss, config: Config, scaler: LossScaler, device: torch.device) -> None:
        self.model, self.config, self.scaler, self.device = model, config, scaler, device
        self.dtype, self._loss = compute_dtype(config), loss
        self.sums: dict[nn.Parameter, torch.Tensor] = {}  # of gradients, fp32

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self.dtype is not None:
            inputs, kwargs = cast_floats(inputs, self.dtype), cast_floats(kwargs, self.dtype)
        autocast = self.config.torch_autocast
        with torch.autocast(self.device.type, DTYPES[autocast.dtype]) if autocast.enabled else nullcontext():
            return self.model(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def named(self) -> Named:
        return Named({id(param): name for name, param in self.model.named_parameters()})

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        batch = on_device(batch, self.device)
        if not isinstance(self.model, Pipelined):
            return self._loss(self, batch)
        found: torch.Tensor = self.model.loss_of(self(self.model.inputs_of(batch), 0, batch), batch)
        return found

    def add(self, batch: Any) -> torch.Tensor:
        """Add the gradients of a micro-batch, and return its loss."""
        loss = self.loss(batch)
        (loss * self.scaler.scale).backward()
        for param in self.model.parameters():
            if param.grad is not None:
                gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
                before = self.sums.get(param)
                self.sums[param] = gradient.float() if before is None else before + gradient
            param.grad = None
        return loss.detach()

    def norm(self) -> float:
        """Return the 2-norm of the sums."""
        return _norm(self.sums.values())


class Unsharded(Whole):
    """A whole model with its optimizer, which works on fp32 copies of what is trained."""

    def __init__(self, task: TrainingTask, config: Config, raw: RawOptimizer, device: torch.device) -> None:
        super().__init__(task.model.to(device), task.loss, config, LossScaler.of(config), device)
        params = [param for group in raw.groups for param in group["params"]]
        kept = {param: raw.master.parts(param.detach().to(device, torch.float32, copy=True)) for param in params}
        self.masters, self._format = {param: nn.Parameter(master) for param, (master, _) in kept.items()}, raw.master
        self._convert()
        groups = [{**group, "params": [self.masters[param] for param in group["params"]]} for group in raw.groups]
        if raw.optimizer is not None:
            for group, own in zip(raw.optimizer.param_groups, groups, strict=True):
                group["params"] = own["params"]
            raw.optimizer.state.clear()
        self.optimizer = raw.optimizer or build_optimizer(raw.name, raw.params, groups)
        names = {id(param): stored_name(name) for name, param in task.model.named_parameters()}
        self._rests = {self.masters[param]: rest for param, (_, rest) in kept.items() if rest is not None}
        formats = {own: raw.formats.get(id(param), StateFormat.FP32) for param, own in self.masters.items()}
        origins = {
            own: (Origin(0, param.numel(), names[id(param)], seed=raw.seed),)
            for param, own in (self.masters.items() if raw.seed is not None else ())
        }
        self._kept: dict[torch.Tensor, KeptTensor] = {}  # of what is stepped in fp32, with no gradient yet
        if isinstance(self.optimizer, SinglePassOptimizer):
            self.optimizer.formats.update(formats)
            self.optimizer.rests.update(self._rests)
            self.optimizer.origins.update(origins)
        elif raw.formats or raw.master is not MasterFormat.FP32:
            for number, group in enumerate(self.optimizer.param_groups):
                for own in group["params"]:
                    rest, known = self._rests.get(own), origins.get(own, ())
                    self._kept[own] = KeptTensor(own, number, torch.empty(0), rest, formats[own], known)
        self._steps = StepsInFp32(self.optimizer, cuts=False)
        self.scheduler = self._scheduler(task.options.get("lr_scheduler"))
        self.last_norm: float | None = None

    def _convert(self) -> None:
        """Cast weights and buffers as the engine does."""
        for param in self.model.parameters():
            if self.dtype is not None and param.is_floating_point():
                param.data = param.data.to(self.dtype)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(buffer_dtype(self.config, buffer))

    def _scheduler(self, given: Any) -> Any:
        if given is not None:
            return given if is_scheduler(given) else given(self.optimizer)
        section = self.config.scheduler
        return None if section is None else build_schedule(section.type, dict(section.params), self.optimizer)

    def exact(self, param: nn.Parameter) -> torch.Tensor:
        """Return what the master of ``param`` stands for, in the precision of its format."""
        master = self.masters[param].detach()
        return join(master, self._rests.get(self.masters[param])).to(self._format.precision)

    def take_sums(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the sums of the gradients of what is trained."""
        return {param: total for param, total in self.sums.items() if param in self.masters}

    def step(self, count: int, instead: Mapping[str, list[Value]]) -> None:
        """Update the weights by the mean over ``count`` losses. ``instead``: pieces of gradients to go on with, by name."""
        unscale, limit = 1.0 / (count * self.scaler.scale), self.config.gradient_clipping
        own, names = self.take_sums(), self.named().names
        norm = _norm(own.values()) * unscale
        if math.isfinite(norm):
            self.last_norm = norm
            sums = {param: total for param, total in own.items() if names[id(param)] not in instead}
            for param, total in own.items():
                sums.setdefault(param, joined(instead.get(names[id(param)], ()), total).to(total))
            clip = min(1.0, limit / (_norm(sums.values()) * unscale + 1e-6)) if limit else 1.0
            in_fp32: list[KeptTensor] = []
            for param, total in sums.items():
                gradient, master = total * (clip * unscale), self.masters[param]
                if isinstance(self.optimizer, SinglePassOptimizer):
                    self.optimizer.gradients[master] = gradient  # which may be of another dtype
                elif master in self._kept:
                    in_fp32.append(replace(self._kept[master], gradient=gradient))
                else:
                    master.grad = gradient
            if in_fp32:
                self._steps.step(in_fp32, 1.0)
            else:
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        self.scaler.update(not math.isfinite(norm))
        self.sums.clear()
        if isinstance(self.optimizer, SinglePassOptimizer):
            self.optimizer.gradients.clear()
        for param, master in self.masters.items():
            master.grad = None
            param.data.copy_(master.detach())


def _norm(found: Iterable[torch.Tensor]) -> float:
    squares = sum(float(tensor.double().square().sum()) for tensor in found)
    return math.sqrt(squares) if squares >= 0 else math.nan


def run(
    setting: RunSetting,
    device: torch.device,
    instead: Mapping[int, Mapping[str, list[Value]]],
    *,
    permuted: AbstractContextManager[Any] | None = None,
) -> Records:
    """Train in one process, and return the records of this rank's micro-batches and of all weights.

    ``instead``: by step, the pieces of gradients with which it goes on, see [Note: tolerances] in records.py. ``permuted``:
    a context that changes the order of sums; the order of micro-batches changes with it.
    """
    task, sizes = setting.task, setting.sizes
    given = (task.options.get("optimizer"), task.options.get("model_parameters"), sizes.ranks, None)
    wanted, raw = take_in(task.model, setting.config, None, *given, "lr_scheduler" in task.options)
    Float8Layers(float8_layers(task.model, wanted.fp8), wanted.fp8, device.type)
    subject = Unsharded(task, wanted, raw, device)
    subject.model.train()
    recorder = Recorder(subject.model, subject.named(), setting.blocks, setting.seed, device, rank=sizes.rank)
    _keep_weights(recorder, subject, -1)
    mean = wanted.gradient_allreduce_op == "mean"
    with permuted or nullcontext():
        for step in range(sizes.steps):
            recorder.begin_step(step)
            losses = [
                add_micro_batch(subject, recorder, setting.batches[sizes.number(step, micro, rank)], micro, rank)
                for micro, rank in _order(sizes, backwards=permuted is not None)
            ]
            names = subject.named().names
            for param, total in subject.take_sums().items():
                recorder.keep(Kind.REDUCED, names[id(param)], total)
            subject.step(sizes.accumulation * (sizes.ranks if mean else 1), instead.get(step, {}))
            recorder.keep(Kind.LOSS, "mean loss", torch.stack(losses).double().mean())
            if subject.last_norm is not None:
                recorder.keep(Kind.NORM, "norm", torch.tensor(subject.last_norm, dtype=torch.float64))
            _keep_weights(recorder, subject, step)
    recorder.remove()
    return recorder.records


def _order(sizes: Sizes, *, backwards: bool) -> Iterable[tuple[int, int]]:
    pairs = [(micro, rank) for micro in range(sizes.accumulation) for rank in range(sizes.ranks)]
    return reversed(pairs) if backwards else pairs


def add_micro_batch(subject: Whole, recorder: Recorder, batch: Any, micro: int, rank: int) -> torch.Tensor:
    own = recorder.begin_micro_batch(micro, rank)
    if own:
        recorder.keep_input(batch, micro)
    loss = subject.add(batch)
    if own:
        recorder.keep(Kind.LOSS, "loss", loss, micro=micro)
    return loss


def _keep_weights(recorder: Recorder, subject: Unsharded, step: int) -> None:
    for name, param in subject.model.named_parameters():
        if step < 0 or param in subject.masters:
            recorder.keep_updated(step, name, subject.exact(param) if param in subject.masters else param)
