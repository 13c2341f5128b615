"""Read checkpoints of DeepSpeed 0.19, ZeRO stage 0 to 3, without DeepSpeed, and without running what their pickles ask for.

A tag's folder has the model (``mp_rank_00_model_states.pt``, at stage 3 one file for each rank) and, at stages 1 to 3, one
file for each rank with its share of the optimizer: flat tensors, one for each group or, at stage 3, for each sub-group. At
stages 1 and 2, the parameters of a group are concatenated, maybe with padding, and the ranks' shares are consecutive parts
of the result. At stage 3, every parameter is cut into equal parts, the last of which is padded, and the parts of a rank are
concatenated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..directory import read_pointer
from ..files import open_regular
from ..foreign import (
    HARMLESS,
    ForeignCheckpoint,
    ForeignTensor,
    first_line,
    match_groups,
    number,
    optimizer_name,
    pieced,
    plain_groups,
    refused_class,
)
from .torch_files import FileSlice, is_zipped, look_through, refuse_strange_tensors

_MODEL, _MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"  # maybe with bf16_ in front
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("universal_checkpoint_info", "sparse_tensor_module_names"),
}
_TYPES = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adagrad": "Adagrad", "lamb": "Lamb", "muon": "Muon"}
_RESAVE = "Remedy: load it with DeepSpeed and save it again"


class _Record:
    """The attributes of an object of DeepSpeed, whose class is not needed and not imported."""


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}  # of ZeroStageEnum


def _member(kind: Any, name: Any) -> Any:
    """Stand for getattr, by which Python 3.11.0 to 3.11.3 store a member of an enumeration; ``kind`` is of _SAFE."""
    if kind is int and name in _STAGES:
        return _STAGES[name]
    if kind is str and type(name) is str:  # a device, whose name is its value
        return name
    raise ValueError(f"it asks for {name!r:.80} of {kind!r:.80}")


_DEEPSPEED = "deepspeed.runtime."
_SAFE: list[Any] = [
    *HARMLESS,
    (_Record, _DEEPSPEED + "fp16.loss_scaler.LossScaler"),
    (_Record, _DEEPSPEED + "fp16.loss_scaler.DynamicLossScaler"),
    (_Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, _DEEPSPEED + "zero.config.ZeroStageEnum"),
    (str, _DEEPSPEED + "zero.offload_config.OffloadDeviceEnum"),
    (_member, "builtins.getattr"),
]


@dataclass(frozen=True)
class _Slot:
    """Where a parameter's values are: ``pieces`` are (rank, start, end) in each rank's flat tensor number ``index``."""

    name: str
    shape: tuple[int, ...]
    group: int
    index: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass
class _Optimizer:
    """What was stored of the optimizer. ``masters[rank][index]``: flat weights, if the optimizer has its own.

    ``states[rank][index]``: its state for flat tensor number ``index``. ``stage``: as stored; 1 also stands for
    BF16_Optimizer, which stores none. ``scaler``: what was stored of a loss scale.
    """

    stage: int = 0
    slots: list[_Slot] = field(default_factory=list)
    masters: list[list[torch.Tensor]] = field(default_factory=list)
    states: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] = field(default_factory=dict)


def read_deepspeed(
    directory: Path, tag: str | None = None, names: Sequence[Sequence[str]] | None = None
) -> ForeignCheckpoint:
    """Read what DeepSpeed's ``engine.save_checkpoint(directory, tag)`` has written. Tensors are read when asked for.

    ``directory`` may be the tag's own folder. ``tag``: by default what the file ``latest`` says. ``names``: the
    parameters of each optimizer group, in order. Only stage 0 may need them, since it stores the optimizer's state by
    number. Raises CheckpointError if files are missing, are damaged, name unknown classes, or come from tensor, pipeline
    or expert parallelism.
    """
    folder = _tag_folder(Path(directory), tag)
    try:
        return _read(folder, names)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder}: not laid out as by DeepSpeed 0.19 ({found}). {_RESAVE} with 0.19.") from error


def _tag_folder(directory: Path, tag: str | None) -> Path:
    if tag is None and list(directory.glob("*_model_states.pt")):
        return directory
    if tag is None:
        latest = directory / "latest"
        if not latest.is_file():
            tags = sorted({path.parent.name for path in directory.glob("*/*_model_states.pt")})
            raise CheckpointError(f"{latest}: no such file, so that the tag is unknown. Remedy: name one of {tags}.")
        tag = read_pointer(directory)
    if not tag or not (directory / tag).is_dir():
        found = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
        raise CheckpointError(f"{directory / tag}: no such folder for the tag {tag!r}. Remedy: choose another: {found}.")
    return directory / tag


def _load(path: Path) -> dict[str, Any]:
    """Load the dict in ``path``. If it has torch's present format, tensors stay in the file until they are used."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            part = FileSlice(file, 0, size)
            look_through(part)
            zipped = is_zipped(part)
        with torch.serialization.safe_globals(_SAFE):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        refuse_strange_tensors(loaded, size)
    except FileNotFoundError:
        found = sorted(other.name for other in path.parent.glob("*.pt"))
        text = f"{path}: no such file; the folder has {found}. Remedy: copy the files of all ranks into one folder."
        raise CheckpointError(text) from None
    except Exception as error:  # torch has no exception of its own for damaged files
        name = refused_class(error)
        if name:
            text = f"{path}: names {name}, which is not known to be harmless, so it was not loaded. {_RESAVE} without it;"
            text += " or, if you trust the file, pass the class to torch.serialization.add_safe_globals."
            raise CheckpointError(text) from error
        text = f"{path}: cannot be read; it may be damaged or cut short ({first_line(error)})."
        raise CheckpointError(f"{text} Remedy: copy it again, or use another tag.") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}, not DeepSpeed's dict. Remedy: give its own folder.")
    return loaded


