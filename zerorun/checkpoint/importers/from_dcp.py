"""Read checkpoints of torch.distributed.checkpoint, as FSDP2 and torchtitan write them, in one process and without risk.

The folder's ``.metadata`` lists all tensors, with whole shapes, and all other values, each of which is a pickle of its own.
The keys follow no standard. Known here are: the model's tensors, under their plain names or under ``model``; and the
optimizer's state, by name, flat or nested, as ``torch.distributed.checkpoint.state_dict`` returns it, or by number, as
``Optimizer.state_dict`` does.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ...errors import CheckpointError
from ...log import counted
from ..files import is_plain, read_regular
from ..foreign import (
    HARMLESS,
    PATHS,
    PATHS_IN,
    ForeignCheckpoint,
    ForeignTensor,
    first_line,
    match_groups,
    number,
    optimizer_name,
    plain_groups,
    refused_class,
)
from .pickles import RuledUnpickler
from .torch_files import FileSlice, look_through, refuse_strange_tensors

_OPTIMIZERS = ("optimizer", "optimizers", "optim")
_STATE = re.compile(r"(state|param_groups)(?:\.(.+))?", re.DOTALL)  # of an optimizer
_MODELS = ("model", "module", "state_dict", "model_state_dict")
_SCHEDULERS = ("lr_scheduler", "lr_schedulers", "scheduler")
_OTHERS = ("train_state", "dataloader", "step", "global_step", "epoch", "trainer", "rng", *_SCHEDULERS)
_STEPS = ("train_state.step", "train_state.global_step", "step", "global_step", "trainer.global_step")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "freqs_cis", "position_ids")
_MOST_ELEMENTS = 1 << 20  # of a tensor in the client state
_MOST_METADATA = 1 << 30  # bytes
_MOST_IN_PATH = 100  # names
_MOST_DIMS, _MOST_NUMEL = 64, 1 << 62
_MOST_CORNERS = 1 << 22  # of the parts of a tensor
_RECORDS = {
    kind: tuple(entry.name for entry in fields(kind))
    for kind in (
        *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.TensorProperties),
        *(metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, filesystem._StorageInfo),
    )
}
_CLASSES: tuple[Any, ...] = (*_RECORDS, metadata._MEM_FORMAT_ENCODING, torch.Size)
_METADATA = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}
_METADATA |= {(module, kind.__name__): kind for kind in PATHS for module in PATHS_IN}


@dataclass(frozen=True)
class _Refused:
    """Stands for a value whose pickle was not loaded. ``why``: the reason, in words."""

    why: str


def _memory_format(kind: Any, name: Any) -> Any:
    """Stand for getattr, by which Python 3.11.0 to 3.11.3 store a member of an enumeration: .metadata has this one."""
    if kind is metadata._MEM_FORMAT_ENCODING and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name!r:.80} of {kind!r:.80}")


class _MetadataUnpickler(RuledUnpickler):
    """Knows the classes of which ``.metadata`` consists, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA:
            return _METADATA[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _memory_format
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise ImportError(f"{module}.{name}")

    def make(self, kind: Any, args: Any) -> Any:
        if kind is _memory_format and len(args) == 2:
            return _memory_format(*args)
        values = args[0] if kind is torch.Size and len(args) == 1 else args
        wanted = str if kind in (*PATHS, torch.serialization._get_layout) else int
        if not isinstance(kind, (type, types.FunctionType)) or not all(type(value) is wanted for value in values):
            raise pickle.UnpicklingError(f"it calls {kind!r:.80} with {args!r:.80}")
        if kind in _RECORDS:
            return kind.__new__(kind)
        return kind(values) if kind is torch.Size else kind(*args)

    def fill(self, made: Any, state: Any) -> None:
        """Set the attributes of an instance of the records; never those of a class, an enumeration's member or a dtype."""
        if type(made) is metadata.TensorProperties and type(state) is tuple:
            made.__setstate__(state)  # type: ignore[no-untyped-call]
        elif type(made) in _RECORDS and type(state) is dict:
            made.__dict__.update({name: state[name] for name in _RECORDS[type(made)] if name in state})
        else:
            super().fill(made, state)


class _Store:
    """The folder of a checkpoint: says what is in it, and reads its values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = self._read_metadata(folder / ".metadata")
        self._check_files()
        self.entries = self.metadata.state_dict_metadata
        paths = self.metadata.planner_data or {}  # in the order in which they were saved, unlike the entries
        self.paths = {
            key: tuple(map(str, paths.get(key, (key,)))) for key in {**paths, **self.entries} if key in self.entries
        }

    def _read_metadata(self, path: Path) -> metadata.Metadata:
        try:
            found = _MetadataUnpickler(io.BytesIO(read_regular(path, _MOST_METADATA))).load()
            if isinstance(found, metadata.Metadata) and found.storage_data:
                _check_types(found)
        except FileNotFoundError:
            text = f"{path}: no such file, so {self.folder} is no finished checkpoint of torch.distributed.checkpoint."
            raise CheckpointError(f"{text} Remedy: give the folder of one step, with all its files.") from None
        except ImportError as error:
            text = f"{path}: names {error}, which is no part of such a file, so it was not loaded."
            raise CheckpointError(f"{text} Remedy: do not use it, or save again with torch's own planner.") from error
        except Exception as error:  # pickle raises whatever damage leads to
            text = f"{path}: cannot be read; it may be damaged or cut short ({first_line(error)})."
            raise CheckpointError(f"{text} Remedy: copy it again, or use another checkpoint.") from error
        if not isinstance(found, metadata.Metadata) or not found.storage_data:
            raise CheckpointError(f"{path}: not the metadata of a checkpoint. Remedy: give the folder of one.")
        return found

    def _check_files(self) -> None:
        """Raise CheckpointError unless every value has bytes of its own in a file."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for info in self.metadata.storage_data.values():
            ranges.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length))
        for name, found in ranges.items():
            path, end = self.folder / name, max(end for _, end in found)
            if not path.is_file():
                raise CheckpointError(f"{path}: no such file. Remedy: copy the files of all ranks into one folder.")
            if path.stat().st_size < end:
                text = f"{path}: has {path.stat().st_size} bytes of {end} at least, so it was cut short."
                raise CheckpointError(f"{text} Remedy: copy it again, or use another checkpoint.")
            if any(begin < before for (_, before), (begin, _) in pairwise(sorted(found))):
                text = f"{path}: two values are said to lie at the same place."
                raise CheckpointError(f"{text} Remedy: use another checkpoint; this one was not made by torch.")

    def is_tensor(self, key: str) -> bool:
        return isinstance(self.entries[key], metadata.TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.entries[key].size)  # type: ignore[union-attr]

    def dtype(self, key: str) -> torch.dtype:
        return self.entries[key].properties.dtype  # type: ignore[union-attr]

    def tensor(self, key: str) -> torch.Tensor:
        """The whole tensor. Raises CheckpointError if a part is missing or damaged."""
        return self.values([key])[key]  # type: ignore[no-any-return]

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in keys:
            try:
                found[key] = self._whole(key) if self.is_tensor(key) else self._value(key)
            except CheckpointError:
                raise
            except Exception as error:  # torch has no exception of its own for damaged files
                text = f"{self.folder}: {key} cannot be read; a file may be damaged ({first_line(error)})."
                raise CheckpointError(f"{text} Remedy: copy it again, or use another checkpoint.") from error
        return found

    def _whole(self, key: str) -> torch.Tensor:
        """Put a tensor together from its parts, each of which torch.save has written."""
        shape, dtype = self.shape(key), self.dtype(key)
        chunks: list[Any] = self.entries[key].chunks  # type: ignore[union-attr]
        boxes = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks}
        infos = {box: self.metadata.storage_data.get(metadata.MetadataIndex(key, box[0])) for box in boxes}
        have = sum(math.prod(sizes) for _, sizes in boxes)
        if have < math.prod(shape) or not all(infos.values()):
            text = f"{self.folder}: has {have} of the {math.prod(shape)} elements of {key}."
            raise CheckpointError(f"{text} Remedy: use another checkpoint; this one was not saved by all ranks.")
        if not makes_up(boxes, shape):
            text = f"{self.folder}: the parts of {key} overlap, and leave others of its elements without values."
            raise CheckpointError(f"{text} Remedy: use another checkpoint; this one was not made by torch.")
        if any(math.prod(box[1]) * dtype.itemsize > info.length for box, info in infos.items()):
            raise ValueError("its file is too short")
        whole = torch.empty(shape, dtype=dtype)
        for (offsets, sizes), info in infos.items():
            part = self._load(info, ())
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes:
                raise ValueError("what is stored has another form")
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            whole[place] = part.detach()
        return whole

    def _value(self, key: str) -> Any:
        """Load a value that is no tensor, without running code in it; return a :class:`_Refused` if that cannot be done."""
        try:
            return self._load(self.metadata.storage_data[metadata.MetadataIndex(key)], HARMLESS)
        except pickle.UnpicklingError as error:
            if not refused_class(error):
                raise
            return _Refused(f"names {refused_class(error)}, which is not known to be harmless")

    def _load(self, info: Any, harmless: Sequence[Any]) -> Any:
        with (self.folder / info.relative_path).open("rb") as file, torch.serialization.safe_globals(list(harmless)):
            part: Any = FileSlice(file, info.offset, info.length)
            look_through(part)
            loaded = torch.load(part, map_location="cpu", weights_only=True)
        refuse_strange_tensors(loaded, info.length)
        return loaded


