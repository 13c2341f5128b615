"""Init: build a model whose parameters are partitioned as they are created.

[Note: how it works]
Inside ``with Init():`` a parameter is whole from its creation until a parameter of another module is created or touched.
Then every rank keeps its part of rank 0's values, and the parameter becomes a loud placeholder. Every torch function that
gets such a placeholder as an argument, or reads its ``.data``, first makes it whole again. So initialisation code of any
kind, wherever it is, works on full tensors, and draws the same random numbers as it would without ``Init``. A rank never
holds more than its parts and the parameters of one module, or of those modules that one function works on.

[Note: memory that several tensors share]
``p.data``, ``p[0]`` and ``nn.Parameter(p.detach())`` share the memory of ``p``: what is written to one of them is seen by
all. This must still hold after ``p`` has become a placeholder. So each part remembers the memory that its parameter had. A
function that gets any tensor in this memory first makes the parameters there whole: in the same memory if some tensor still
keeps it alive, or else in new memory for all of them. Gathers must be the same on all ranks, no matter when their garbage
collectors run, so all parameters that were partitioned stay alive until the block ends.

[Note: empty parameters]
Who builds a model on the meta device and loads a file makes empty parameters in place of those that the file lacks, and
then initialises them, module by module. Transformers makes them in the order of a set, which differs from rank to rank. So
an empty parameter in such a place waits until a function gets one that waits: all are partitioned then, in the order in
which the places were made. They take no memory as long as nobody has written to them.

``nn.Parameter(p)`` is not a torch function, and returns a tensor that shares the one element of p's placeholder. It is
recognised by this, and gets the memory of ``p`` as soon as it is registered or used. Nor is ``p.set_(values)`` a torch
function: a partitioned parameter that no longer shows its placeholder was given other values, and these count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ..distributed.same_data import SAME, compare
from ..distributed.transport import world
from ..distributed.transport.process_group import init_distributed
from ..errors import ModelError, OrderError, ReleasedParameterError
from ..plan.parameter_kinds import (
    inside,
    is_packed,
    let_go_of_memory,
    members,
    named_members,
    own_members,
    stays_apart,
    strides_of,
)
from .placeholders import UnsavedPlaceholder, is_loud, placeholder, storage_key, tensors_in

_TENSOR: Any = torch.Tensor
_READS_VALUES = {getattr(_TENSOR, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_ALIGNMENT = 16  # bytes; enough for every dtype
_OTHER_CODE = "ranks run different code inside zerorun.zero.Init"
_SAME_CODE = "run the same code on all ranks, and go through no set in it: its order differs from process to process"
_numbers = count()  # numbers for partitioned parameters


class _Memory:
    """Memory that parameters had while they were whole. It exists as long as some other tensor shares it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = StorageWeakRef(storage)
        self.parts: WeakSet[_Part] = WeakSet()  # the parts of the partitioned parameters that had this memory

    def storage(self) -> torch.UntypedStorage | None:
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # type: ignore[attr-defined]
        return found


@dataclass(eq=False)
class _Part:
    """What this rank keeps of a partitioned parameter: ``shard`` [ceil(numel / ranks)] and the shape of the whole.

    ``memory``: where the whole parameter was, from byte ``low`` to ``high``; None if no other tensor can share it.
    ``stride``: that of the whole parameter; None if it was contiguous.
    """

    shard: torch.Tensor
    shape: torch.Size
    param: Callable[[], torch.Tensor | None] = lambda: None
    memory: _Memory | None = None
    low: int = 0
    high: int = 0
    stride: tuple[int, ...] | None = None
    order: int = field(default_factory=lambda: next(_numbers))  # number in the order of partitioning, equal on all ranks


@dataclass(eq=False)
class _Shown:
    """The placeholder of a parameter. It is kept while the parameter is whole: tensors may have been made from it."""

    tensor: torch.Tensor
    param: Callable[[], torch.Tensor | None]