def _read(folder: Path, names: Sequence[Sequence[str]] | None) -> ForeignCheckpoint:
    path = _model_file(folder)
    main = _load(path)
    _refuse_other_parallelism(folder, path, main)
    notes = [f"{key}: has no counterpart" for key in ("data_sampler", "random_ltd") if main.get(key)]
    aliases = _same_storage(main) if main["param_shapes"] is None else main["shared_params"]
    optimizer = _optimizer(path, main, aliases, names, notes)
    owned = {slot.name for slot in optimizer.slots}
    apart = {*owned, *(main["frozen_param_shapes"] or ())}  # empty tensors have the same address, so look tied
    aliases = {name: stored for name, stored in aliases.items() if name not in apart and stored in main["module"]}
    trainable = _trainable(main, optimizer, aliases, notes)
    tensors = _model_tensors(folder, main, optimizer, aliases, notes)
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    for slot in optimizer.slots if optimizer.masters else ():
        flats = [each[slot.index] for each in optimizer.masters]
        if flats[0].dtype != dtypes[slot.name]:
            tensors.append(_owned("master", slot, flats, flats[0].dtype))
    half = any(dtypes[name] == torch.float16 for name in owned)
    return ForeignCheckpoint(
        tensors=tensors + _state_tensors(optimizer, notes),
        trainable={name: value for name, value in trainable.items() if name in dtypes},
        aliases=aliases,
        optimizer_type=_optimizer_type(main, optimizer.groups, notes),
        group_of={slot.name: slot.group for slot in optimizer.slots},
        groups=plain_groups(optimizer.groups),
        scalars=_scalars(folder, optimizer),
        counters=_counters(main, notes),
        loss_scale=_loss_scale(optimizer.scaler, main) if half else None,
        scheduler=main["lr_scheduler"],
        client_state={key: value for key, value in main.items() if key not in _OWN_KEYS},
        notes=notes,
    )


def _optimizer(
    path: Path, main: dict[str, Any], aliases: dict[str, str], names: Sequence[Sequence[str]] | None, notes: list[str]
) -> _Optimizer:
    if main["param_shapes"] is not None:
        ranks = _load_ranks(path.parent, notes)
        return (_of_groups if path.name == _MODEL else _of_subgroups)(path.parent, main, ranks, notes)
    if main["optimizer"] is not None:
        return _of_one_file(path, main, aliases, names, notes)
    notes.append("the optimizer: none was stored, so that all parameters count as trainable")
    return _Optimizer()


