"""Hooks for ``state_dict()`` and ``load_state_dict()`` of a sharded model and of every module inside it.

Scripts save and load parts of a model by themselves: an encoder, the layers, an adapter. So all modules that have
parameters of the engine below them have the hooks, and not the whole model alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from ..errors import ReleasedParameterError
from ..plan.parameter_kinds import inside, own_members, packed_buffers
from .flat_group import TrainedGroup, take_weight
from .offloaded_states import WEIGHTS
from .runtime import ModuleHook, Removable
from .sharded_model import ParameterHome, ShardedModel
from .unit import Unit, finish_updates

_PARTS, _PLACEHOLDERS = "parts of the model, of which other ranks have the rest", "placeholders"


def guard_state_dict(module: nn.Module, model: ShardedModel, lacks: Callable[[nn.Module], bool]) -> Iterator[Removable]:
    """Make plain ``state_dict()`` of ``module`` and those inside it return full tensors or raise, never placeholders.

    ``lacks``: True for a module that looks whole, but has modules that only other ranks have.
    """
    for layer in _guarded(module, model):
        yield layer.register_state_dict_pre_hook(StateDictGuard(layer, model, lacks))


def guard_copies(model: ShardedModel) -> Iterator[Removable]:
    """Make copies and pickles of single parameters raise while they are placeholders, as those of modules do."""
    for unit in model.units:
        if not unit.resident:
            for group in unit.flat_groups:
                yield from map(partial(CopyGuard, model), group.params, group.names)


def adopt_loaded_weights(module: nn.Module, model: ShardedModel) -> Iterator[Removable]:
    """Let ``load_state_dict()`` of ``module`` and those inside it also set masters that are not the weights themselves."""
    adoption = Adoption(model)
    for layer in _guarded(module, model):
        yield layer.register_load_state_dict_pre_hook(AdoptionBegins(adoption))
        yield layer.register_load_state_dict_post_hook(adoption)


def _guarded(module: nn.Module, model: ShardedModel) -> list[nn.Module]:
    """``module`` and all inside it that have parameters of ``model``, or have a module that has; each once."""
    return [
        layer for layer in module.modules() if layer is module or any(_homes(inner, model) for inner in layer.modules())
    ]


def _homes(layer: nn.Module, model: ShardedModel) -> list[tuple[torch.Tensor, ParameterHome]]:
    """The parameters of ``layer`` itself that ``model`` has, and where they lie."""
    return [(tensor, model.homes[id(tensor)]) for tensor in own_members(layer) if id(tensor) in model.homes]


def _units_in(module: nn.Module, model: ShardedModel) -> list[Unit]:
    """The units that have parameters of ``module``, which is one of many that are asked: not always those of the model."""
    homes = (home for layer in module.modules() for _, home in _homes(layer, model))
    return list({home.unit.index: home.unit for home in homes}.values())


def _is_placeholder(model: ShardedModel, tensor: torch.Tensor) -> bool:
    home = model.homes.get(id(tensor))
    return home is not None and not home.unit.resident and id(tensor) not in model.runtime.guard.held


class StateDictGuard(ModuleHook):
    """Called before the state dict of ``layer`` is made, and asked before it is copied or pickled."""

    def __init__(self, layer: nn.Module, model: ShardedModel, lacks: Callable[[nn.Module], bool]) -> None:
        self._layer, self._model, self._lacks = layer, model, lacks

    def __reduce__(self) -> Any:
        """Raises ReleasedParameterError."""
        homes = _homes(self._layer, self._model)
        away = WEIGHTS in self._model.runtime.made.states.away
        if (away and homes) or any(_is_placeholder(self._model, tensor) for tensor, _ in homes):
            raise ReleasedParameterError(
                f"a copy or a pickle of {self._name(self._layer)} would hold {_PLACEHOLDERS} and not its weights. Remedy: "
                "make it inside `with zerorun.zero.GatheredParameters(list(module.parameters())):`, on all ranks, where it "
                "is that of an ordinary module; or take engine.state_dict()."
            )
        return super().__reduce__()

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raises ReleasedParameterError."""
        runtime = self._model.runtime
        finish_updates(_units_in(module, self._model))
        runtime.made.states.bring_back(WEIGHTS)
        if runtime.guard.state_dict_allowed:
            return
        lacks = self._lacks(module)
        what = _PARTS if lacks else self._missing(module)
        if lacks or (what and not runtime.guard.placeholders_shown):
            raise ReleasedParameterError(
                f"state_dict() of {self._name(module)} {'here' if what == _PARTS else 'at stage 3'} would hold {what}: no "
                "rank has the full weights. Remedy: call engine.state_dict(), which has all weights by their names, or "
                "engine.export(dir) for a Hugging Face model, on all ranks."
            )

    def _missing(self, module: nn.Module) -> str:
        """What the state dict would hold in place of values; "" if all are here, as in a block of GatheredParameters."""
        held, shards, found = self._model.runtime.guard.held, self._model.parts.shards, ""
        for layer in module.modules():
            for tensor, _ in _homes(layer, self._model):
                if id(tensor) not in held and id(tensor) in shards:
                    return _PARTS
                if _is_placeholder(self._model, tensor):
                    found = _PLACEHOLDERS
        return found

    def _name(self, module: nn.Module) -> str:
        name = next((name for name, layer in self._model.module.named_modules() if layer is module), "")
        return f"module {name!r}" if name else "the module"