# parameter -> the part that this rank keeps, and the placeholder. By identity; an entry is dropped with its parameter.
_partitioned = WeakIdKeyDictionary()
_shown_by = WeakIdKeyDictionary()
# parameter -> its part, while it has its full value for a while.
_held = WeakIdKeyDictionary()
# Packed weight -> the hook on its layer that finds forwards without an engine.
_forwards = WeakIdKeyDictionary()
# Key of a storage -> the placeholder in it, or the memory that it was for whole parameters.
_shown: WeakValueDictionary[int, _Shown] = WeakValueDictionary()
_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()


class Held:
    """A partitioned parameter that has its full value for a while. ``hold`` makes it."""

    def __init__(self, param: torch.Tensor, part: _Part) -> None:
        self.param, self._part = param, part
        whole = _whole(part)
        _partitioned.pop(param)
        _shown_by.pop(param, None)
        _held[param] = part
        _show(param, whole)

    def put_back(self) -> None:
        """Partition the parameter as it was before. Changes of the full value are dropped."""
        _show(self.param, placeholder(self._part.shard.new_empty(()).expand(self._part.shape)))
        _held.pop(self.param, None)
        _keep(self.param, self._part)


def hold(params: Iterable[torch.Tensor]) -> list[Held]:
    """Give those of ``params`` that ``Init`` partitioned their full values, and return them. All ranks must call it.

    They are made whole in the order of their partitioning, which is the same on all ranks; the order of ``params`` need not
    be. Raises OrderError, on all ranks alike, if ranks pass different parameters.
    """
    found = {id(param): (param, part) for param in params if (part := _partitioned.get(param)) is not None}
    chosen = sorted(found.values(), key=lambda pair: pair[1].order)
    problem = "GatheredParameters(...) was given different parameters on different ranks"
    _compare(problem, [_described(part) for _, part in chosen])
    return [Held(param, part) for param, part in chosen]


def partitioned_as(param: torch.Tensor) -> int | None:
    """Return the number under which ``Init`` partitioned ``param``, the same on all ranks; None if it did not."""
    part = _partitioned.get(param)
    return part.order if part is not None else None


def divide_again(held: Sequence[Held], source: int) -> None:
    """Partition the full values that rank ``source`` has now. All ranks must call it, with the result of ``hold``.

    Raises OrderError, on all ranks alike, if shapes or dtypes differ; the parameters are then as before ``hold``.
    """
    try:
        take_values([one.param for one in held], source)
    except OrderError:
        for one in held:
            one.put_back()
        raise
    with torch.no_grad():
        for one in held:
            _held.pop(one.param, None)
            release(one.param)


def take_values(params: Sequence[torch.Tensor], source: int) -> None:
    """Give ``params``, which are whole, the values that they have on rank ``source``. All ranks must call it.

    Raises OrderError, on all ranks alike, if their shapes or dtypes differ.
    """
    now = [f"a parameter of shape {tuple(param.shape)} and {param.dtype}" for param in params]
    with torch._C.DisableTorchFunction(), torch.no_grad():
        _compare("parameters were given different shapes or dtypes on different ranks", now, "change them on all ranks")
        for param in params if params and world.size() > 1 else ():
            values = param.detach().contiguous()
            world.broadcast(values, source, "GatheredParameters: broadcast of an edited parameter")
            if _is_expanded(param):
                _show(param, values)
            else:
                param.copy_(values)  # in place, because other tensors may share its memory


def _number_alike() -> None:
    """Continue numbering from the same number on all ranks. Numbers may differ after an error on some ranks only."""
    global _numbers
    if world.size() > 1:
        _numbers = count(max(map(int, _of_all(torch.tensor([next(_numbers)], device="cpu")))))


def _described(part: _Part) -> str:
    return f"the parameter of shape {tuple(part.shape)} that zerorun.zero.Init partitioned as number {part.order}"


def _compare(problem: str, wanted: Sequence[str], remedy: str = SAME) -> None:
    if wanted and world.size() > 1:
        compare(problem, wanted, _of_all, world.gather_values, remedy)


def _of_all(mine: torch.Tensor) -> list[torch.Tensor]:
    return world.all_gather(mine, "zerorun.zero.Init: whether all ranks do the same")


