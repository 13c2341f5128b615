"""Pretrained weights: read safetensors files into a model. Each rank reads the elements that it keeps, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.device import default_device
from ..distributed.tensor_shard import TensorShard, shards_of
from ..distributed.transport.process_group import init_distributed
from ..errors import CheckpointError
from ..log import listed
from ..plan.units import stored_name
from ..zero.init import keep_part, part_of, whole_value
from ..zero.load_hooks import run_hooks_after, tell_of_hooks
from ..zero.sharded_model import ShardedModel, model_of
from .argument_checks import names_of
from .directory import has_manifest
from .extra_states import give_back, names_in
from .frozen_base import refuse_other_base, sums_of_values
from .hub_names import joined_by
from .inventory import Inventory, Subject
from .load import ModelLoader
from .manifest import read_manifest
from .matching import NameMap, Wanted, compare_tensors, compare_ties
from .ranks import Ranks, alone, attempt
from .read import Read, Reader
from .write_plan import MASTER, MODEL


def load_pretrained(model: nn.Module, dir: str | Path, *, strict: bool = True, allow_missing: Sequence[str] = ()) -> None:
    """Fill ``model`` with the weights in ``dir``: a Hugging Face model in safetensors format, or a checkpoint of zerorun.

    Before ``initialize``, the model may be an ordinary one, one built inside ``zerorun.zero.Init()`` (call this function
    inside that block or after it), or one whose parameters are on the meta device. In the last two cases a rank reads no
    more than its part of every parameter, straight into place. After ``initialize``, pass ``engine.module``.
    Floating-point weights are cast to the dtype of the parameter. All ranks must call it. The files may have a tensor for
    each expert, as many on the hub have, where the model's class has one for all. From a checkpoint, modules get back
    what their ``get_extra_state`` had returned, too.

    With ``strict``, the names of the model and of the files must be the same, except for tied weights and the prefix of a
    Hugging Face base model; the files may lack what ``allow_missing`` names (names or patterns such as ``"score.*"``), and
    tied weights have one value. Raises CheckpointError, naming tensors, if any are missing, left over, of another shape, or
    damaged. Of a checkpoint that leaves frozen weights out, those are compared with the model's by their checksums.
    """
    init_distributed(default_device())
    path, wanted = Path(dir), Wanted(strict, allow_missing=names_of(allow_missing))
    manifest = read_manifest(path) if has_manifest(path) else None
    # Inside Init, no parameter may be gathered just because something looks at it.
    join = partial(joined_by, model, known=_names(model)) if manifest is None else None
    with (
        Reader(path, manifest, join=join) as reader,
        torch.inference_mode(mode=False),  # what is made in that mode could not be trained
        torch.no_grad(),
    ):
        sharded = model_of(model)
        if sharded is not None:
            _load_sharded(model, sharded, reader, wanted)
            return
        extra = names_in(model)
        with torch._C.DisableTorchFunction():
            _load_unsharded(model, reader, wanted)
        give_back(model, extra, reader, reader.state_tensors(alone()) if manifest is not None else {})
        tell_of_hooks(model, "load_pretrained()")
        run_hooks_after(model, "load_pretrained()", None)


def _load_sharded(model: nn.Module, sharded: ShardedModel, reader: Reader, wanted: Wanted) -> None:
    ranks = Ranks(sharded.comm.topology)
    try:
        with torch._C.DisableTorchFunction():
            loader = ModelLoader.compared(Inventory.of(Subject(model, sharded)), reader, wanted, ranks)
            loader.compare_base(ranks, sharded.comm.dense.peer_reader())
            tensors = reader.state_tensors(ranks) if reader.manifest is not None else {}
        with sharded.half_loaded.loading(reader.path, "weights"):
            with torch._C.DisableTorchFunction():
                loader.load_weights(ranks)
            ranks.agree(attempt(lambda: loader.load_extra(tensors))[1])
    finally:
        ranks.close()


def _names(model: nn.Module) -> set[str]:
    """The names of parameters and buffers, with and without the prefix of a Hugging Face base model."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names, prefix = {stored_name(name) for name, _ in named}, f"{getattr(model, 'base_model_prefix', '')}."
    return names | {name.removeprefix(prefix) for name in names}


