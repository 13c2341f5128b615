"""Merging: turn a model with adapters into one without, of which every rank holds the layers that it has merged.

[Note: a skeleton]
PEFT's own ``merge_and_unload`` does the work, on a copy of the model that has no hooks, and whose parameters are
placeholders of one element. When it merges a layer, the parameters of that layer are gathered, one rank merges them and
keeps the result, and on all other ranks they become placeholders again. Tensors that it leaves alone come from their
shards. So beside its shards, a rank needs memory for its share of the merged layers and, for a moment, for one block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..plan.units import stored_name
from ..zero.value_access import WholeValues
from .inventory import Inventory, TensorPart
from .write_plan import MODEL


@dataclass
class _LayerPlace:
    """A tensor of the model with adapters: its name in the inventory, and what stands in for it in the skeleton.

    ``owner``: the rank that has merged it; -1 while no rank has.
    """

    name: str
    live: torch.Tensor
    stand_in: torch.Tensor
    owner: int = -1


class Merged:
    """The merged model. Making it is collective, on all ranks that shard the model.

    ``dtype``: the dtype of the export. If it is wider than the model's, layers are merged in it, and from the masters.
    Raises CheckpointError for adapters that cannot be merged.
    """

    def __init__(self, adapted: Any, inventory: Inventory, dtype: torch.dtype | None) -> None:
        topology = inventory.subject.topology
        self._rank, self._loads = topology.rank, dict.fromkeys(topology.ranks_along("data"), 0)  # bytes merged by each
        self._values = WholeValues(inventory.subject.module)
        self._dtype = dtype
        self._of_param: dict[int, _LayerPlace] = {}  # by id of the skeleton's parameter
        self._of_memory: dict[int, _LayerPlace] = {}  # by address: layers may be given new parameters in the same memory
        self._is_merging = False
        self._problem: Exception | None = None
        skeleton = self._skeleton(adapted, inventory)
        try:
            with torch.no_grad():
                self.model: nn.Module = skeleton.merge_and_unload()
        except Exception as error:  # the same on all ranks
            self._problem = self._problem or error
        if self._problem is not None:
            raise CheckpointError(
                f"PEFT cannot merge this adapter ({type(self._problem).__name__}: {self._problem}). Remedy: export it "
                "without merge_adapter."
            ) from self._problem

    def _skeleton(self, adapted: Any, inventory: Inventory) -> Any:
        memo: dict[int, Any] = {}
        for name, param in adapted.named_parameters():
            if type(param) is not nn.Parameter:
                raise CheckpointError(
                    f"{name!r} is a {type(param).__name__}, and adapters are not merged into quantized weights. Remedy: "
                    "export without merge_adapter, and merge into the model that is not quantized."
                )
            wide = param.is_floating_point() and self._dtype is not None and self._dtype.itemsize > param.dtype.itemsize
            stand_in = torch.zeros(1, dtype=self._dtype if wide else param.dtype).expand(param.shape)
            memo[id(param)] = nn.Parameter(stand_in, param.requires_grad)
            self._remember(memo[id(param)], _LayerPlace(_name(name, inventory), param, stand_in))
        for name, buffer in adapted.named_buffers():
            memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
            self._remember(memo[id(buffer)], _LayerPlace(_name(name, inventory), buffer, memo[id(buffer)]))
        for module in adapted.modules():
            for name, value in vars(module).items():
                if "hooks" in name and isinstance(value, dict):
                    memo[id(value)] = type(value)()
                elif name == "forward":  # replaced by activation checkpointing or by compiling
                    memo[id(value)] = None
        skeleton = copy.deepcopy(adapted, memo)
        for module in skeleton.modules():
            vars(module).pop("forward", None)
            if hasattr(module, "get_base_layer") and hasattr(module, "merge"):
                module.merge = self._merging(module, module.merge)
        return skeleton

    def _remember(self, tensor: torch.Tensor, place: _LayerPlace) -> None:
        self._of_param[id(tensor)] = self._of_memory[_address(tensor)] = place

    def _merging(self, layer: Any, merge: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``layer.merge``, so that it runs on one rank only, with whole values."""

        def merged(*args: Any, **kwargs: Any) -> None:
            if self._is_merging:  # a layer inside one whose values are there already
                merge(*args, **kwargs)
                return
            base = list(layer.get_base_layer().parameters())
            owner = self._owner_of(base)
            params = [(param, self._of_param[id(param)]) for param in layer.parameters()]
            self._fill([pair for pair in params if pair[1].owner < 0], owner == self._rank)
            if owner == self._rank and self._problem is None:
                self._is_merging = True
                try:
                    merge(*args, **kwargs)
                except Exception as error:  # the other ranks go on, and gather with this one
                    self._problem = error
                self._is_merging = False
            self._keep(base, owner)
            for param, place in params:
                if place.owner != self._rank:
                    param.data = place.stand_in

        return merged

    def _owner_of(self, base: Sequence[nn.Parameter]) -> int:
        """The rank that has merged any of these parameters; if there is none, the rank that has merged the least."""
        known = [place.owner for param in base if (place := self._of_param[id(param)]).owner >= 0]
        return known[0] if known else min(self._loads, key=lambda rank: self._loads[rank])

    def _fill(self, params: list[tuple[nn.Parameter, _LayerPlace]], here: bool) -> None:
        self._values.forget_all_but([place.live for _, place in params])
        for param, place in params:
            value = self._values.value(place.live, master=param.dtype != place.live.dtype)
            if here:
                param.data = value.to("cpu", param.dtype, copy=True)

    def _keep(self, base: Sequence[nn.Parameter], owner: int) -> None:
        for param in base:
            place = self._of_param[id(param)]
            if place.owner < 0:
                place.owner = owner
                self._loads[owner] += param.numel() * param.element_size()
            if owner == self._rank:
                self._of_memory[_address(param)] = place

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors of the merged model's state dict by name; each tied tensor once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(_address(value), (stored_name(name), value))
        return dict(found.values())

    def parts(self, live: Sequence[TensorPart]) -> Iterator[TensorPart]:
        """What this rank has of the merged model. ``live``: what it has of the model with adapters."""
        by_name: dict[str, list[TensorPart]] = {}
        for part in live:
            by_name.setdefault(part.name, []).append(part)
        for name, value in self.named().items():
            place = self._of_memory[_address(value)]
            if place.owner < 0:
                yield from (replace(part, name=name) for part in by_name.get(place.name, ()))
            elif place.owner == self._rank:
                yield TensorPart(MODEL, name, 0, value.detach().reshape(-1), tuple(value.shape))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name(name: str, inventory: Inventory) -> str:
    stored = stored_name(name)
    return inventory.aliases.get(stored, stored)