def whole_value(param: torch.Tensor) -> torch.Tensor | None:
    """Return the full value of a parameter that ``Init`` partitioned; None for any other. All ranks must call it."""
    part = _partitioned.get(param)
    return _whole(part) if part is not None else None


def part_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part [ceil(numel / ranks)] of a parameter that ``Init`` partitioned, in place; else None."""
    part = _partitioned.get(param)
    return part.shard if part is not None else None


class InitState(NamedTuple):
    """What ``Init`` knows of a parameter that it partitioned. ``is_whole``: it has its full value for a while."""

    number: int
    part: torch.Tensor
    is_whole: bool


def state_in_init(param: torch.Tensor) -> InitState | None:
    """Return what ``Init`` knows of ``param``; None if it did not partition it, or if its values are elsewhere now."""
    part, held = _partitioned.get(param), _held.get(param)
    if part is not None:
        return InitState(part.order, part.shard, is_whole=False)
    return InitState(held.order, held.shard, is_whole=True) if held is not None else None


def keep_part(module: nn.Module, param: nn.Parameter, device: torch.device) -> torch.Tensor:
    """Turn a parameter on the meta device into a partitioned one on ``device``. Return its part, still to be filled."""
    shard = torch.zeros(-(-param.numel() // world.size()), dtype=param.dtype, device=device)
    made = nn.Parameter(placeholder(param, device), requires_grad=param.requires_grad)
    for holder in module.modules():
        for name, other in holder._parameters.items():
            if other is param:
                holder._parameters[name] = made
                _watch_state_dict(holder)
    _keep(made, _Part(shard, param.shape))
    return shard


def forget_part(param: torch.Tensor) -> None:
    """Forget that ``Init`` partitioned ``param``: its values are elsewhere now."""
    _partitioned.pop(param, None)
    _shown_by.pop(param, None)
    hook = _forwards.pop(param, None)
    if hook is not None:
        hook.remove()


def partitioned(model: nn.Module) -> list[nn.Parameter]:
    """Return what ``Init`` partitioned of the parameters of ``model``, in the order of ``model.parameters()``."""
    return [param for _, param in named_members(model) if param in _partitioned] if _partitioned else []


@torch.no_grad()
def settle(params: Sequence[nn.Parameter], model: nn.Module, share_of: Callable[[nn.Parameter, torch.Tensor], Any]) -> None:
    """Give each of ``params`` that ``model`` still has this rank's share of its values, ``share_of(param, whole)``.

    ``params``: partitioned parameters, the same in the same order on all ranks. All ranks must call it, because parameters
    are put together one after the other. A rank that keeps nothing of a parameter frees it at once.
    """
    here = {id(param) for _, param in named_members(model)} if params else set()
    for param in params:
        whole = whole_value(param)
        forget_part(param)
        if id(param) in here:
            _show(param, share_of(param, whole))  # type: ignore[arg-type]
        del whole  # before the next one is put together


def _whole(part: _Part) -> torch.Tensor:
    size, numel = world.size(), part.shape.numel()
    flat = torch.empty(part.shard.numel() * size, dtype=part.shard.dtype, device=part.shard.device)
    if size == 1:  # no collective: gloo would keep its tensors alive a little longer
        flat.copy_(part.shard)
    else:
        world.all_gather_flat(flat, part.shard, "zerorun.zero.Init: all-gather of a parameter")
    return flat[:numel].view(part.shape)


def release(param: torch.Tensor) -> None:
    """Keep this rank's part of rank 0's value of ``param``, which becomes a placeholder."""
    size, rank = world.size(), world.rank()
    whole = param.detach()
    flat = whole.contiguous().view(-1)  # not reshape(), which may return a view with fewer elements in memory
    if size > 1:
        world.broadcast(flat, 0, "zerorun.zero.Init: broadcast of a parameter")
    length = -(-flat.numel() // size)
    shard = torch.empty(length, dtype=flat.dtype, device=flat.device)
    own = flat[rank * length : (rank + 1) * length]
    shard[: own.numel()].copy_(own)
    shard[own.numel() :].zero_()
    part = _Part(shard, param.shape)
    if not _is_expanded(whole):
        if not whole.is_contiguous() and size > 1:
            whole.copy_(flat.view(whole.shape))  # for other tensors that share the memory
        _remember_memory(part, whole)
    shown = _shown_by.get(param)
    reusable = shown is not None and (shown.tensor.shape, shown.tensor.dtype) == (param.shape, param.dtype)
    _show(param, shown.tensor if reusable and shown.tensor.device == param.device else placeholder(param))
    _keep(param, part)


def _show(param: torch.Tensor, data: torch.Tensor) -> None:
    """Let ``param`` be ``data``, and so what else refers to the memory of a packed weight."""
    param.data = data
    let_go_of_memory(param, data)


def partition_now(module: nn.Module, param: nn.Parameter) -> None:
    """Partition ``param``, which ``module`` is to register outside of a block. All ranks must call it in the same order."""
    init_distributed()
    with torch._C.DisableTorchFunction(), torch.no_grad():
        _compare(_OTHER_CODE, [f"made a parameter of shape {tuple(param.shape)}, {param.dtype}"], _SAME_CODE)
        release(param)
        _watch_forward(module, param)


def _keep(param: torch.Tensor, part: _Part) -> None:
    with torch._C.DisableTorchFunction():
        part.param = TensorWeakRef(param)
        _partitioned[param] = part
        key = param.untyped_storage()._cdata
        if key not in _shown:
            _shown_by[param] = _shown[key] = _Shown(param.detach(), part.param)


def _withhold(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Let the module's part of a state dict have no placeholder that could be saved in place of a weight."""
    for name, param in module._parameters.items():
        found = state.get(prefix + name)
        if param is None or not isinstance(found, torch.Tensor) or found is param:
            continue
        with torch._C.DisableTorchFunction():
            for (_, tensor), (_, stated) in zip(inside(param), inside(found), strict=False):
                if tensor in _partitioned and _is_placeholder(tensor, stated):
                    whole = found if tensor is param else placeholder(param)  # of a wrapper, one that is none
                    state[prefix + name] = whole.as_subclass(UnsavedPlaceholder)


