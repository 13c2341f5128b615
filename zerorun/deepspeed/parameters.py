"""What scripts made for DeepSpeed ask of a parameter: ``ds_id``, ``ds_status``, ``ds_shape``, ``ds_tensor`` and the like.

DeepSpeed sets them on each parameter at stage 3, and its clients ask ``hasattr(param, "ds_id")``. Here they
are looked up when they are asked for, so they are always what is the case. Other parameters do not have them.
"""

from __future__ import annotations

import enum
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..distributed.tensor_shard import TensorShard
from ..engine.engine import Engine
from ..errors import CheckpointError, ConfigError, ConfigProblem
from ..log import warn_once
from ..plan.parameter_kinds import inside, packed_buffers
from ..zero.gathered_parameters import GatheredParameters, Shown
from ..zero.init import InitState, state_in_init
from ..zero.placeholders import UnsavedPlaceholder, placeholder
from ..zero.runtime import ModuleHook, Runtime
from ..zero.sharded_model import ParameterHome, ShardedModel, find
from ..zero.value_access import owned_part


class ZeroParamStatus(enum.Enum):
    """Whether a parameter has its value on this rank, has a placeholder, or is being unsharded."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """How a parameter is kept: as it is, partitioned over all ranks, or over those of one host."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def is_moe_param(param: Any) -> bool:
    """True for a parameter that a layer has marked as a part of an expert that other ranks do not have."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """Return the groups as a list, as they are: experts are trained and divided as other parameters are.

    ``param_groups``: one group, or several. ``max_group_size`` has no effect: what is unsharded at once is a block. Raises
    ConfigError for parameters of which other ranks do not have the same.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        reason = "some are marked as parts of experts that other ranks do not have; zerorun has no axis for experts."
        raise ConfigError(
            [ConfigProblem("param_groups", "...", reason, "Let each rank build all experts.")], "the optimizer"
        )
    return groups


def is_zero_param(param: Any) -> bool:
    """True for a parameter of which each rank has a part: at stage 3, or made in ``zero.Init``."""
    return isinstance(param, torch.Tensor) and hasattr(param, "ds_id")


# -- attributes of parameters ------------------------------------------------------------------------------------


def _home(param: torch.Tensor, name: str) -> tuple[ShardedModel, ParameterHome] | InitState:
    """Where stage 3 has the parameter, or what ``zero.Init`` knows of it. Raises AttributeError if neither has it."""
    found = find(param)
    if found is not None and (found[0] in _at_stage_3 or found[0].runtime.plan.shares_params):
        return found
    state = state_in_init(param)
    if state is None:
        raise AttributeError(f"{type(param).__name__!r} object has no attribute {name!r}: stage 3 does not have it")
    return state


_at_stage_3 = weakref.WeakSet[ShardedModel]()  # also those whose parameters stay whole, as on one rank


def _number(param: torch.Tensor) -> int:
    found = _home(param, "ds_id")
    if isinstance(found, InitState):
        return found.number
    unit, flat_group, entry = found[1].place
    return unit << 40 | flat_group << 32 | entry


def _status(param: torch.Tensor) -> ZeroParamStatus:
    found = _home(param, "ds_status")
    if isinstance(found, InitState):
        is_whole = found.is_whole
    else:
        model, home = found
        is_whole = home.unit.unsharded or id(param) in model.runtime.guard.held
    return ZeroParamStatus.AVAILABLE if is_whole else ZeroParamStatus.NOT_AVAILABLE


def _shape(param: torch.Tensor) -> torch.Size:
    found = _home(param, "ds_shape")
    if isinstance(found, InitState):
        return param.shape
    return torch.Size(found[1].flat_group.layout.entries[found[1].entry].shape)


def _numel(param: torch.Tensor) -> int:
    _home(param, "ds_numel")
    return _shape(param).numel()


def _persist(param: torch.Tensor) -> bool:
    """True if the parameter is whole all the time."""
    found = _home(param, "ds_persist")
    return not isinstance(found, InitState) and found[1].unit.resident