class CopyGuard:
    """Stands for the methods by which ``param`` is copied and pickled, as where a script saves a dict of parameters.

    It keeps nothing alive: what autograd has of a parameter hides from the collector whatever the parameter refers to.
    """

    def __init__(self, model: ShardedModel, param: torch.Tensor, name: str) -> None:
        self._model, self._param, self._name = weakref.ref(model), TensorWeakRef(param), name
        self._ways = {way: partial(self._make, way) for way in ("__deepcopy__", "__reduce_ex__")}
        vars(param).update(self._ways)

    def _make(self, way: str, *args: Any) -> Any:
        """Raises ReleasedParameterError."""
        model, param = self._model(), self._param()
        if model is not None and _is_placeholder(model, param):
            raise ReleasedParameterError(
                f"a copy or a pickle of parameter {self._name!r} would hold a placeholder (NaN) and not its values. "
                "Remedy: make it inside `with zerorun.zero.GatheredParameters([parameter]):`, on all ranks; or take "
                "engine.state_dict()."
            )
        self.remove()  # a pickle has the attributes, too
        try:
            return getattr(param, way)(*args)
        finally:
            vars(param).update(self._ways)

    def remove(self) -> None:
        param = self._param()
        for way in self._ways if param is not None else ():
            vars(param).pop(way, None)


class Adoption(ModuleHook):
    """Called when a module has loaded its own parameters, and those inside it theirs."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._before: dict[int, torch.Tensor] = {}  # by id(parameter), where the master itself is overwritten

    def refuse_placeholders(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Raise ReleasedParameterError if ``state`` has values for placeholders, or whole ones for parts of this rank."""
        for name, param in (*module.named_parameters(remove_duplicate=False), *packed_buffers(module).items()):
            given = state.get(prefix + name)
            if given is None or given is param:  # which stays as it is
                continue
            if any(_is_placeholder(self._model, tensor) for _, tensor in inside(param)):
                here = f"load_state_dict() at stage 3 has a value for {name!r}, of which only a placeholder is on this rank"
            elif self._is_whole_of_a_part(param, given):
                here = f"load_state_dict() has the whole value of {name!r}, of which each tensor rank has a part"
            else:
                continue
            raise ReleasedParameterError(
                f"{here}. Nothing was loaded. Remedy: engine.load_state_dict(weights), with those of the whole model, on "
                "all ranks; or call it inside `with zerorun.zero.GatheredParameters(list(module.parameters()), "
                "modifier_rank=0):`; or zerorun.load_pretrained(model, dir) before initialize()."
            )

    def _is_whole_of_a_part(self, param: torch.Tensor, given: Any) -> bool:
        """Whether tensor ranks divide ``param``, no block has it whole, and ``given`` is the whole value."""
        shard = self._model.parts.shards.get(id(param))
        if shard is None or id(param) in self._model.runtime.guard.held or not isinstance(given, torch.Tensor):
            return False
        return tuple(given.shape) == tuple(shard.shape) != tuple(param.shape)

    def begin(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """``module`` is going to load its own parameters, those that ``state`` has."""
        self._model.make_ready(_units_in(module, self._model))
        for name, param in module.named_parameters(recurse=False):
            if prefix + name in state and id(param) in self._model.homes:
                self._model.half_loaded.overwrite(self._model.homes[id(param)].name)
        for tensor, _, flat_group in self._own(module):
            if flat_group.plan.master_is_weight:
                self._before[id(tensor)] = tensor.detach().clone()

    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        self._model.make_ready(_units_in(module, self._model))
        for tensor, home, flat_group in self._own(module):
            entry = flat_group.layout.entries[home.entry]
            loaded, before = flat_group.full[entry.offset : entry.end], None
            if flat_group.plan.master_is_weight:  # a class that loads in a way of its own calls no hook before
                before = self._before.pop(id(tensor), torch.full_like(loaded, torch.nan))
            take_weight(flat_group, home.entry, loaded, before)

    def _own(self, module: nn.Module) -> Iterator[tuple[torch.Tensor, ParameterHome, TrainedGroup]]:
        """The parameters of ``module`` itself that are whole, and whose masters are not all that there is of them."""
        for tensor, home in _homes(module, self._model):
            flat_group = home.flat_group
            if isinstance(flat_group, TrainedGroup) and home.unit.resident and flat_group.has_more_than_weights:
                yield tensor, home, flat_group


class AdoptionBegins(ModuleHook):
    """Called before a module loads its own parameters."""

    def __init__(self, adoption: Adoption) -> None:
        self._adoption = adoption

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *unused: Any) -> None:
        """Raises ReleasedParameterError."""
        self._adoption.refuse_placeholders(module, state, prefix)
        self._adoption.begin(module, state, prefix)