def _is_placeholder(param: torch.Tensor, stated: torch.Tensor) -> bool:
    """Whether ``stated``, of a state dict, is what ``param`` shows in place of a value. A cast has copied it."""
    shown = _shown_by.get(param)
    if shown is not None and storage_key(stated) == storage_key(shown.tensor):
        return True
    return stated.is_floating_point() and stated.numel() > 0 and _reads_loud(stated)


def _refuse_load(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any, *unused: Any) -> None:
    """Raise ReleasedParameterError where a state dict is to be copied into placeholders; torch's own words do not help."""
    if local_metadata.get("assign_to_params_buffers", False):
        return
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state and any(tensor in _partitioned for _, tensor in inside(param)):
            raise ReleasedParameterError(
                f"parameter {prefix + name!r} cannot be loaded: since its zerorun.zero.Init block it is a placeholder, and "
                "its values are spread over all ranks. Remedy: load in `with zerorun.zero.GatheredParameters("
                "list(model.parameters()), modifier_rank=0):`, or inside of the Init block; zerorun.load_pretrained() "
                "fills the model from safetensors files as it is."
            )


def _watch_state_dict(module: nn.Module) -> None:
    if _withhold not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_withhold)
        module.register_load_state_dict_pre_hook(_refuse_load)


def _watch_forward(module: Any, param: torch.Tensor) -> None:
    """Let forwards of ``module`` before ``initialize()`` raise: the bytes of a packed placeholder look like any others."""
    if isinstance(module, nn.Module) and param not in _forwards and is_packed(param):
        _forwards[param] = module.register_forward_pre_hook(_refuse_forward)


def _refuse_forward(module: nn.Module, inputs: Any) -> None:
    if not Init.open and any(param in _partitioned for param in own_members(module)):
        raise ModelError(
            f"the forward of a {type(module).__name__} needs its quantised weight, which is spread over all ranks. Remedy: "
            "give the model to initialize() first. One that is to stay whole on every rank is loaded outside of "
            "`with zerorun.zero.Init():`, and in the DeepSpeed mode before the configuration with stage 3 is made."
        )