def _tensor(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the parameter, 1-D; it is empty on ranks that have nothing of it."""
    found = _home(param, "ds_tensor")
    if isinstance(found, InitState):
        return found.part
    return owned_part(found[1], found[1].flat_group.weight)


# -- blocks with whole values ------------------------------------------------------------------------------------


class GatheredBlock(GatheredParameters):
    """``deepspeed.zero.GatheredParameters``: without ``modifier_rank``, changes are no error.

    At stage 3 they are dropped at the end of the block, which warns once: an adapter that is merged into its weight and
    taken out again leaves rounding there. At other stages they stay as they are, on the rank that made them.
    """

    def _is_copied(self, model: ShardedModel) -> bool:
        return model in _at_stage_3 or self._modifier_rank is not None

    def _spoil(self, shown: Shown) -> None:
        """Nothing is told: what a script does there at other stages stays, as in DeepSpeed."""

    def _keeps(self, model: ShardedModel, home: ParameterHome, param: nn.Parameter, now: torch.Tensor) -> bool:
        if not self._leaves_edits(model) or not home.unit.resident:
            return False
        with torch.no_grad():
            home.flat_group.views[home.entry].copy_(model.parts.part(param, now))
        return True

    def _leaves_edits(self, model: ShardedModel) -> bool:
        return model not in _at_stage_3 and self._modifier_rank is None

    def _refuse(self, edited: list[str]) -> None:
        warn_once(
            "values that were changed inside GatheredParameters(...) without modifier_rank, as where adapters are merged "
            "and unmerged, are at its end as they were before, as in DeepSpeed. To keep changes, pass modifier_rank=0 and "
            "make them on that rank."
        )


class GatherReplacedLayerParams(GatheredBlock):
    """``deepspeed.module_inject.layers.GatherReplacedLayerParams``: parameters that tensor ranks divide, whole in a block.

    ``module`` has no effect: each parameter knows its engine.
    """

    def __init__(
        self, params: torch.Tensor | Iterable[torch.Tensor | None], module: nn.Module, enabled: bool = True
    ) -> None:
        super().__init__(params, enabled=enabled)


# -- state dicts -------------------------------------------------------------------------------------------------


class GivenValues:
    """The full values that the script has got last from an engine, while it keeps them and shards have not changed.

    Only rank 0 gets them. Others have empty tensors meanwhile, as in DeepSpeed: they call ``save_pretrained()`` along with
    it, and write nothing.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = weakref.ref(model)
        self._found: weakref.ref[Mapping[str, torch.Tensor]] = weakref.ref(OrderedDict())
        self._fences = self._elsewhere = -1

    def are_elsewhere(self, fences: int) -> None:
        """Rank 0 has got them, after so many ``fences``."""
        self._elsewhere = fences

    def remember(self, values: dict[str, torch.Tensor], fences: int) -> dict[str, torch.Tensor]:
        """Return ``values`` by name, as the script is to have them. They are those of after so many ``fences``."""
        kept = OrderedDict(values)  # an ordinary dict cannot be known weakly
        self._found, self._fences = weakref.ref(kept), fences
        return kept

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The full value of ``param``, on the CPU; None if the script has none, or one that it has put there itself.

        What this rank keeps whole changes without a fence: its value is not known here.
        """
        model, found = self._model(), self._found()
        if model is not None and self._elsewhere == model.comm.fences:
            return torch.empty(0, dtype=param.dtype)
        home = None if model is None else model.homes.get(id(param))
        if model is None or found is None or home is None or home.unit.resident or self._fences != model.comm.fences:
            return None
        value = found.get(home.name)
        shard = model.parts.shards.get(id(param))
        shape = param.shape if shard is None else torch.Size(shard.shape)
        return value if value is not None and (value.dtype, value.shape) == (param.dtype, shape) else None


_given = weakref.WeakKeyDictionary[ShardedModel, GivenValues]()


def give_values(engine: Engine, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
    """Return ``engine.consolidated_state_dict()``. While rank 0 keeps it, ``module.state_dict()`` has its values there.

    OpenRLHF calls peft's save_pretrained() then, which asks the module, and writes what it got from here over its file.
    """
    found = engine.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
    model = engine.sharded_model
    given = _given.setdefault(model, GivenValues(model))
    if found is None:
        given.are_elsewhere(model.comm.fences)
        return None
    return given.remember(found, model.comm.fences)


def show_placeholders(engine: Engine) -> None:
    """Let ``module.state_dict()`` return placeholders of the whole shapes, where ranks have parts, and not raise.

    So does DeepSpeed at stage 3; of what tensor ranks divide it returns the parts. Parameters at stage 3 have their
    attributes from now on.
    """
    runtime = engine.runtime
    runtime.guard.be_lenient()
    if engine.config.zero_optimization.stage == 3:
        _at_stage_3.add(engine.sharded_model)
    shards = engine.sharded_model.parts.shards
    if not runtime.plan.shares_params and not shards:
        return

    runtime.guard.show_placeholders()
    given = _given.setdefault(engine.sharded_model, GivenValues(engine.sharded_model))
    hook = MarkPlaceholders(runtime, shards, given)
    runtime.keep(layer.register_state_dict_post_hook(hook) for layer in engine.module.modules())


class MarkPlaceholders(ModuleHook):
    """Called for the state dict of a module, and of each inside it: no placeholder is saved with it."""

    def __init__(self, runtime: Runtime, shards: Mapping[int, TensorShard], given: GivenValues) -> None:
        self._runtime, self._shards, self._given = runtime, shards, given

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        if self._runtime.guard.state_dict_allowed:  # the engine's own, which puts the full values in
            return
        for name, param in (*module.named_parameters(remove_duplicate=False), *packed_buffers(module).items()):
            shown = state.get(prefix + name)
            if shown is None or isinstance(shown, UnsavedPlaceholder):
                continue
            shard = None if id(param) in self._runtime.guard.held else self._shards.get(id(param))
            if shard is not None or any(_is_away(tensor) for _, tensor in inside(param)):
                whole = param if shard is None else torch.empty(shard.shape, dtype=param.dtype, device="meta")
                marked = placeholder(whole, param.device).as_subclass(UnsavedPlaceholder)
                value = self._given.of(param)
                state[prefix + name] = marked if value is None else value


def tensors_by_name(engine: Engine) -> dict[str, torch.Tensor]:
    """The parameters and buffers of the model themselves, by the names that they have in its state dict."""
    found = engine.runtime.guard.own_state_dict(engine.module)
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@contextmanager
def loading(engine: Engine, state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """In the block, at stage 3, what ``state`` has values of is whole, and gets those of rank 0 at its end.

    Yields ``state`` as the module loads it: instead of placeholders it has the parameters and packed buffers themselves,
    and of parameters that tensor ranks divide this rank's parts, where they are not whole. Names and placeholders of
    another model stay in it, for the module to refuse. Raises CheckpointError for a value that is not that of a whole
    parameter, where tensor ranks divide it. All ranks must call it.
    """
    parts, away, changed = engine.sharded_model.parts, list[torch.Tensor](), dict[str, torch.Tensor]()
    homes, divided = engine.sharded_model.homes, engine.runtime.plan.shares_params
    for name, tensor in tensors_by_name(engine).items():
        if name not in state:
            continue
        value, shard = state[name], parts.shards.get(id(tensor))
        shape = tuple(tensor.shape if shard is None else shard.shape)
        is_whole = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
        if shard is not None and not is_whole:
            raise _not_whole(name, value, shape)
        if is_whole and isinstance(value, UnsavedPlaceholder):
            changed[name] = tensor
        elif divided and any(id(member) in homes for _, member in inside(tensor)):
            away.append(tensor)  # what is whole, too: an error brings all of them back
        elif shard is not None:
            changed[name] = parts.part(tensor, value.detach())
    with GatheredBlock(away, modifier_rank=0) if away else nullcontext():
        yield {**state, **changed} if changed else state


def _not_whole(name: str, value: Any, shape: tuple[int, ...]) -> CheckpointError:
    given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    return CheckpointError(
        f"load_module_state_dict(): the value for {name!r} is {given}, and not a tensor of shape {shape}. Tensor ranks "
        "divide this parameter, and each takes its part of the whole value. Nothing was loaded. Remedy: give every rank "
        "whole values, as engine.state_dict() of this model returns them."
    )


def _is_away(tensor: torch.Tensor) -> bool:
    found = find(tensor)
    divided = found is not None and found[0].runtime.plan.shares_params
    return divided and _status(tensor) is ZeroParamStatus.NOT_AVAILABLE


_DEEPCOPY = nn.Parameter.__deepcopy__


def copied_whole(param: nn.Parameter, memo: dict[int, Any]) -> Any:
    """Copy ``param`` with its value, also where ``zero.Init`` has partitioned it: then all ranks must copy it.

    In DeepSpeed the value would be empty, and peft, which copies ``modules_to_save``, opens a block if it sees that.
    """
    state = None if id(param) in memo else state_in_init(param)
    if state is None or state.is_whole:
        return _DEEPCOPY(param, memo)
    with GatheredParameters([param]):
        return _DEEPCOPY(param, memo)


def install() -> None:
    """Give all parameters of this process the attributes. The mode does it at ``import deepspeed``."""
    nn.Parameter.__deepcopy__ = copied_whole  # type: ignore[assignment,method-assign]
    for name, get in {
        "ds_id": _number, "ds_status": _status, "ds_shape": _shape, "ds_numel": _numel,
        "ds_persist": _persist, "ds_tensor": _tensor,
    }.items():  # fmt: skip
        setattr(nn.Parameter, name, property(get))