def _model_file(folder: Path) -> Path:
    whole, first = folder / _MODEL, folder / _MODEL_3.format(0)
    if whole.is_file() and first.is_file():
        text = f"{folder}: has {whole.name} of stages 0 to 2 as well as {first.name} of stage 3, of two runs."
        raise CheckpointError(f"{text} Remedy: delete the files of one.")
    if (folder / "zero").is_dir() and not first.is_file():
        raise CheckpointError(f"{folder}: a universal checkpoint. Remedy: give the one that it was made from.")
    return whole if whole.is_file() or not list(folder.glob(_MODEL_3.format("*"))) else first


def _refuse_other_parallelism(folder: Path, path: Path, main: dict[str, Any]) -> None:
    degrees = main.get("checkpoint_parallel_dimensions") or {}
    tensor = max(main.get("mp_world_size") or 1, degrees.get("tp_degree") or 1)
    signs = {  # the parts of a pipeline have ranks of models, too
        "pipeline parallelism": (degrees.get("pp_degree") or 1) > 1 or main["module"] is None,
        "tensor parallelism": tensor > 1 or list(folder.glob("*mp_rank_01_*")),
        "experts": {"num_experts", "ds_autoep_layers", "autoep_layers"} & set(main) or list(folder.glob("*exp*_rank_*")),
    }
    for what, sign in signs.items():
        if sign:
            text = f"{path}: was trained with {what}, whose parts zerorun cannot join."
            raise CheckpointError(f"{text} Remedy: join them with DeepSpeed, and import the weights only.")


