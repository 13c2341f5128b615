"""Init: build a model whose parameters are partitioned as they are created.

[Note: how it works]
Inside ``with Init():`` a parameter is whole from its creation until a parameter of another module is created or touched;
then every rank keeps its part of rank 0's values, and the parameter becomes a loud placeholder. Every torch function that
gets such a placeholder as an argument, or reads its ``.data``, first makes it whole again. So initialisation code of any
kind, wherever it stands, works on full tensors, and draws the same random numbers as it would without ``Init``. At no time
does a rank hold more than its parts and the parameters of one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import init_distributed
from ..errors import ModelError
from .runtime import tensors_in
from .unit import placeholder

_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@dataclass
class _Part:
    """What this rank keeps of a partitioned parameter: ``shard`` [ceil(numel / ranks)] and the shape of the whole."""

    shard: torch.Tensor
    shape: torch.Size


# parameter -> what this rank keeps of it. By identity; an entry goes with its parameter.
_partitioned = WeakIdKeyDictionary()


def whole_value(param: torch.Tensor) -> torch.Tensor | None:
    """The full value of a parameter that ``Init`` partitioned; None for any other. All ranks must call it."""
    part = _partitioned.get(param)
    return _whole(part) if part is not None else None


def part_of(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part [ceil(numel / ranks)] of a parameter that ``Init`` partitioned, in place; None for any other."""
    part = _partitioned.get(param)
    return part.shard if part is not None else None


def keep_part(module: nn.Module, param: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Turn a parameter on the meta device into a partitioned one on ``device``: its part, still to be filled."""
    shard = torch.zeros(-(-param.numel() // dist.get_world_size()), dtype=param.dtype, device=device)
    made = nn.Parameter(placeholder(param, device), requires_grad=param.requires_grad)
    for holder in module.modules():
        for name, other in holder._parameters.items():
            if other is param:
                holder._parameters[name] = made
    _partitioned[made] = _Part(shard, param.shape)
    return shard


def forget_part(param: torch.Tensor) -> None:
    """The engine has taken the values over."""
    _partitioned.pop(param, None)


def partitioned(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``model`` that ``Init`` partitioned, in the order of their names."""
    return [param for param in model.parameters() if param in _partitioned]


@torch.no_grad()
def settle(params: Sequence[nn.Parameter], model: nn.Module, share_of: Callable[[nn.Parameter, torch.Tensor], Any]) -> None:
    """Give those of ``params`` that ``model`` still has their values, of which ``share_of(param, whole)`` is this rank's.

    ``params``: partitioned ones, the same in the same order on all ranks, which must all call it: one after the other is
    put together. Where a rank keeps none of it, it is freed at once.
    """
    here = {id(param) for param in model.parameters()}
    for param in params:
        whole = whole_value(param)
        forget_part(param)
        if id(param) in here:
            param.data = share_of(param, whole)  # type: ignore[arg-type]
        del whole  # before the next is made


def _whole(part: _Part) -> torch.Tensor:
    size, numel = dist.get_world_size(), part.shape.numel()
    flat = torch.empty(part.shard.numel() * size, dtype=part.shard.dtype, device=part.shard.device)
    if size == 1:  # gloo would let go of its tensors a little later
        flat.copy_(part.shard)
    else:
        dist.all_gather(list(flat.chunk(size)), part.shard)
    return flat[:numel].view(part.shape)


def _partition(param: torch.Tensor) -> None:
    """Keep this rank's part of rank 0's value, and leave a placeholder."""
    size, rank = dist.get_world_size(), dist.get_rank()
    flat = param.detach().reshape(-1)
    if size > 1:
        dist.broadcast(flat, 0)
    length = -(-flat.numel() // size)
    shard = torch.zeros(length, dtype=flat.dtype, device=flat.device)
    own = flat[rank * length : (rank + 1) * length]
    shard[: own.numel()].copy_(own)
    _partitioned[param] = _Part(shard, param.shape)
    param.data = placeholder(param)


def refuse_partitioned(params: Iterable[torch.Tensor], what: str) -> None:
    """Raise ModelError if ``Init`` has partitioned one of ``params``, or is about to: then ``what`` cannot be done."""
    if Init.open or any(param in _partitioned for param in params):
        raise ModelError(
            f"{what} cannot be made of parameters that zerorun.zero.Init partitions: they are spread over all ranks, of "
            "which others would need other values. Remedy: build the whole model in the block and let initialize() cut and "
            "divide it after the block, or build the parts outside of it."
        )


class Init(TorchFunctionMode):
    """Context in which new parameters are partitioned as they are created. All ranks must run the same code in it.

    ``module``: partition an existing module at once. ``config_dict_or_path`` is accepted for loops made for DeepSpeed;
    nothing of it is needed here. ``enabled=False`` makes the context do nothing.
    """

    open: ClassVar[int] = 0  # blocks that the program is in

    def __init__(self, module: nn.Module | None = None, *, config_dict_or_path: Any = None, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled
        self._owner = WeakIdKeyDictionary()  # parameter -> the module that registered it
        self._current: nn.Module | None = None  # the module whose parameters are whole
        self._whole_now: list[torch.Tensor] = []
        self._hook: Any = None
        if module is not None and enabled:
            init_distributed()
            for param in module.parameters():
                if param not in _partitioned and not param.is_meta:
                    _partition(param)

    def __enter__(self) -> Init:
        if self._enabled:
            init_distributed()
            Init.open += 1
            self._hook = nn.modules.module.register_module_parameter_registration_hook(self._created)
            super().__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._enabled:
            super().__exit__(kind, error, trace)
            Init.open -= 1
            self._hook.remove()
            if kind is None:
                self._partition_all()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ != "__get__" or func == _READ_DATA:  # shape, dtype, ... need no values
            for tensor in tensors_in([args, kwargs]):
                if tensor in self._owner:
                    self._touch(tensor)
        return func(*args, **kwargs)

    def _created(self, module: nn.Module, name: str, param: Any) -> None:
        if isinstance(param, nn.Parameter) and param not in self._owner and not param.is_meta:
            self._owner[param] = module
            self._make_room(module)
            self._whole_now.append(param)

    def _touch(self, param: torch.Tensor) -> None:
        self._make_room(self._owner[param])
        part = _partitioned.get(param)
        if part is not None:
            with torch._C.DisableTorchFunction():
                param.data = _whole(part)
            forget_part(param)
            self._whole_now.append(param)

    def _make_room(self, module: nn.Module) -> None:
        if self._current is not module:
            self._partition_all()
            self._current = module

    def _partition_all(self) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for param in self._whole_now:
                _partition(param)
        self._whole_now.clear()