def makes_up(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """True if every element of a tensor is in exactly one of ``boxes``, which are (offsets, sizes).

    The mixed difference of a box's indicator function is 1 or -1 at each corner of the box, and 0 elsewhere. Functions are
    equal if their mixed differences are, so the corners of all boxes must add up to those of the whole tensor. Dimensions
    in which nothing is cut do not matter. Also False if the boxes are cut in more dimensions than anybody would cut.
    """
    found = list(boxes)
    cut = [dim for dim, size in enumerate(shape) if any(box[1][dim] != size for box in found)]
    if (len(found) + 1) << len(cut) > _MOST_CORNERS:
        return False
    sums: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in ((1, [0] * len(shape), shape), *((-1, *box) for box in found)):
        for sides in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + sizes[dim] * side for dim, side in zip(cut, sides, strict=True))
            sums[corner] += sign * (-1) ** sum(sides)
    return not any(sums.values())


def _check_types(found: metadata.Metadata) -> None:
    """Raise ValueError, AttributeError or TypeError for metadata that torch cannot have written. Reads no file."""
    entries, stored, paths = found.state_dict_metadata, found.storage_data, found.planner_data or {}
    if not all(type(value) is dict for value in (entries, stored, paths)):
        raise ValueError("it has no lists of values")
    for key, entry in entries.items():
        if type(key) is not str or type(entry) not in (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata):
            raise ValueError(f"it has {key!r:.80} of type {type(entry).__name__}")
        if isinstance(entry, metadata.TensorStorageMetadata):
            _check_tensor(key, entry)
    tensors = [entry for entry in entries.values() if isinstance(entry, metadata.TensorStorageMetadata)]
    if sum(len(entry.chunks) for entry in tensors) > len(stored):
        raise ValueError("it has more parts of tensors than values")
    for index, info in stored.items():
        if type(index) is not metadata.MetadataIndex or type(info) is not filesystem._StorageInfo:
            raise ValueError(f"it has a value of type {type(info).__name__}")
        if not is_plain(info.relative_path) or not all(type(n) is int and n >= 0 for n in (info.offset, info.length)):
            raise ValueError(f"a value is at {info.offset!r:.40} of the file {info.relative_path!r:.80}")
        if info.transform_descriptors:
            raise ValueError(f"a value is transformed by {info.transform_descriptors!r:.80}; save without extensions")
    for path in paths.values():
        if not isinstance(path, (tuple, list)) or len(path) > _MOST_IN_PATH or not all(type(n) in (str, int) for n in path):
            raise ValueError("a value has no path")


