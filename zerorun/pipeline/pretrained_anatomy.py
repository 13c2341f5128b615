"""Finds which modules of a Hugging Face model run before its repeated blocks and which after, by watching a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ModelError


@dataclass(frozen=True)
class Anatomy:
    """Which modules run where. ``before``, ``after``: paths of the outermost modules that run before and after the blocks.

    blocks: the path of the list of blocks.
    tuple_length: length of the tuple that a block returns, hidden states first; None if it returns only hidden states.
    """

    blocks: str
    count: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    tuple_length: int | None

    def layer_of(self, path: str) -> int | None:
        """Return the layer of a path: 0 before the blocks, 1 .. count in a block, count + 1 after them; None if unknown."""
        if path.startswith(f"{self.blocks}."):
            return 1 + int(path[len(self.blocks) + 1 :].partition(".")[0])
        for names, layer in ((self.before, 0), (self.after, self.count + 1)):
            if any(path == name or path.startswith(f"{name}.") for name in names):
                return layer
        return None


def refusal(model: nn.Module, reason: str) -> ModelError:
    """The error for a model that cannot be split with certainty."""
    return ModelError(
        f"{type(model).__name__} cannot be split into pipeline stages: {reason}. Remedy: write the model as a list of "
        "layers and give that to zerorun.PipelineModule."
    )


def find_blocks(model: nn.Module) -> str:
    """Return the path of the list of repeated blocks: the one that the model's pipeline plan names, else the largest."""
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    prefix = str(getattr(model, "base_model_prefix", ""))
    for key in getattr(getattr(model, "config", None), "base_model_pp_plan", None) or ():
        for name in (key, f"{prefix}.{key}"):
            if name in lists:
                return name
    if not lists:
        raise refusal(model, "it has no list of repeated blocks")
    return max(lists, key=lambda name: sum(param.numel() for param in lists[name].parameters()))


@dataclass
class _Watch:
    """What the hooks have seen so far."""

    model: nn.Module
    count: int
    depth: int = 0  # number of watched modules that are running, one inside the other
    entered: int = 0  # number of blocks entered
    finished: int = 0
    hidden: Any = None  # what the last block returned
    tuple_length: int | None = None
    before: dict[str, None] = field(default_factory=dict)
    after: dict[str, None] = field(default_factory=dict)
    broken: str | None = None

    def enter_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("hidden_states")
        if index != self.entered:
            self.broken = f"block {index} runs where block {self.entered} was expected"
        elif not isinstance(given, torch.Tensor):
            self.broken = f"block {index} gets its hidden states neither first nor by the name hidden_states"
        elif index and given is not self.hidden:
            self.broken = f"block {index} gets something else than what block {index - 1} returned"
        self.entered += 1

    def leave_block(self, output: Any) -> None:
        self.tuple_length = len(output) if isinstance(output, tuple) else None
        self.hidden = output[0] if isinstance(output, tuple) else output
        self.finished += 1

    def enter(self, name: str, module: nn.Module) -> None:
        self.depth += 1
        if self.depth > 1 or self.entered > self.finished:  # inside another module, or called by a block
            return
        if self.entered == 0:
            self.before[name] = None
        elif self.entered == self.count:
            self.after[name] = None
        elif any(True for _ in module.parameters()):
            self.broken = f"{name} runs between blocks {self.entered - 1} and {self.entered}"

    def leave(self) -> None:
        self.depth -= 1


def observe(model: nn.Module, blocks: str, run: Callable[[], Any]) -> Anatomy:
    """Watch ``run``, which is one forward of ``model``. Raises ModelError if blocks do not run one after the other."""
    members = list(model.get_submodule(blocks).children())
    watch = _Watch(model, len(members))
    inside = {id(part) for block in members for part in block.modules()}
    handles = []
    for index, block in enumerate(members):
        handles.append(block.register_forward_pre_hook(_entering(watch, index), with_kwargs=True))
        handles.append(block.register_forward_hook(lambda _module, _args, output: watch.leave_block(output)))
    for name, part in model.named_modules():
        around = blocks == name or blocks.startswith(f"{name}.") or not name
        if not around and id(part) not in inside:
            handles.append(part.register_forward_pre_hook(lambda module, _args, name=name: watch.enter(name, module)))
            handles.append(part.register_forward_hook(lambda _module, _args, _output: watch.leave()))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return _anatomy(watch, blocks)


def _entering(watch: _Watch, index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    return lambda _module, args, kwargs: watch.enter_block(index, args, kwargs)


def _anatomy(watch: _Watch, blocks: str) -> Anatomy:
    if watch.broken is None and watch.entered != watch.count:
        watch.broken = f"{watch.entered} of the {watch.count} blocks in {blocks} were run"
    both = next((name for name in watch.before if name in watch.after), None)
    if watch.broken is None and both is not None:
        watch.broken = f"{both} runs before the blocks and after them"
    if watch.broken is not None:
        raise refusal(watch.model, watch.broken)
    return Anatomy(blocks, watch.count, tuple(watch.before), tuple(watch.after), watch.tuple_length)