def _load_ranks(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The ``optimizer_state_dict`` of every rank."""
    firsts = [prefix for prefix in ("bf16_", "") if (folder / (prefix + _OPTIMIZER.format(0))).is_file()]
    if len(firsts) > 1:
        raise CheckpointError(f"{folder}: has optimizer files of two runs, with and without bf16_. Remedy: keep one run's.")
    prefix = firsts[0] if firsts else "bf16_" if list(folder.glob("bf16_*")) else ""
    paths = [folder / (prefix + _OPTIMIZER.format(0))]
    ranks = [_load(paths[0])["optimizer_state_dict"]]
    counts = ranks[0]["partition_count"]
    counts = set(counts) if isinstance(counts, (list, tuple)) else {counts}
    if len(counts) > 1 or ranks[0].get("ds_zero_partition_groups"):
        text = f"{paths[0]}: groups are cut into {sorted(counts)} parts, as with experts."
        raise CheckpointError(f"{text} {_RESAVE} without.")
    paths += [folder / (prefix + _OPTIMIZER.format(rank)) for rank in range(1, max(counts))]
    ranks += [_load(path)["optimizer_state_dict"] for path in paths[1:]]
    for path, rank in zip(paths, ranks, strict=True):
        if rank["partition_count"] != ranks[0]["partition_count"] or rank.get("zero_stage") != ranks[0].get("zero_stage"):
            text = f"{path}: written with another number of ranks or stage than {paths[0].name}, by another run."
            raise CheckpointError(f"{text} Remedy: use another tag.")
    extra = len(list(folder.glob(prefix + _OPTIMIZER.format("*")))) - len(paths)
    if extra:
        notes.append(f"{folder}: {extra} optimizer files of ranks beyond the {len(paths)} of this checkpoint were left out")
    return ranks


def _of_groups(folder: Path, main: dict[str, Any], ranks: list[dict[str, Any]], notes: list[str]) -> _Optimizer:
    """Stages 1 and 2: a group's parameters are concatenated, then cut into the ranks' shares."""
    masters = [rank["single_partition_of_fp32_groups"] for rank in ranks]
    bases = [rank["base_optimizer_state"] for rank in ranks]
    if isinstance(bases[0], list):  # elastic: no hyperparameters
        states = [dict(enumerate(base)) for base in bases]
        own = dict((_config(main).get("optimizer") or {}).get("params") or {})
        groups = [dict(own) for _ in masters[0]]
        notes.append("hyperparameters: those of the configuration; elastic_checkpoint stores none of each group")
    else:
        states, groups = [base["state"] for base in bases], bases[0]["param_groups"]
    paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in main["param_shapes"]]
    slots = []
    for group, (shapes, padding) in enumerate(zip(main["param_shapes"], paddings, strict=True)):
        sizes, start = [flats[group].numel() for flats in masters], 0
        for (name, shape), pad in zip(shapes.items(), padding, strict=True):
            numel = math.prod(shape)
            pieces = _cut(sizes, start, numel)
            if sum(high - low for _, low, high in pieces) != numel:
                text = f"{folder}: the ranks' files hold {sum(sizes)} elements of group {group}, which end before {name}."
                raise CheckpointError(f"{text} Remedy: use another tag; this one has files of different runs.")
            slots.append(_Slot(name, tuple(shape), group, group, pieces))
            start += numel + pad
    return _Optimizer(int(ranks[0].get("zero_stage", 1)), slots, masters, states, groups, _scaler(ranks[0]))


def _cut(sizes: list[int], start: int, numel: int) -> tuple[tuple[int, int, int], ...]:
    """(rank, start, end) of each piece of elements ``start`` to ``start + numel`` of the ranks' consecutive shares."""
    pieces, begin = [], 0
    for rank, size in enumerate(sizes):
        low, high = max(start, begin), min(start + numel, begin + size)
        if low < high:
            pieces.append((rank, low - begin, high - begin))
        begin += size
    return tuple(pieces)


def _of_subgroups(folder: Path, main: dict[str, Any], ranks: list[dict[str, Any]], notes: list[str]) -> _Optimizer:
    """Stage 3: each rank has an equal piece of every parameter, and those of a sub-group are concatenated."""
    masters = [rank["fp32_flat_groups"] for rank in ranks]
    bases = [rank["optimizer_state_dict"] for rank in ranks]
    group_of = {index: group for group, entry in enumerate(bases[0]["param_groups"]) for index in entry["params"]}
    slots = []
    for index, shapes in enumerate(main["param_shapes"]):
        start = 0
        for name, shape in shapes.items():
            length = -(-math.prod(shape) // len(ranks))
            pieces = tuple((rank, start, start + length) for rank in range(len(ranks)))
            slots.append(_Slot(name, tuple(shape), group_of[index], index, pieces))
            start += length
        for rank, flats in enumerate(masters):
            if flats[index].numel() != start:
                text = f"{folder}: rank {rank} has {flats[index].numel()} elements in sub-group {index}, not {start}."
                raise CheckpointError(f"{text} {_RESAVE} without offload to NVMe, or use another tag.")
    states = [base["state"] for base in bases]
    return _Optimizer(3, slots, masters, states, bases[0]["param_groups"], _scaler(ranks[0]))


def _of_one_file(
    path: Path, main: dict[str, Any], aliases: dict[str, str], names: Sequence[Sequence[str]] | None, notes: list[str]
) -> _Optimizer:
    """Stage 0: the optimizer as it is, or one with fp32 copies of its own, which may be one flat tensor for each group."""
    stored = main["optimizer"]
    base = stored.get("optimizer_state_dict", stored)
    groups, states, fused = base["param_groups"], base["state"], "fp32_groups_flat" in stored
    copies: list[list[torch.Tensor]] = [[flat] for flat in stored.get("fp32_groups_flat") or ()]
    copies = copies or stored.get("fp32_groups") or []
    module = main["module"]
    weights = {name: module[name] for name in _parameters(main) if name not in aliases}

    def fits(group: int, start: int, name: str) -> bool:
        weight = weights[name]
        if fused:
            return torch.equal(copies[group][0][start : start + weight.numel()].to(weight.dtype), weight.flatten())
        if copies:
            return torch.equal(copies[group][start].to(weight.dtype), weight)
        state = states.get(groups[group]["params"][start], {})
        return all(value.shape in ((), weight.shape) for value in state.values() if torch.is_tensor(value))

    sizes = {name: weight.numel() if fused else 1 for name, weight in weights.items()}
    wanted = [copies[group][0].numel() if fused else len(entry["params"]) for group, entry in enumerate(groups)]
    if names is None and all("param_names" in entry for entry in groups):
        names = [entry["param_names"] for entry in groups]
    if names is None and not copies:
        notes.append("the optimizer's state: stored by number; the names are those that fit by shape, in the model's order")
    chosen = match_groups(sizes, wanted, fits, str(path)) if names is None else names
    slots = []
    for group, entry in enumerate(groups):
        start = 0
        for name in chosen[group]:
            if name not in weights or start >= wanted[group] or not fits(group, start, name):
                text = f"{path}: {name} does not fit in its place in group {group}. Remedy: correct `names`; the parameters"
                raise CheckpointError(f"{text} of the model are {', '.join(weights)}.")
            weight = weights[name]
            index, begin = (group, start) if fused else (entry["params"][start], 0)
            slots.append(_Slot(name, tuple(weight.shape), group, index, ((0, begin, begin + weight.numel()),)))
            start += sizes[name]
        if start != wanted[group]:
            raise CheckpointError(f"{path}: group {group} has more parameters than `names`. Remedy: name all of them.")
    flats = [copy.flatten() for group in copies for copy in group]
    scaler = {} if stored is base else stored
    return _Optimizer(0, slots, [flats] if copies else [], [states], groups, scaler)


def _same_storage(main: dict[str, Any]) -> dict[str, str]:
    """Find the tied parameters: alias -> name. Stage 0 does not list them, but stores their values only once."""
    first: dict[Any, str] = {}
    found = {}
    for name in _parameters(main):
        tensor = main["module"][name]
        stored = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name, name)
        if stored != name:
            found[name] = stored
    return found


def _parameters(main: dict[str, Any]) -> list[str]:
    buffers = set(main["buffer_names"])
    return [name for name, value in main["module"].items() if torch.is_tensor(value) and name not in buffers]


def _trainable(main: dict[str, Any], optimizer: _Optimizer, aliases: dict[str, str], notes: list[str]) -> dict[str, bool]:
    """Return name -> whether the parameter is trainable. At stages 0 and 1, the frozen ones are not in the optimizer.

    Only stages 2 and 3 store which ones are frozen. At stage 0, the optimizer may have been given frozen parameters. These
    have no state: DeepSpeed gives all others gradients.
    """
    frozen = set(main["frozen_param_shapes"] or ())
    if optimizer.stage >= 2 and main["frozen_param_shapes"] is None:
        notes.append("frozen parameters: none are stored, because of exclude_frozen_parameters")
    if optimizer.stage == 0 and optimizer.states and optimizer.states[0]:
        optimizer.slots = [slot for slot in optimizer.slots if optimizer.states[0].get(slot.index)]
    if optimizer.stage < 2 and optimizer.slots:
        frozen = set(_parameters(main)) - {slot.name for slot in optimizer.slots}
    return {name: name not in frozen for name in _parameters(main) if name not in aliases}


def _model_tensors(
    folder: Path, main: dict[str, Any], optimizer: _Optimizer, aliases: dict[str, str], notes: list[str]
) -> list[ForeignTensor]:
    """The tensors of the model.

    Stage 3 stores no whole weights: trained ones are joined from the optimizer's, frozen ones from the ranks' model files.
    """
    slots = {slot.name: slot for slot in optimizer.slots}
    shapes = main["frozen_param_shapes"] or {}
    whole = set(main["module"] if optimizer.stage < 3 else main["buffer_names"])
    others = range(1, len(optimizer.masters)) if optimizer.stage == 3 and shapes else ()
    mains = [main, *(_load(folder / _MODEL_3.format(rank)) for rank in others)]
    found = []
    for name, value in main["module"].items():
        if not torch.is_tensor(value):
            notes.append(f"{name}: extra state of a module, which is not a tensor")
        elif name in aliases:
            continue
        elif name in whole:
            found.append(pieced("model", name, value.dtype, value.shape, [(value, 0, value.numel())]))
        elif name in slots:
            flats = [each[slots[name].index] for each in optimizer.masters]
            found.append(_owned("model", slots[name], flats, value.dtype))
        elif name in shapes:
            parts = [each["frozen_param_fragments"][name] for each in mains]
            found.append(pieced("model", name, value.dtype, shapes[name], [(part, 0, part.numel()) for part in parts]))
        else:
            notes.append(f"{name}: DeepSpeed stores no values of parameters that are neither frozen nor in the optimizer")
    return found


def _owned(kind: str, slot: _Slot, flats: list[torch.Tensor], dtype: torch.dtype) -> ForeignTensor:
    """What the optimizer has of a parameter: ``flats`` is one flat tensor of every rank."""
    return pieced(kind, slot.name, dtype, slot.shape, [(flats[rank], start, end) for rank, start, end in slot.pieces])


def _state_tensors(optimizer: _Optimizer, notes: list[str]) -> list[ForeignTensor]:
    """State tensors with a value for each element, sorted by kind. A note names those that are of any other form."""
    found: dict[str, list[ForeignTensor]] = {}
    left: dict[str, str] = {}
    for slot in optimizer.slots:
        for key, value in optimizer.states[0].get(slot.index, {}).items():
            if number(value) is not None and (slot.shape or key == "step"):
                continue
            flats = [state[slot.index][key] for state in optimizer.states]
            if all(torch.is_tensor(flats[rank]) and flats[rank].numel() >= end for rank, _, end in slot.pieces):
                found.setdefault(key, []).append(_owned(f"optimizer.{key}", slot, flats, value.dtype))
            else:
                left.setdefault(key, slot.name)
    notes += [f"state {key}, first of {name}: not one value for each element" for key, name in left.items()]
    return [tensor for tensors in found.values() for tensor in tensors]


def _scalars(folder: Path, optimizer: _Optimizer) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for slot in optimizer.slots:
        states = [state.get(slot.index, {}) for state in optimizer.states]
        group = optimizer.groups[slot.group]
        stored = {**({"step": group["step"]} if "step" in group else {}), **states[0]}  # FusedAdam's group may be behind
        for key, value in stored.items():
            if number(value) is None or not (slot.shape or key == "step"):
                continue
            values = {number(state.get(key, value)) for state in states}
            if len(values) > 1:
                text = f"{folder}: ranks disagree about {key} of {slot.name} ({values}). Remedy: use another tag; this one"
                raise CheckpointError(f"{text} has files of different runs.")
            found.setdefault(key, {})[slot.name] = float(number(value) or 0)
    return found


def _config(main: dict[str, Any]) -> dict[str, Any]:
    """The configuration; empty if the user had passed a path, which is all that is stored then."""
    return main["ds_config"] if isinstance(main["ds_config"], dict) else {}


def _optimizer_type(main: dict[str, Any], groups: list[dict[str, Any]], notes: list[str]) -> str:
    section = _config(main).get("optimizer") or {}
    configured = str(section.get("type", ""))
    if configured.lower() == "adam":
        configured = "AdamW" if (section.get("params") or {}).get("adam_w_mode", True) else "Adam"
    found = optimizer_name(groups) or _TYPES.get(configured.lower(), configured)
    if groups and not found:
        notes.append("the optimizer's type is not stored, because the user had passed an optimizer or a configuration file")
    return found


def _counters(main: dict[str, Any], notes: list[str]) -> dict[str, int]:
    config = _config(main)
    accumulation = config.get("gradient_accumulation_steps")
    micro, batch = config.get("train_micro_batch_size_per_gpu"), config.get("train_batch_size")
    if not isinstance(accumulation, int):
        if isinstance(micro, int) and isinstance(batch, int):
            accumulation = max(1, batch // (micro * main["dp_world_size"]))
        else:
            accumulation = 1
            notes.append("gradient_accumulation_steps is not stored; micro_steps assumes 1")
    kept = ("global_steps", "skipped_steps", "global_samples")
    counters: dict[str, int] = {key: int(main[key]) for key in kept if key in main}
    return {**counters, "micro_steps": counters["global_steps"] * accumulation}


def _scaler(rank: dict[str, Any]) -> dict[str, Any]:
    scaler = rank.get("loss_scaler")
    return vars(scaler) if isinstance(scaler, _Record) else {}


def _loss_scale(scaler: dict[str, Any], main: dict[str, Any]) -> dict[str, Any]:
    """The loss scale, from the attributes of a scaler or from the entries that stage 0 stores, which have no hysteresis."""
    section = _config(main).get("fp16") or {}
    return {
        "scale": float(scaler.get("cur_scale", 1.0)),
        "dynamic": bool(scaler.get("dynamic", scaler.get("dynamic_loss_scale", False))),
        "window": int(scaler.get("scale_window") or 1000),
        "hysteresis_left": int(scaler.get("cur_hysteresis", 1)),
        "consecutive": bool(scaler.get("consecutive_hysteresis", False)),
        "minimum": float(scaler.get("min_scale", section.get("min_loss_scale", 1.0))),
        "steps": int(scaler.get("cur_iter", 0)),
        "last_overflow": int(scaler.get("last_overflow_iter", -1)),
    }