def _check_tensor(key: str, entry: metadata.TensorStorageMetadata) -> None:
    boxes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
    alike = all(type(box) is torch.Size and len(box) == len(entry.size) for box in boxes)
    if not alike or len(entry.size) > _MOST_DIMS or not isinstance(entry.properties.dtype, torch.dtype):
        raise ValueError(f"{key!r:.80} is described as no tensor")
    if any(size < 0 for box in boxes for size in box) or math.prod(filter(None, entry.size)) > _MOST_NUMEL:
        raise ValueError(f"{key!r:.80} has the shape {list(entry.size)!r:.80}")
    for chunk in entry.chunks:
        if any(begin + size > end for begin, size, end in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)):
            raise ValueError(f"{key!r:.80} has a part outside of it")


@dataclass
class _Keys:
    """The keys, sorted by what they hold: ``model`` by the model's names, ``state`` by parameter and kind.

    The other dicts are by what is left of the path.
    """

    model: dict[str, str] = field(default_factory=dict)
    state: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    scheduler: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Roots:
    """The first parts of keys. ``known``: they are the usual ones, and a model may also be at no key of its own."""

    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    known: bool

    def may_be_of_model(self, path: Sequence[str]) -> bool:
        """True if the tensor at ``path`` may be one of the model."""
        root = path[0].partition(".")[0]
        return root in self.models or (self.known and len(path) == 1 and root not in _OTHERS)


