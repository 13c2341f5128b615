"""Sequence parallelism of a converted model: between regions each rank has a part of the sequence.

[Note: where the sequence is divided]
Blocks are the items of one ModuleList. The hidden states [..., sequence, width] are divided at the input of the first block
and gathered at the output of the last (Korthikanti et al. 2022, arXiv:2205.05198). Inside a block, a module that holds only
planned layers gathers its hidden states once, because it may use their shape; where column-parallel layers are next to
norms, each gathers by itself. Row-parallel layers return parts of the sequence. Undivided parameters of blocks see only
these parts, so their gradients are summands. Everything else in a block must work on each position by itself, so layers
with parameters that are not norms must be in the plan. A pipeline stage with several chunks divides and gathers in each.

[Note: lengths]
Parts must be put together by the length of their sequence. In a forward this is what came to the first block. A block that
is recomputed may belong to an earlier forward, of which it gets only a part. The part's own length tells that of the
sequence, unless there were sequences whose lengths differ by less than the number of ranks: then ranks tell each other.

[Note: between blocks]
What a block does, a trial has shown (infer.prove_along_sequence). What the model does between two blocks has a part of the
sequence, too. So each forward looks whether a block gets what the one before has given, and raises ModelError if not: a
model may do something in training alone, or from some step on. Where a block gets the same tensor, to which nobody has
written, this costs nothing. Elsewhere values are compared, and ranks, which all run the same code, tell each other. What is
recomputed has been looked at before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..activations.changed_in_place import version_of
from ..distributed.tensor_shard import even_range
from ..errors import ModelError
from ..plan.replaced_forwards import uncompiled
from ..plan.units import layerdrop_of
from .collectives import SEQUENCE, Region, gather_sequence, split_sequence
from .random import any_trains
from .styles import COLUMN, HOOKED, ParallelPlan

_POSITION_WISE = ("layernorm", "rmsnorm")  # in the lower-case names of classes


class SequenceParallel:
    """The hooks of one model, whose blocks are converted already."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, region: Region, name: str | None = None) -> None:
        """``name``: of the ModuleList with the blocks, see ``blocks_of``."""
        self.region = region
        self.length = 0  # of the sequence whose blocks run
        self.lengths: dict[int, int] = {}  # length of this rank's part -> of the sequence, of all so far
        self.parts_tell = True  # the length of a part is that of no other sequence's, on any rank
        self.handles: list[RemovableHandle] = []
        self.partial: list[tuple[nn.Module, Any]] = []  # modules and the partial_gradients that they had
        name = blocks_of(model, plan) if name is None else name
        blocks = [b for b in model.get_submodule(name).children() if not getattr(b, "is_elsewhere", False)]
        for block in blocks:
            self._mark_partial(block)
        inner = plan.within(name)
        for entry in inner.entries:  # one hook each: a recomputation may call a block's forward without its hooks
            layer = model.get_submodule(f"{name}.{entry.name}")
            self.handles.append(layer.register_forward_pre_hook(self._inside))
        self._gather_at_owners(model, inner, name)
        for run in _runs(model, blocks):
            self.handles.append(run[0].register_forward_pre_hook(functools.partial(self._begin, run), with_kwargs=True))
            self.handles += [block.register_forward_pre_hook(self._follow, with_kwargs=True) for block in run[1:]]
            self.handles += [block.register_forward_hook(self._give) for block in run[:-1]]
            self.handles.append(run[-1].register_forward_hook(self._end))
        # It comes before the hook that ends the region, and is not called if the forward raises.
        self.handles.append(model.register_forward_hook(self._refuse_part, prepend=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # copies of a model share it, as they share the region

    def remove(self) -> None:
        """Take the hooks away, before the layers are restored."""
        for handle in self.handles:
            handle.remove()
        for module, had in self.partial:
            if had is None:
                del module.partial_gradients
            else:
                module.partial_gradients = had
        self.region.sequence_length = None

    def _mark_partial(self, block: nn.Module) -> None:
        for module in block.modules():
            divided = getattr(module, "tensor_shards", {})
            whole = tuple(name for name, param in module._parameters.items() if param is not None and name not in divided)
            if whole:
                self.partial.append((module, getattr(module, "partial_gradients", None)))
                module.partial_gradients = whole  # type: ignore[assignment]

    def _gather_at_owners(self, model: nn.Module, plan: ParallelPlan, name: str) -> None:
        columns = [entry for entry in plan.entries if entry.style in COLUMN]
        planned = {entry.name for entry in plan.entries}
        for owner in dict.fromkeys(entry.owner for entry in columns):
            module = model.get_submodule(f"{name}.{owner}")
            if not _is_planned(module, owner, planned):
                continue
            self.handles.append(module.register_forward_pre_hook(self._gather, with_kwargs=True))
            for entry in columns:
                if entry.owner == owner:
                    model.get_submodule(f"{name}.{entry.name}").enters = False  # type: ignore[assignment]

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _begin(self, run: list[nn.Module], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden(block, args, kwargs)
        if any_trains(run):
            self.region.streams.enter(hidden.device)
        self.length = self.region.sequence_length = hidden.shape[SEQUENCE]
        self.region.given = None
        self._note_length(self.length)
        return with_hidden(split_sequence(hidden, self.region.axis), args, kwargs)

    def _inside(self, layer: nn.Module, args: Any) -> None:
        enters = getattr(layer, "enters", None)  # None: its columns are not divided
        if _is_recomputing() and args and (enters is not None or hasattr(layer, "split_input")):
            self.length = self._length_of(args[0]) if enters else args[0].shape[SEQUENCE]
        self.region.sequence_length = self.length

    def _gather(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden(module, args, kwargs)
        self.length = self.region.sequence_length = self._length_of(hidden)
        return with_hidden(self.region.enter(hidden), args, kwargs)

    def _give(self, block: nn.Module, args: Any, output: Any) -> None:
        if not (_is_recomputing() or torch.compiler.is_compiling()):
            found = output[0] if isinstance(output, tuple) and output else output
            self.region.given = (found, version_of(found)) if isinstance(found, torch.Tensor) else None

    def _follow(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See [Note: between blocks]."""
        if _is_recomputing() or torch.compiler.is_compiling():
            return
        if self.region.sequence_length is None:
            raise ModelError(
                f"with sequence parallelism a {type(block).__name__} is called without the first block, which divides the "
                "sequence. Remedy: call all blocks in each forward, also in evaluation, or sequence_parallel=False."
            )
        if self.region.given is None:
            return
        (given, writes), self.region.given = self.region.given, None
        hidden = _hidden(block, args, kwargs)
        if (hidden is not given or version_of(given) != writes) and self._differs(hidden, given, writes):
            raise ModelError(
                "with sequence parallelism each rank has a part of the sequence between blocks, where the model computes "
                f"something: a {type(block).__name__} does not get what the block before it gives. Remedy: do it inside a "
                "block, which is tried out, or sequence_parallel=False."
            )

    def _differs(self, hidden: torch.Tensor, given: torch.Tensor, writes: int) -> bool:
        """True if ``hidden`` is not ``given`` as it was, on any rank: one that has no token of the sequence cannot tell."""
        differs = version_of(given) != writes or not _are_same(hidden, given)
        axis, mine = self.region.axis, torch.tensor([differs], dtype=torch.int64, device=hidden.device)
        return bool(axis.all_gather(mine, 0, range(axis.size + 1), "tensor: between blocks").sum())

    def _end(self, block: nn.Module, args: Any, output: Any) -> Any:
        self.region.sequence_length = None
        self.region.streams.leave()
        if isinstance(output, torch.Tensor):
            return gather_sequence(output, self.region.axis, self._length_of(output))
        if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
            return (gather_sequence(output[0], self.region.axis, self._length_of(output[0])), *output[1:])
        raise ModelError(
            f"with sequence parallelism a block must give a tensor, or a tuple with one in front; {type(block).__name__} "
            f"gives {type(output).__name__}. Remedy: sequence_parallel=False."
        )

    @uncompiled
    def _refuse_part(self, model: nn.Module, *ignored: Any) -> None:
        """Raise ModelError if ``model``, whose forward has returned, has not joined the parts of the sequence."""
        if self.region.sequence_length is not None:
            raise ModelError(
                f"with sequence parallelism {type(model).__name__} has returned what this rank has computed from its part "
                "of the sequence: the forward left out the last block, which joins the parts. Remedy: call all blocks in "
                "each forward, also in evaluation, or sequence_parallel=False."
            )

    # -- lengths, see [Note: lengths] --------------------------------------------------------------------------------

    def _note_length(self, length: int) -> None:
        axis = self.region.axis
        begin, end = even_range(length, axis.rank, axis.size)
        if self.lengths.setdefault(end - begin, length) != length:
            self.parts_tell = False
        self.parts_tell = self.parts_tell and all(
            known == length or abs(known - length) >= axis.size for known in self.lengths.values()
        )

    def _length_of(self, part: torch.Tensor) -> int:
        """Return the length of the sequence of which ``part`` [..., own part of the sequence, width] is this rank's."""
        own, axis = part.shape[SEQUENCE], self.region.axis
        if not _is_recomputing():
            return self.length
        if self.parts_tell:
            return self.lengths.get(own, self.length)
        mine = torch.tensor([own], device=part.device)
        return int(axis.all_gather(mine, 0, range(axis.size + 1), "tensor: lengths").sum())


def _is_recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


def _runs(model: Any, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Return ``blocks`` by the chunks of ``model`` if it is a pipeline stage: each takes and gives whole hidden states."""
    if not hasattr(model, "modules_of"):
        return [blocks]
    chunks = [{id(module) for module in model.modules_of(chunk)} for chunk in range(model.chunks)]
    runs = [[block for block in blocks if id(block) in chunk] for chunk in chunks]
    return [run for run in runs if run]


def has_blocks(plan: ParallelPlan) -> bool:
    """True if ``plan`` divides layers of blocks: a pipeline stage may have none."""
    return any((e.style in COLUMN or e.style.startswith("rowwise")) and not e.parameter for e in plan.entries)


def blocks_of(model: nn.Module, plan: ParallelPlan) -> str:
    """Return the name of the ModuleList whose items hold all divided layers but embedding and head. Raises ModelError."""
    inner = [e for e in plan.entries if (e.style in COLUMN or e.style.startswith("rowwise")) and not e.parameter]
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    found = [name for name in outermost if any(e.name.startswith(name + ".") for e in inner)]
    if len(found) != 1:
        raise ModelError(
            f"sequence parallelism needs one ModuleList of blocks with divided layers; {type(model).__name__} has {found}. "
            "Remedy: sequence_parallel=False."
        )
    layerdrop = layerdrop_of(model)
    if layerdrop > 0:  # the first block cuts the sequence, and the last one joins it
        raise ModelError(
            f"{type(model).__name__} leaves out blocks at random (layerdrop = {layerdrop}), also the first and the last, "
            "where sequence parallelism divides and joins. Remedy: make the model with a layerdrop of 0, or "
            "sequence_parallel=False."
        )
    for entry in plan.entries:
        if entry.name.startswith(found[0] + ".") and entry.style in (*HOOKED, "embedding_rowwise"):
            raise ModelError(
                f"{entry.name} ({entry.style}): sequence parallelism cannot be done with certainty in blocks with such a "
                "module. Remedy: sequence_parallel=False."
            )
    _check_position_wise(model, plan, found[0])
    return found[0]


def _is_planned(module: nn.Module, name: str, planned: set[str]) -> bool:
    """True if every parameter below ``module`` belongs to a module in the plan."""
    return all(own and f"{name}.{own}" in planned for own, child in module.named_modules() if child._parameters)


def _check_position_wise(model: nn.Module, plan: ParallelPlan, name: str) -> None:
    planned = {entry.name for entry in plan.entries}
    for entry in plan.entries:
        gathers = entry.style == "colwise_gather_output" and entry.name.startswith(name + ".")
        if gathers and not _is_planned(model.get_submodule(entry.owner), entry.owner, planned):
            raise ModelError(
                f"{entry.owner} has layers that are not in the plan beside {entry.name} ({entry.style}): they may see the "
                "whole sequence or a part of it. Remedy: sequence_parallel=False."
            )
    for own, module in model.get_submodule(name).named_modules(prefix=name):
        if not module._parameters or own in planned or not own:
            continue
        if not any(part in type(module).__name__.lower() for part in _POSITION_WISE):
            raise ModelError(
                f"{own} ({type(module).__name__}) has parameters and is not in the plan: it may need the whole sequence. "
                "Remedy: divide it, too, or sequence_parallel=False."
            )


def _hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found = args[0] if args else kwargs.get("hidden_states")
    if isinstance(found, torch.Tensor) and found.is_floating_point() and found.dim() >= 2:
        return found
    raise ModelError(
        f"with sequence parallelism {type(module).__name__} must get its hidden states as first argument or as "
        "hidden_states. Remedy: sequence_parallel=False."
    )


def _are_same(hidden: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether they have the same values, of which NaN is one."""
    if hidden.shape != given.shape or hidden.dtype != given.dtype:
        return False
    return bool(((hidden == given) | (hidden.isnan() & given.isnan())).all())


def with_hidden(hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a block with ``hidden`` in place of its hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