def _load_unsharded(model: nn.Module, reader: Reader, wanted: Wanted) -> None:
    names: dict[int, str] = {}
    params: dict[str, nn.Parameter] = {}
    aliases: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in names:
            aliases[stored_name(name)] = names[id(param)]
        else:
            names[id(param)], params[stored_name(name)] = stored_name(name), param
    buffers: dict[str, list[tuple[nn.Module, str]]] = {}  # the places of each
    for name, module, key in _persistent_buffers(model):
        first = names.setdefault(id(module._buffers[key]), stored_name(name))
        buffers.setdefault(first, []).append((module, key))
        if first != stored_name(name):
            aliases[stored_name(name)] = first
    known, shards = NameMap(reader, aliases, getattr(model, "base_model_prefix", "")), shards_of(model)
    shapes = {name: shards[id(p)].shape if id(p) in shards else tuple(p.shape) for name, p in params.items()}
    shapes |= {name: tuple(module._buffers[key].shape) for name, [(module, key), *_] in buffers.items()}  # type: ignore[union-attr]
    compare_tensors(reader, known, shapes, wanted)
    compare_ties(reader, known, wanted, alone())  # each rank by itself: here they read all the values
    _compare_base(params, shards, reader, wanted)
    _refuse_unfillable(model, {name for name in shapes if known.find(name)})
    for name, param in params.items():
        stored = known.find(name)
        if stored is not None:
            source = MASTER if stored in reader.places(MASTER) else MODEL
            if not param.is_meta and part_of(param) is None and not param.data.is_contiguous():  # channels_last, transposed
                flat = torch.empty(param.numel(), dtype=param.dtype)
                reader.read(Read(source, stored, 0, flat, shards.get(id(param))))
                param.data.copy_(flat.view(param.shape))
                continue
            for read in _reads(model, param, shards.get(id(param)), source, stored):
                reader.read(read)
    for name, places in buffers.items():
        first_module, first_key = places[0]
        stored, old = known.find(name), first_module._buffers[first_key]
        if stored is not None and old is not None:
            flat = torch.empty(old.numel(), dtype=old.dtype)
            reader.read(Read(MODEL, stored, 0, flat))
            if _takes_values(old):  # others may have it, or a view of it
                old.copy_(flat.view(old.shape))
                continue
            made = flat.view(old.shape).to(default_device() if old.is_meta else old.device)
            for module, key in places:
                module._buffers[key] = made


def _takes_values(buffer: torch.Tensor) -> bool:
    """False for a buffer that has no memory, one element for many, or that may not be written to outside of inference."""
    repeats = any(step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True))
    return not (buffer.is_meta or repeats or buffer.is_inference())


def _compare_base(params: dict[str, nn.Parameter], shards: dict[int, TensorShard], reader: Reader, wanted: Wanted) -> None:
    """Compare what the checkpoint leaves out with what the model has of it. Collective if ``Init`` has partitioned it.

    Parameters on the meta device have no values, which is refused elsewhere.
    """
    base = (reader.manifest.frozen_base if reader.manifest else None) or {}
    parts = [name for name in base if name in params and id(params[name]) in shards]
    if parts and wanted.strict:
        raise CheckpointError(
            f"{reader.path} leaves out frozen weights that are divided over tensor-parallel ranks here, and cannot be "
            f"compared: {listed(list(map(repr, parts)))}. Remedy: load it into engine.module after initialize(), or pass "
            "strict=False."
        )
    for name, kept in base.items():
        if name in params and name not in parts and not params[name].is_meta:
            whole = whole_value(params[name])
            live = sums_of_values({name: kept}, {name: params[name] if whole is None else whole})
            refuse_other_base(reader, {name: kept}, live, strict=wanted.strict)


def _reads(model: nn.Module, param: nn.Parameter, shard: TensorShard | None, source: str, stored: str) -> Iterator[Read]:
    """Yield what this rank reads of one parameter."""
    part = part_of(param)
    if shard is not None and (param.is_meta or part is not None):
        raise CheckpointError(
            f"{stored!r} is divided over tensor-parallel ranks, and on the meta device or made inside zero.Init(), which "
            "gives all ranks parts of the same tensor. Remedy: build divided layers outside of both, or let initialize() "
            "divide them."
        )
    if param.is_meta:
        part = keep_part(model, param, default_device())
    if part is None:
        yield Read(source, stored, 0, param.data.view(-1), shard)
        return
    start = dist.get_rank() * part.numel()
    length = min(part.numel(), param.numel() - start)
    if length > 0:
        yield Read(source, stored, start, part[:length])


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, module, key


def _refuse_unfillable(model: nn.Module, filled: set[str]) -> None:
    """Raise CheckpointError for tensors on the meta device that no file has: they would stay without values."""
    everything = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in everything if tensor.is_meta and stored_name(name) not in filled]
    if empty:
        raise CheckpointError(
            f"{', '.join(repr(name) for name in empty[:5])} are on the meta device, and the files have no values for them. "
            "Remedy: build the model inside `with zerorun.zero.Init():`, which computes such buffers."
        )