def read_dcp(
    directory: Path,
    names: Sequence[Sequence[str]] | None = None,
    model: str | None = None,
    optimizer: str | None = None,
) -> ForeignCheckpoint:
    """Read what ``torch.distributed.checkpoint.save`` has written to ``directory``. Tensors are read when asked for.

    ``names``: the parameters of each optimizer group, in order. They are only needed if the optimizer's state is stored by
    number. ``model``, ``optimizer``: the keys that these have, if they are none of the usual ones. Raises CheckpointError
    if files are missing, are damaged, name unknown classes, or hold no model.
    """
    store = _Store(Path(directory))
    roots = _Roots((model,) if model else _MODELS, (optimizer,) if optimizer else _OPTIMIZERS, known=model is None)
    try:
        return _read(store, names, roots)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        text = (
            f"{directory}: the optimizer or the rest is in a layout of no known program ({type(error).__name__}: {error})."
        )
        raise CheckpointError(f"{text} Remedy: save what get_state_dict gives, or the model only.") from error


def _read(store: _Store, names: Sequence[Sequence[str]] | None, roots: _Roots) -> ForeignCheckpoint:
    keys = _sort_keys(store, roots)
    notes: list[str] = []
    groups = _groups(store, keys)
    if any(isinstance(name, int) for group in groups for name in group["params"]):
        _give_names(store, keys, groups, names)
        if names is None:
            notes.append("the optimizer's state: stored by number; its names are those that fit, in the model's order")
    group_of = {name: index for index, group in enumerate(groups) for name in group["params"] if name in keys.model}
    aliases = _tied(store, keys, group_of)
    trainable = _trainable(store, keys, group_of, aliases, notes)
    scalars = _scalars(store, keys)
    client_state = _client_state(store, keys, notes)
    kind = optimizer_name(groups)
    if groups and not kind:
        notes.append("the optimizer's type: not stored")
    return ForeignCheckpoint(
        tensors=_tensors(store, keys, aliases, notes),
        trainable=trainable,
        aliases=aliases,
        optimizer_type=kind,
        group_of={name: index for name, index in group_of.items() if trainable.get(name)},
        groups=plain_groups(groups),
        scalars=scalars,
        counters=_counters(client_state, scalars, notes),
        loss_scale=None,
        scheduler=_scheduler(store, keys),
        client_state=client_state,
        notes=notes,
    )


def _sort_keys(store: _Store, known: _Roots) -> _Keys:
    """Sort the keys by what they hold. A first part that all paths have in common, such as ``app``, is dropped."""
    roots = {path[0] for path in store.paths.values()}
    seconds = {path[1] for path in store.paths.values() if len(path) > 1}
    wrapped = len(roots) == 1 and not roots & set(known.models) and bool(seconds & {*known.models, *known.optimizers})
    keys, tensors = _Keys(), {}
    for key, whole in store.paths.items():
        path = whole[1:] if wrapped else whole
        text = ".".join(path)
        root, _, rest = text.partition(".")
        optimizer = _STATE.fullmatch(rest) if root in known.optimizers else None
        if optimizer and optimizer[1] == "state":
            name, _, kind = (optimizer[2] or "").rpartition(".")
            keys.state.setdefault(name, {})[kind] = key
        elif optimizer:
            keys.groups[optimizer[2] or ""] = key
        elif root in _SCHEDULERS:
            keys.scheduler[rest] = key
        elif store.is_tensor(key) and known.may_be_of_model(path):
            tensors[key] = path
        else:
            keys.others[text] = key
    _sort_model(keys, tensors)
    _refuse_another_model(store, keys)
    return keys


def _refuse_another_model(store: _Store, keys: _Keys) -> None:
    """Raise CheckpointError if there are no tensors of a model, or only such as may be beside one of an unknown name."""

    def numel(found: Iterable[str]) -> int:
        return sum(math.prod(store.shape(key)) for key in found)

    inside: dict[str, list[str]] = {}
    for text, key in keys.others.items():
        if store.is_tensor(key) and "." in text:
            inside.setdefault(text.partition(".")[0], []).append(key)
    most = max(map(numel, inside.values()), default=0)
    named = any(len(store.paths[key]) > 1 for key in keys.model.values())
    if named or (keys.model and most <= numel(keys.model.values())):
        return
    what = "no tensors of a model" if not keys.model else "its model may be under a name that is not known"
    remedy = "pass --model KEY, and --optimizer KEY, with what it calls them" if inside else "import one that has a model"
    roots = sorted({path[0] for path in store.paths.values()})
    raise CheckpointError(f"{store.folder}: {what}; it has {', '.join(roots[:8])}. Remedy: {remedy}.")


def _sort_model(keys: _Keys, tensors: dict[str, tuple[str, ...]]) -> None:
    """Find the model's own names of its ``tensors``.

    These names may begin with ``model.`` themselves, so the paths and the names in the optimizer decide.
    """
    nested = any(len(path) > 1 for path in tensors.values())
    plain = {".".join(path) for path in tensors.values()}
    prefixed = any(name not in plain and f"model.{name}" in plain for name in keys.state)
    for key, path in tensors.items():
        text = ".".join(path)
        if nested and len(path) > 1:
            keys.model[".".join(path[1:])] = key
        elif nested or (prefixed and path[0].partition(".")[0] != "model"):
            keys.others[text] = key
        else:
            keys.model[text.removeprefix("model.") if prefixed else text] = key


def _needed(store: _Store, keys: Iterable[str]) -> dict[str, Any]:
    values = store.values(keys)
    for key, value in values.items():
        if isinstance(value, _Refused):
            text = f"{store.folder}: {key} {value.why}, so it was not loaded. Remedy: save again without it; or, if you"
            raise CheckpointError(f"{text} trust the files, pass the class to torch.serialization.add_safe_globals.")
    return values


def _groups(store: _Store, keys: _Keys) -> list[dict[str, Any]]:
    """The optimizer's groups, with names or numbers in ``params``.

    The flat style has hyperparameters for each parameter: parameters with equal ones make a group.
    """
    values = _needed(store, keys.groups.values())
    found: dict[str, dict[str, Any]] = {}
    if "" in keys.groups:
        return list(values[keys.groups[""]])
    for rest, key in keys.groups.items():
        name, _, entry = rest.rpartition(".")
        found.setdefault(name, {})[entry] = values[key]
    if all("params" in group for group in found.values()):
        groups = [group for _, group in sorted(found.items(), key=lambda item: int(item[0]))]
        return groups or ([{"params": list(keys.state)}] if keys.state else [])
    joined: dict[str, dict[str, Any]] = {}
    for name, group in found.items():
        alike = repr(sorted(group.items()))
        joined.setdefault(alike, {**group, "params": []})["params"].append(name)
    return list(joined.values())


def _give_names(store: _Store, keys: _Keys, groups: list[dict[str, Any]], names: Sequence[Sequence[str]] | None) -> None:
    """Replace numbers by ``names``, or without ``names`` by the only ones that fit by shape and order."""

    def fits(group: int, start: int, name: str) -> bool:
        state = keys.state.get(str(groups[group]["params"][start]), {})
        shapes = [store.shape(key) for key in state.values() if store.is_tensor(key)]
        return all(shape in ((), store.shape(keys.model[name])) for shape in shapes)

    wanted = [len(group["params"]) for group in groups]
    sizes = {name: 1 for name, key in keys.model.items() if store.dtype(key).is_floating_point}
    chosen = match_groups(sizes, wanted, fits, str(store.folder)) if names is None else names
    if [len(group) for group in chosen] != wanted:
        text = f"{store.folder}: the optimizer's groups have {wanted} parameters."
        raise CheckpointError(f"{text} Remedy: give `names` with as many.")
    state: dict[str, dict[str, str]] = {}
    for index, group in enumerate(groups):
        for start, name in enumerate(chosen[index]):
            if name not in keys.model or not fits(index, start, name):
                text = f"{store.folder}: {name} does not fit in its place in group {index}."
                raise CheckpointError(f"{text} Remedy: correct `names`; the model has {', '.join(keys.model)}.")
            state[name] = keys.state.get(str(group["params"][start]), {})
        group["params"] = list(chosen[index])
    keys.state = {name: entries for name, entries in state.items() if entries}


def _tied(store: _Store, keys: _Keys, group_of: dict[str, int]) -> dict[str, str]:
    """Find the tied parameters: alias -> name. They are stored twice, but the optimizer has them once.

    So an alias is what the optimizer does not have, with exactly the values of a parameter that it has.
    """
    alike: dict[Any, list[str]] = {}
    for name, key in keys.model.items():
        alike.setdefault((store.shape(key), store.dtype(key)), []).append(name)
    found = {}
    for (shape, _), names in alike.items():
        spare = [name for name in names if name not in group_of]
        if math.prod(shape) < 2 or not spare or len(spare) == len(names):
            continue
        sums = {_sums(store.tensor(keys.model[name])): name for name in names if name in group_of}
        for name in spare:
            tensor = store.tensor(keys.model[name])
            stored = sums.get(_sums(tensor), "")
            constant = bool((tensor == tensor.flatten()[0]).all())  # many tensors are, without being tied
            if stored and not constant and torch.equal(tensor, store.tensor(keys.model[stored])):
                found[name] = stored
    return found


def _sums(tensor: torch.Tensor) -> tuple[float, float]:
    """Two sums that are equal for equal tensors, and hardly ever for others."""
    values = tensor.flatten().double()
    return float(values.sum()), float(values @ torch.arange(len(values), dtype=values.dtype))


def _trainable(
    store: _Store, keys: _Keys, group_of: dict[str, int], aliases: dict[str, str], notes: list[str]
) -> dict[str, bool]:
    """Return name -> whether the parameter is trainable.

    The format tells neither parameters from buffers nor frozen parameters from others, so the optimizer and the names must.
    """
    if not group_of:
        notes.append("the optimizer: none was stored, so that all floating-point tensors count as trainable parameters")
    found, guessed, without = {}, [], []
    for name, key in keys.model.items():
        if name in aliases or not store.dtype(key).is_floating_point or name.rpartition(".")[2] in _BUFFERS:
            continue
        found[name] = not group_of or (name in group_of and (name in keys.state or not keys.state))
        if group_of and name not in group_of:
            guessed.append(name)
        elif not found[name]:
            without.append(name)
    if guessed:
        notes.append(f"taken for frozen parameters, but may be buffers: {', '.join(guessed)}")
    if without:
        notes.append(f"taken for frozen, because the optimizer has them without state: {', '.join(without)}")
    return found


def _is_whole(store: _Store, keys: _Keys, name: str, kind: str) -> bool:
    """True if this state has a value for each element of its parameter."""
    key, shape = keys.state[name][kind], store.shape(keys.model[name])
    return store.is_tensor(key) and store.shape(key) == shape and (bool(shape) or kind != "step")


def _tensors(store: _Store, keys: _Keys, aliases: dict[str, str], notes: list[str]) -> list[ForeignTensor]:
    def tensor(kind: str, name: str, key: str) -> ForeignTensor:
        return ForeignTensor(kind, name, store.dtype(key), store.shape(key), partial(store.tensor, key))

    found = [tensor("model", name, key) for name, key in keys.model.items() if name not in aliases]
    state: dict[str, list[ForeignTensor]] = {}
    left: dict[str, str] = {}
    for name, kinds in keys.state.items():
        for kind, key in kinds.items():
            if name not in keys.model:
                left.setdefault("of no tensor of the model", key)
            elif _is_whole(store, keys, name, kind):
                state.setdefault(kind, []).append(tensor(f"optimizer.{kind}", name, key))
            elif store.is_tensor(key) and store.shape(key):
                left.setdefault(f"{kind} is not one value for each element", key)
    notes += [f"state, first {key}: {why}" for why, key in left.items()]
    return found + [tensor for tensors in state.values() for tensor in tensors]


def _scalars(store: _Store, keys: _Keys) -> dict[str, dict[str, float]]:
    places = {
        key: (kind, name)
        for name, kinds in keys.state.items()
        for kind, key in kinds.items()
        if name in keys.model and not (store.is_tensor(key) and store.shape(key)) and not _is_whole(store, keys, name, kind)
    }
    found: dict[str, dict[str, float]] = {}
    for key, value in _needed(store, places).items():
        kind, name = places[key]
        if number(value) is not None:
            found.setdefault(kind, {})[name] = float(number(value) or 0)
    return found


def _client_state(store: _Store, keys: _Keys, notes: list[str]) -> dict[str, Any]:
    small, strange = {}, []
    for text, key in keys.others.items():
        if text.partition(".")[0] in _OPTIMIZERS:
            strange.append(text)
        elif store.is_tensor(key) and math.prod(store.shape(key)) > _MOST_ELEMENTS:
            notes.append(f"{text}: a large tensor outside of the model and the optimizer")
        else:
            small[key] = text
    if strange:
        notes.append(f"the optimizer: in a layout of no known program ({', '.join(strange[:3])}, ...)")
    found = {}
    for key, value in store.values(small).items():
        if isinstance(value, _Refused):
            notes.append(f"{small[key]}: {value.why}")
        else:
            found[small[key]] = value
    counts = Counter(text.partition(".")[0] for text in found)
    if counts:
        kept = [root if root in found else f"{root} ({counted(number, 'value')})" for root, number in counts.items()]
        notes.append(f"no part of the model, its optimizer or its schedule, and kept in client_state: {', '.join(kept)}")
    return found


def _counters(state: dict[str, Any], scalars: dict[str, dict[str, float]], notes: list[str]) -> dict[str, int]:
    train_state = state.get("train_state")
    known = {f"train_state.{key}": value for key, value in train_state.items()} if isinstance(train_state, dict) else {}
    for key in _STEPS:
        value = number({**known, **state}.get(key))
        if value is not None:
            return {"global_steps": int(value)}
    steps = scalars.get("step")
    if not steps:
        return {}
    notes.append("the number of steps: not stored, so the most that the optimizer has counted")
    return {"global_steps": int(max(steps.values()))}


def _scheduler(store: _Store, keys: _Keys) -> dict[str, Any] | None:
    """The scheduler's state, with the dicts in it put together again."""
    found: dict[str, Any] = {}
    for key, value in _needed(store, keys.scheduler.values()).items():
        path = next(rest for rest, other in keys.scheduler.items() if other == key).split(".")
        if path == [""]:
            return value if isinstance(value, dict) else None
        inner = found
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return found or None