def _is_left_alone(param: torch.Tensor) -> bool:
    """True for a parameter that is partitioned already, has no values, or cannot be cut."""
    return param in _partitioned or param.is_meta or stays_apart(param)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """True if several elements share one address. Such memory cannot be filled from a whole value."""
    return any(stride == 0 and size > 1 for stride, size in zip(strides_of(tensor), tensor.shape, strict=True))


# -- memory that several tensors share ---------------------------------------------------------------------------


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (the first byte of ``tensor`` in its storage, the byte after the last)."""
    low = int(tensor.storage_offset())
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides_of(tensor), strict=True)) + 1
    return low * tensor.itemsize, (low + (length if tensor.numel() else 0)) * tensor.itemsize


def _remember_memory(part: _Part, whole: torch.Tensor) -> None:
    storage = whole.untyped_storage()
    part.memory = _memories.setdefault(storage._cdata, _Memory(storage))
    part.memory.parts.add(part)
    part.low, part.high = _extent(whole)
    part.stride = None if whole.is_contiguous() else strides_of(whole)


def _shown_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the other parameter from whose placeholder ``tensor`` was made, or None."""
    shown = _shown.get(storage_key(tensor))
    param = shown.param() if shown is not None else None
    return param if param is not tensor else None


def _has_new_values(tensor: torch.Tensor) -> bool:
    """True for a partitioned parameter to which set_() has given other memory."""
    return tensor in _partitioned and storage_key(tensor) != storage_key(_shown_by[tensor].tensor)


def _parts_behind(tensor: torch.Tensor) -> list[_Part]:
    """Return the parts that must be whole to use ``tensor``: its own, and those of parameters that shared its memory."""
    part = _partitioned.get(tensor)
    if part is not None:
        return _overlapping(part.memory, part.low, part.high) if part.high > part.low else [part]
    memory = _memories.get(storage_key(tensor))
    return _overlapping(memory, *_extent(tensor)) if memory is not None else []


def _number_behind(tensor: torch.Tensor) -> int:
    """Return the sort key by which tensors are made whole, so that the order of a function's arguments does not matter."""
    return min((part.order for part in _parts_behind(tensor)), default=-1)


def _overlapping(memory: _Memory, low: int, high: int) -> list[_Part]:
    """Return the parts of ``memory`` from byte ``low`` to ``high``, those that overlap with them, and so on."""
    found: list[_Part] = []
    rest = sorted(memory.parts, key=lambda part: part.order)
    while more := [part for part in rest if part.low < high and low < part.high]:
        found += more
        rest = [part for part in rest if part not in more]
        low, high = min(low, *(part.low for part in more)), max(high, *(part.high for part in more))
    return sorted(found, key=lambda part: part.order)


def _make_whole(parts: Sequence[_Part], memory: _Memory | None) -> list[torch.Tensor]:
    """Give the parameters of ``parts``, which overlap in ``memory``, their values back, and return the parameters."""
    storage = memory.storage() if memory is not None else None
    base = 0
    if storage is None and (len(parts) > 1 or parts[0].stride is not None):
        base = min(part.low for part in parts) // _ALIGNMENT * _ALIGNMENT
        storage = torch.UntypedStorage(max(part.high for part in parts) - base, device=parts[0].shard.device)
    params = []
    for part in parts:
        param, whole = part.param(), _whole(part)
        if param is None:  # a parameter of an earlier block that is gone
            continue
        if storage is not None:
            offset = (part.low - base) // whole.itemsize
            place = whole.new_empty(0).set_(storage, offset, part.shape, part.stride or strides_of(whole))  # type: ignore[arg-type]
            whole = place.copy_(whole)
        _show(param, whole)
        _partitioned.pop(param)
        params.append(param)
    return params


def _share_memory(copy: torch.Tensor, param: torch.Tensor) -> None:
    """Let ``copy``, which was made from the placeholder of ``param``, share the memory that ``param`` has now."""
    if copy.shape != param.shape:
        raise ModelError(
            f"a tensor of shape {tuple(copy.shape)} looks at a part of a parameter of shape {tuple(param.shape)} that "
            "zerorun.zero.Init had released. Remedy: make it by torch functions, such as param.detach()[...]."
        )
    copy.data = param.data


def _refuse_placeholder(name: str, param: torch.Tensor) -> None:
    """Raise ModelError for a parameter that Init did not partition but that shows a placeholder: it has no values."""
    if param.is_meta or param.layout is not torch.strided or param.numel() < 2 or any(strides_of(param)):
        return
    if param.untyped_storage().nbytes() == param.itemsize and _reads_loud(param.detach()):
        raise ModelError(
            f"parameter {name!r}, of shape {tuple(param.shape)}, is a placeholder without values: an engine manages the "
            "model, or the parameter was made of one that zerorun.zero.Init had partitioned. Remedy: call the engine's "
            "destroy() first; make parameters of others inside a block `with zerorun.zero.Init():`."
        )


def _refuse_copied(name: str, param: torch.Tensor) -> None:
    """Raise ModelError for a parameter that is a copy of a placeholder: no training begins with nothing but NaN."""
    if param.is_meta or param.layout is not torch.strided or param.numel() < 2 or not param.is_floating_point():
        return
    if stays_apart(param):  # a wrapper may not even be flattened
        return
    flat = param.detach().reshape(-1)
    if bool(flat[0].isnan()) and bool(is_loud(flat).all()):
        raise ModelError(
            f"all {param.numel()} elements of parameter {name!r} are NaN, as those of a copy are that was made while "
            "zerorun.zero.Init or an engine had the values spread over all ranks. Remedy: copy or save the model before "
            "that, or inside zerorun.zero.GatheredParameters(model.parameters())."
        )


def _reads_loud(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` reads as a placeholder, even one that was moved or cast. An expanded one takes no memory."""
    if tensor.numel() and not any(strides_of(tensor)):
        tensor = tensor.as_strided((1,), (1,))
    return bool(is_loud(tensor).all())


def _was_replaced(param: torch.Tensor) -> bool:
    """True if something of the same kind has taken the place of the placeholder: what was computed from it is NaN as well.

    What was moved or cast has another device or dtype, and what was only laid out anew has other strides.
    """
    shown = _shown_by.get(param)
    if shown is None or (param.dtype, param.device) != (shown.tensor.dtype, shown.tensor.device):
        return False
    return storage_key(param) != storage_key(shown.tensor) and (param.is_contiguous() or not any(strides_of(param)))


def refuse_overwritten(model: nn.Module) -> None:
    """Raise ModelError if a placeholder was written to: these values would be lost, because those of the parts count."""
    with torch._C.DisableTorchFunction():  # in case this is called inside a block: nothing must become whole
        for name, param in named_members(model):
            part = _partitioned.get(param)
            if part is None:
                _refuse_placeholder(name, param)
                _refuse_copied(name, param)
            elif param.shape != part.shape or not _reads_loud(param.detach()) or _was_replaced(param):
                raise ModelError(
                    f"parameter {name!r} was changed after its zerorun.zero.Init block, when it was a placeholder and its "
                    "values were spread over all ranks: the change would be lost. Remedy: change it inside a block `with "
                    "zerorun.zero.Init():`, or in zerorun.zero.GatheredParameters(param, modifier_rank=0)."
                )


def refuse_partitioned(params: Iterable[torch.Tensor], what: str) -> None:
    """Raise ModelError if ``Init`` has partitioned one of ``params``, or is about to: then ``what`` cannot be made."""
    if Init.open or any(param in _partitioned for param in params):
        raise ModelError(
            f"{what} cannot be made of parameters that zerorun.zero.Init partitions: they are spread over all ranks, of "
            "which others would need other values. Remedy: build the whole model in the block and let initialize() cut and "
            "divide it after the block, or build the parts outside of it."
        )


