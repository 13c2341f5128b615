"""The recorder: hooks on a module that keep what its forward and backward compute, and make it draw the same numbers.

[Note: the same numbers]
One process runs the model in one piece, a stage only its blocks, and ranks have other micro-batches. So that a block draws
the same numbers for dropout in all of them, the generators are seeded when a block begins, by its name and the micro-batch.
Layers that tensor ranks divide draw numbers of their own for each rank, which one process cannot. There dropout is left out
of both runs, and ranks are asked what they would have drawn: the same where they have the same values, others elsewhere.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from ..distributed.same_data import checksum
from ..distributed.tensor_shard import TensorShard
from .records import KEPT, Kind, Point, Records, Value, kept
from .task import seed_generators

_LAST = 1 << 30  # sorts what follows all micro-batches of a step


@dataclass(frozen=True)
class Named:
    """What is known of the parameters of a module. By id: their names in the whole model, their parts, and which of them
    have only a summand of their gradient.
    """

    names: Mapping[int, str]
    shards: Mapping[int, TensorShard] = field(default_factory=dict)
    summands: Collection[int] = ()


class Recorder:
    """Keeps the records of a run. ``blocks``: names of the modules before which random numbers begin anew.

    ``counts``: the number of a micro-batch is that of the whole module's forward, as in a pipeline, where backwards come in
    the same order. ``skips``: names of modules whose output is not to be kept.
    """

    def __init__(
        self,
        module: nn.Module,
        named: Named,
        blocks: Collection[str],
        seed: int,
        device: torch.device,
        *,
        rank: int = 0,
        stage: int = 0,
        counts: bool = False,
        skips: Collection[str] = ("",),
    ) -> None:
        self.records: Records = {}
        self.inside = ""  # the module whose forward runs
        self._named, self._seed, self._device = named, seed, device
        self._rank, self._stage, self._counts = rank, stage, counts
        self._step, self._micro, self._ticks = 0, 0, 0
        self._keeps, self._drawer = True, rank  # whether the micro-batch is this rank's own, and whose it is
        self._calls: Counter[Any] = Counter()  # of modules in a micro-batch; in a pipeline, in a step
        self._outer: list[str] = []
        self._handles = list(self._attach(module, blocks, skips))

    def _attach(self, module: nn.Module, blocks: Collection[str], skips: Collection[str]) -> Iterator[Any]:
        for name, part in module.named_modules():
            if getattr(part, "is_elsewhere", False):
                continue
            yield part.register_forward_pre_hook(partial(self._enter, name, name in blocks or not name))
            yield part.register_forward_hook(partial(self._leave, name, name not in skips), always_call=True)
        for param in module.parameters():
            if param.requires_grad and id(param) in self._named.names and id(param) not in self._named.summands:
                yield param.register_post_accumulate_grad_hook(self._gradient)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    # -- where the run is ----------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self._step, self._micro, self._ticks = step, -1 if self._counts else 0, 0
        self._calls.clear()

    def begin_micro_batch(self, micro: int, rank: int) -> bool:
        """Say which micro-batch comes, and return True if its values are kept: it is this rank's own."""
        self._micro, self._ticks = micro, 0
        self._calls.clear()
        self._keeps, self._drawer = rank == self._rank, rank
        return self._keeps

    # -- what is kept --------------------------------------------------------------------------------------------

    def keep(self, kind: Kind, name: str, tensor: torch.Tensor, *, micro: int = -1, call: int = 0, **place: Any) -> Point:
        """Keep ``tensor`` for a point of this step. ``place``: ``start`` and ``shard`` of its Value."""
        late = {Kind.LOSS: 0, Kind.REDUCED: 1, Kind.NORM: 2, Kind.UPDATED: 3}.get(kind, 0)
        self._ticks += 1
        backward = kind is Kind.GRADIENT
        order = (-self._stage if backward else self._stage) if kind is not Kind.REDUCED else 0
        when = (self._step, micro if micro >= 0 else _LAST + late, int(backward), order, self._ticks)
        whole = kind not in (Kind.INPUT, Kind.OUTPUT)
        value = tensor.detach().to("cpu", copy=True) if whole else kept(tensor)
        point = Point(self._step, kind, name, micro, call)
        self.records[point] = Value(value, when, **place)
        return point

    def keep_updated(self, step: int, name: str, tensor: torch.Tensor, **place: Any) -> None:
        """Keep the weights that the update of ``step`` has written; -1: initial ones."""
        when = (step, _LAST + 3, 0, 0, len(self.records))
        self.records[Point(step, Kind.UPDATED, name)] = Value(tensor.detach().to("cpu", copy=True), when, **place)

    def keep_input(self, batch: Any, micro: int) -> None:
        """Keep the tensors of a micro-batch."""
        for path, leaf in _pytree.tree_leaves_with_path(batch):
            if isinstance(leaf, torch.Tensor):
                self.keep(Kind.INPUT, _pytree.keystr(path) or "the batch", leaf, micro=micro)

    def _enter(self, name: str, begins: bool, module: nn.Module, args: Any) -> None:
        again = _in_backward()
        self._outer.append(self.inside)
        self.inside = name
        if self._counts and not name and not again:
            self._micro = self._calls["forwards", args[1] if len(args) > 1 else 0]
            self._calls["forwards", args[1] if len(args) > 1 else 0] += 1
        if begins:
            self._draw_anew(name, again)
        if again or not self._keeps:
            return
        for param in module._parameters.values():
            known = self._named.names.get(id(param))
            if known is not None and param is not None:
                self._keep_weight(known, param)

    def _draw_anew(self, name: str, again: bool) -> None:
        micro = self._micro
        if self._counts and again:  # recomputed in the order of the forwards
            micro = self._calls["again", name]
            self._calls["again", name] += 1
        seed_generators(self._device, self._seed + zlib.crc32(f"{self._step} {micro} {self._drawer} {name}".encode()))

    def _keep_weight(self, name: str, param: torch.Tensor) -> None:
        """Keep a weight where it is first read in a step, and where it has other values than there."""
        first = self.records.get(Point(self._step, Kind.WEIGHT, name, 0))
        if first is None or not torch.equal(first.tensor, param.detach().cpu()):
            micro = 0 if first is None else self._micro
            self.keep(Kind.WEIGHT, name, param, micro=micro, shard=self._named.shards.get(id(param)))

    def _leave(self, name: str, keeps: bool, module: nn.Module, args: Any, output: Any) -> None:
        self.inside = self._outer.pop() if self._outer else ""
        if _in_backward() or not keeps or not self._keeps:
            return
        tensor = next((leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if tensor is not None and tensor.is_floating_point():
            call = self._calls[self._micro, name]
            self._calls[self._micro, name] += 1
            self.keep(Kind.OUTPUT, name, tensor, micro=self._micro, call=call, shard=_columns(module, tensor))

    def _gradient(self, param: torch.Tensor) -> None:
        if not self._keeps or param.grad is None:
            return
        micro = self._micro
        if self._counts:
            micro = self._calls["gradient", id(param)]
            self._calls["gradient", id(param)] += 1
        gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
        shard = self._named.shards.get(id(param))
        self.keep(Kind.GRADIENT, self._named.names[id(param)], gradient, micro=micro, shard=shard)


def _columns(module: nn.Module, output: torch.Tensor) -> TensorShard | None:
    """Return which part of its whole output a column-parallel layer has computed; None of other modules."""
    weight: TensorShard | None = getattr(module, "tensor_shards", {}).get("weight")
    if weight is None or getattr(module, "gather_output", True) or output.numel() >= 2 * KEPT:
        return None
    return TensorShard((*output.shape[:-1], weight.shape[weight.dim]), output.dim() - 1, weight.ranges)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


# -- dropout over tensor ranks ---------------------------------------------------------------------------------------


class Draws:
    """What dropouts of a rank would have drawn: for each module, (checksum of the values, of the generator's state)."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def note(self, name: str, values: torch.Tensor) -> None:
        state = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        self.found[name].append((checksum(values) or 0, state))

    def wrong(self, others: list[dict[str, list[tuple[int, int]]]]) -> list[tuple[str, bool]]:
        """Return (module, whether its values are the same on all ranks) where ranks should have drawn otherwise."""
        problems = []
        for name in self.found:
            for calls in zip(*(other.get(name, []) for other in others), strict=False):
                values, states = (set(column) for column in zip(*calls, strict=True))
                alike = len(values) == 1
                if alike != (len(states) == 1) or (not alike and len(states) < len(calls)):
                    problems.append((name, alike))
                    break
        return problems


@contextlib.contextmanager
def without_dropout(recorder: Recorder | None, draws: Draws | None) -> Iterator[None]:
    """Leave dropout out in this block, and note what would have been drawn in ``draws``."""
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def note(values: torch.Tensor) -> None:
        if draws is not None and recorder is not None and not _in_backward():
            draws.note(recorder.inside, values)

    def no_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training and p:
            note(input)
        return input

    def plain_attention(query: torch.Tensor, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        if dropout_p or any(args[3:4]):  # after keys, values and the mask
            note(query)
        others = (*args[:3], 0.0, *args[4:]) if len(args) > 3 else args
        return attention(query, *others, **kwargs)  # type: ignore[no-any-return]

    functional.dropout, functional.scaled_dot_product_attention = no_dropout, plain_attention
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention
