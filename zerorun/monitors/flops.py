"""The FLOP profiler: operations, parameters and latency of each module in the forwards of one step, as a table.

torch's counter counts the forwards of the profiled step, which slows them down. Latencies are those of the step after it.
All forwards of a step count that are in training mode, or if none is, all with gradients. A step may have more of them than
micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..config.schema import Config
from ..distributed.device import Clock, peak_flops
from ..distributed.topology import Topology
from ..log import logger

_RULE = "-" * 100
_Shape = Sequence[int]
Found = TypeVar("Found", bound=Sized)


@dataclass
class ModuleCost:
    """What a module takes in a micro-batch's forward on this rank. ``seconds``: from its first to its last operation."""

    name: str
    kind: str
    depth: int
    params: int
    flops: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class StepSizes:
    """``samples`` of a step over all ranks, its ``micro_batches``, and samples of one ``micro_batch`` on one rank."""

    samples: int
    micro_batches: int
    micro_batch: int


class FlopsProfile:
    """Counts one step and times the next. Then ``report`` prints, once."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        self._config, self._topology, self._device, self._clock = config, topology, device, Clock(device)
        self._steps_so_far: Callable[[], int] = int
        self._inside, self._trains = 0, True  # whether the forward is in training mode
        self._micro_batches = [1, 1]  # of the step that is counted, and of the one that is timed
        self._counter: Any = None  # of torch, while it counts
        self._handles: list[Any] = []  # on the modules inside
        self._modules: dict[int, list[str]] = {}
        self._root: nn.Module | None = None
        # Of forwards by whether they are in training mode: operations by id(module); (id(module), begin, end).
        self._flops: dict[bool, dict[int, float]] = {True: defaultdict(float), False: defaultdict(float)}
        self._moments: dict[bool, list[tuple[int, Any, Any]]] = {True: [], False: []}
        self._done = False

    def count_steps_by(self, steps_so_far: Callable[[], int]) -> None:
        """Ask this which step of the run is going on: they are counted from 0."""
        self._steps_so_far = steps_so_far

    # -- hooks ---------------------------------------------------------------------------------------------------

    def attached_to(self, module: nn.Module) -> list[Any]:
        """Look at the forwards of ``module`` until what is returned is removed."""
        self._root = module
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    @property
    def _step(self) -> int:
        """The step that is going on, counted from the one that is profiled."""
        return self._steps_so_far() - self._config.flops_profiler.profile_step

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1
        if self._done or self._inside > 1 or not torch.is_grad_enabled() or self._step not in (0, 1):
            return
        self._trains = module.training
        if self._step == 0:
            from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

            self._counter = FlopCounterMode(display=False, custom_mapping=_more_formulas())
            self._counter.__enter__()
        measure: Callable[[], Any] = self._clock.now if self._counter is None else self._counter.get_total_flops
        self._handles = [handle for inner in module.modules() for handle in self._measuring(inner, measure)]
        self._handles[0].remove()  # of the module itself, whose hooks before the forward are under way
        self._begun = measure()

    def _measuring(self, module: nn.Module, measure: Callable[[], Any]) -> Iterator[Any]:
        begun: list[Any] = []
        yield module.register_forward_pre_hook(lambda *unused: begun.append(measure()))
        if module is not self._root:
            yield module.register_forward_hook(lambda *unused: self._note(module, begun.pop(), measure()), always_call=True)

    def _note(self, module: nn.Module, begun: Any, ended: Any) -> None:
        if self._counter is not None:
            self._flops[self._trains][id(module)] += ended - begun
        else:
            self._moments[self._trains].append((id(module), begun, ended))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = max(self._inside - 1, 0)
        if self._inside:
            return
        if self._handles:
            self._note(module, self._begun, self._clock.now() if self._counter is None else self._counter.get_total_flops())
            for handle in self._handles:
                handle.remove()
            self._handles = []
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    # -- results -------------------------------------------------------------------------------------------------

    def observe(self, step: int, sizes: StepSizes, seconds: float | None) -> None:
        """Step number ``step`` of the run, counted from 0, took ``seconds``."""
        after = step - self._config.flops_profiler.profile_step
        if after in (0, 1):
            self._micro_batches[after] = sizes.micro_batches
        moments = _of_training(self._moments)
        over = after >= 1 and moments and self._clock.has_passed(moments[-1][2])
        if over and not self._done and seconds is not None:
            self._done = True
            self._print("\n".join(self.table(sizes, seconds)))

    def costs(self) -> list[ModuleCost]:
        """Of every module, the whole model first."""
        assert self._root is not None
        seconds: dict[int, float] = defaultdict(float)
        for key, begun, ended in _of_training(self._moments):
            seconds[key] += self._clock.between(begun, ended)
        counted, timed = self._micro_batches
        flops = _of_training(self._flops)
        return [
            ModuleCost(
                name,
                type(module).__name__,
                name.count(".") + 1 if name else 0,
                sum(param.numel() for param in module.parameters()),
                flops[id(module)] / counted,
                seconds[id(module)] / timed,
            )
            for name, module in self._root.named_modules()
        ]

    def table(self, sizes: StepSizes, seconds: float) -> Iterator[str]:
        """The lines to print. ``seconds``: what a step of these sizes takes."""
        section, costs, topology = self._config.flops_profiler, self.costs(), self._topology
        whole, factor = costs[0], 2 + section.recompute_fwd_factor
        rate = whole.flops * (1 + factor) * sizes.micro_batches / seconds
        peak = peak_flops(self._device) if self._multiplies_in_16_bits else None
        yield f"FLOP profile of step {section.profile_step} on rank {topology.rank}\n{_RULE}"
        rows: dict[str, Any] = {
            "world size": topology.world_size,
            "data parallel size": topology.data_parallel_size,
            "model parallel size": topology.tensor * topology.pipe,
            "batch size per GPU": sizes.micro_batch,
            "params per GPU": _short(whole.params),
            "fwd MACs per GPU": _short(whole.flops / 2),
            "fwd flops per GPU": _short(whole.flops),
            "fwd latency": f"{1e3 * whole.seconds:.2f} ms",
            "fwd FLOPS per GPU": _rate(whole),
            f"fwd+bwd flops per GPU and step, bwd = {factor:g} * fwd": _short(rate * seconds),
            "iter latency": f"{1e3 * seconds:.2f} ms",
            "samples/second": f"{sizes.samples / seconds:.2f}",
            "FLOPS per GPU": f"{_short(rate)}FLOPS",
            "MFU": f"{rate / peak:.1%} of {_short(peak)}FLOPS" if peak else "unknown, as the peak of this device is",
        }
        yield from (f"{name + ':':<70}{value}" for name, value in rows.items())
        yield f"{_RULE}\nThe largest modules, by depth and class"
        yield from self._aggregated(costs)
        if section.detailed:
            yield f"{_RULE}\nAll modules: params, MACs, fwd latency, fwd FLOPS"
            yield from (_detail(cost, whole) for cost in costs)
        yield _RULE

    @property
    def _multiplies_in_16_bits(self) -> bool:
        autocast = self._config.torch_autocast
        casts = autocast.enabled and autocast.dtype != "fp32"
        return self._config.bf16.enabled or self._config.fp16.enabled or casts

    def _aggregated(self, costs: list[ModuleCost]) -> Iterator[str]:
        section = self._config.flops_profiler
        deepest = max(cost.depth for cost in costs)
        depths = range(deepest + 1) if section.module_depth < 0 else [min(section.module_depth, deepest)]
        for depth in depths:
            yield f"depth {depth}:"
            for what, shown in (("params", _short), ("flops", _short), ("seconds", lambda value: f"{1e3 * value:.2f} ms")):
                sums: dict[str, float] = defaultdict(float)
                for cost in costs:
                    if cost.depth == depth:
                        sums[cost.kind] += getattr(cost, what)
                most = sorted(sums.items(), key=lambda entry: -entry[1])[: section.top_modules]
                yield f"    {what:<8}" + ", ".join(f"{kind} {shown(value)}" for kind, value in most)

    def _print(self, text: str) -> None:
        path = self._config.flops_profiler.output_file
        try:
            if path:
                Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(f"{text}\n", encoding="utf-8")
                return
        except OSError as error:  # in a step, on this rank alone: the others would wait for it
            logger.warning(
                "flops_profiler.output_file = %r: it cannot be written (%s), so the table is printed. Training goes on. "
                "Remedy: name a file in a folder that rank 0 can write to.",
                path,
                error.strerror,
            )
        logger.info("%s", text)


def _of_training(found: dict[bool, Found]) -> Found:
    """What was found in training mode, or without any, in evaluation mode."""
    return found[True] or found[False]


def _more_formulas() -> dict[Any, Callable[..., int]]:
    """Return the operations of operators that torch's counter does not know, from the shapes of their arguments."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _flops_of_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flops_of_attention_backward,
        aten._grouped_mm: _flops_of_groups,
        aten._scaled_grouped_mm: _flops_of_groups,
    }