class Init(TorchFunctionMode):
    """Context in which parameters are partitioned as they are created. All ranks must run the same code in it.

    ``module``: partition an existing module at once. ``dtype``: torch's default dtype in the block, in which parameters are
    created that say no other. ``enabled=False`` makes the context do nothing. ``param_swapper``, of DeepSpeed's for disks,
    raises ModelError. The other arguments are DeepSpeed's, too, in its order, and have no effect: all ranks divide a
    parameter between them, its parts are in host memory until ``initialize()`` places them, and the configuration counts
    there.
    """

    open: ClassVar[int] = 0  # the number of blocks that the program is in
    outermost: ClassVar[Init | None] = None  # the outermost of these blocks, which also does the work of the inner ones

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        super().__init__()
        if param_swapper is not None:
            raise ModelError(
                f"zero.Init(param_swapper={type(param_swapper).__name__}): parameters are kept in host memory until "
                "initialize(), and zerorun writes disks by itself. Remedy: leave it out, and write "
                '"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ...}} in the file.'
            )
        self._enabled, self._dtype, self._dtype_before = enabled, dtype, torch.get_default_dtype()
        self._owner = WeakIdKeyDictionary()  # parameter -> the module that registered it, or a stand-in for one
        self._names = WeakIdKeyDictionary()  # parameter -> what to call it
        # Module -> its parameters on the meta device, by name: the number in the order in which they were registered.
        self._places = WeakKeyDictionary[nn.Module, dict[str, int]]()
        self._place_numbers = count()
        self._waiting: list[tuple[int, torch.Tensor]] = []  # see [Note: empty parameters]
        self._last_empty: Callable[[], torch.Tensor | None] = lambda: None  # what torch.empty_like() has made
        self._current: list[Any] = []  # the modules whose parameters are whole
        self._whole_now: list[torch.Tensor] = []
        self._alive: dict[int, torch.Tensor] = {}  # id -> parameter: see [Note: memory that several tensors share]
        self._hook: Any = None
        if module is not None and enabled:
            init_distributed()
            with torch._C.DisableTorchFunction():
                _number_alike()
                found = [(n, p) for n, p in named_members(module) if not _is_left_alone(p)]
                _compare(_OTHER_CODE, [f"{name!r}, {tuple(p.shape)}, {p.dtype}" for name, p in found], _SAME_CODE)
                for _, param in found:
                    release(param)
            for part in module.modules():
                if part._parameters:
                    _watch_state_dict(part)
                for param in own_members(part):
                    _watch_forward(part, param)

    def __enter__(self) -> Init:
        if self._enabled:
            init_distributed()
            Init.open += 1
            self._dtype_before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype or self._dtype_before)
            if Init.outermost is None:
                _number_alike()
                Init.outermost = self
                self._hook = nn.modules.module.register_module_parameter_registration_hook(self._created)
                super().__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._enabled:
            Init.open -= 1
            torch.set_default_dtype(self._dtype_before)
            if Init.outermost is self:
                Init.outermost = None
                super().__exit__(kind, error, trace)
                self._hook.remove()
                if kind is None:
                    self._partition_waiting()
                    self._use(filter(_has_new_values, self._alive.values()))
                    self._partition_all()
                self._current, self._alive, self._waiting = [], {}, []

    def hold(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Make whole those of ``params`` that were made in a block, and return them, in the same order on all ranks.

        They stay whole until a function gets a parameter of another module. All ranks must call it.
        """
        chosen = {id(param): param for param in params if param in self._owner or param in _partitioned}
        self._use(chosen.values())
        return [param for param in self._whole_now if id(param) in chosen]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ != "__get__" or func in _READS_VALUES:  # shape, dtype, ... need no values
            self._use(inner for tensor in tensors_in([args, kwargs]) for _, inner in inside(tensor))
        result = func(*args, **kwargs)
        if func is torch.empty_like:
            self._last_empty = TensorWeakRef(result)
        return result

    def _created(self, module: nn.Module, name: str, param: Any) -> None:
        if not isinstance(param, nn.Parameter) or is_lazy(param):
            return
        if param.is_meta:
            self._places.setdefault(module, {})[name] = next(self._place_numbers)
            return
        with torch._C.DisableTorchFunction():
            new = [tensor for _, tensor in members(param) if tensor not in self._owner]
        self._use(new)
        for tensor in new:
            with torch._C.DisableTorchFunction():
                _refuse_placeholder(name, tensor)
            if tensor not in self._owner:  # otherwise it was made in an earlier block
                self._owner[tensor] = module
                self._names[tensor] = f"{name!r} of a {type(module).__name__}"
                _watch_state_dict(module)
                if self._is_empty(tensor) and name in self._places.get(module, ()):
                    self._waiting.append((self._places[module][name], tensor))
                    continue
                self._make_room([module])
                self._whole_now.append(tensor)

    def _is_empty(self, param: torch.Tensor) -> bool:
        """True if nobody has written to ``param`` since torch.empty_like() made it."""
        with torch._C.DisableTorchFunction():
            last = self._last_empty()
            return last is not None and storage_key(last) == storage_key(param) and param._version == 0

    def _use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make everything whole that a function needs to work on ``tensors``, all at the same time."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            given = list(tensors)
            waiting = {storage_key(param) for _, param in self._waiting}
            if waiting and any(storage_key(tensor) in waiting for tensor in given):
                self._partition_waiting()
            for tensor in sorted(filter(_has_new_values, given), key=_number_behind):
                _partitioned.pop(tensor)
                self._now_whole([tensor])
            copies = [(tensor, param) for tensor in given if (param := _shown_in(tensor)) is not None]
            given += [param for _, param in copies]
            needed = [tensor for tensor in given if tensor in self._owner]
            needed += [param for tensor in given for part in _parts_behind(tensor) if (param := part.param()) is not None]
            if needed:
                self._make_room([self._owner_of(param) for param in needed])
                for tensor in sorted(given, key=_number_behind):
                    self._make_whole(_parts_behind(tensor))  # found anew: making room may have added parts in this memory
            for copy, param in copies:
                _share_memory(copy, param)

    def _make_whole(self, parts: Sequence[_Part]) -> None:
        if parts:
            _compare(_OTHER_CODE, [f"to read {_described(part)}" for part in parts], _SAME_CODE)
            self._now_whole(_make_whole(parts, parts[0].memory))

    def _now_whole(self, params: Sequence[torch.Tensor]) -> None:
        self._whole_now += params
        self._current += [self._owner_of(param) for param in params]

    def _owner_of(self, param: torch.Tensor) -> Any:
        """Return the module with which ``param`` is made whole. Parameters of earlier blocks have a stand-in each."""
        if param not in self._owner:
            self._owner[param] = object()
        return self._owner[param]

    def _make_room(self, owners: Sequence[Any]) -> None:
        """Partition what is whole, except the parameters of ``owners``, unless all ``owners`` are whole already."""
        wanted = {id(owner) for owner in owners}
        if wanted <= {id(owner) for owner in self._current}:
            return
        staying = [param for param in self._whole_now if id(self._owner_of(param)) in wanted]
        self._whole_now = [param for param in self._whole_now if id(self._owner_of(param)) not in wanted]
        self._partition_all()
        self._whole_now, self._current = staying, list(owners)

    def _partition_all(self) -> None:
        self._partition(self._whole_now)
        self._whole_now.clear()

    def _partition_waiting(self) -> None:
        waiting, self._waiting = sorted(self._waiting, key=lambda pair: pair[0]), []
        self._partition([param for _, param in waiting])

    def _partition(self, params: Iterable[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            new = {id(param): param for param in params}
            whole = [param for param in new.values() if param not in _partitioned]  # Init(module) has done the others
            made = [f"made {self._names.get(p, 'a parameter')}, of shape {tuple(p.shape)}, {p.dtype}" for p in whole]
            _compare(_OTHER_CODE, made, _SAME_CODE)
            for param in whole:
                release(param)
                _watch_forward(self._owner_of(param), param)
            self._alive.update(new)