def _flops_of_attention(query: _Shape, key: _Shape, value: _Shape, *args: Any, **kwargs: Any) -> int:
    """Of all pairs of positions, as for torch's other kernels of attention, which count those behind a mask, too."""
    *batch, length, _ = query
    return 2 * math.prod(batch) * length * key[-2] * (key[-1] + value[-1])


def _flops_of_attention_backward(
    gradient: _Shape, query: _Shape, key: _Shape, value: _Shape, *args: Any, **kwargs: Any
) -> int:
    """The scores once more, and two products for each of the two of the forward."""
    *batch, length, _ = query
    return 2 * math.prod(batch) * length * key[-2] * (3 * key[-1] + 2 * value[-1])


def _flops_of_groups(first: _Shape, second: _Shape, *args: Any, **kwargs: Any) -> int:
    """Of products of matrices, one for each group. Where an argument has two dimensions, groups divide one of these."""
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


def _detail(cost: ModuleCost, whole: ModuleCost) -> str:
    def share(own: float, all_: float) -> str:
        return f"{own / all_:.1%}" if all_ else "0 %"

    return (
        f"{'  ' * cost.depth}{cost.name.rpartition('.')[2] or 'model'} ({cost.kind}): "
        f"{_short(cost.params)} = {share(cost.params, whole.params)} params, "
        f"{_short(cost.flops / 2)} = {share(cost.flops, whole.flops)} MACs, "
        f"{1e3 * cost.seconds:.3f} ms = {share(cost.seconds, whole.seconds)} latency, {_rate(cost)}"
    )


def _rate(cost: ModuleCost) -> str:
    return f"{_short(cost.flops / cost.seconds if cost.seconds else 0.0)}FLOPS"


def _short(value: float) -> str:
    """With three digits, and a letter for thousands, millions and so on."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "K")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.2f} {letter}"
    return f"{value:.2f} " if isinstance(value, float) else f"{value} "
