"""The manifest: what ``zerorun.json`` says of a checkpoint. Pure data, no tensors.

[Note: schema 1]
A checkpoint is a directory. Its tensors are stored whole, under the names of ``module.state_dict()``, in *sets* of
safetensors files. The set ``S`` consists of the files ``S-00001-of-0000N.safetensors`` and the index
``S.safetensors.index.json``. The sets:

    model            the weights, in the dtype that the model computes in, and its persistent buffers
    master           the fp32 weights that the optimizer updates, for parameters that have another dtype
    optimizer.KEY    the state KEY of the optimizer, such as optimizer.exp_avg. If it is U8, each element is a code, and
                     optimizer.KEY.scale has the scale of each 256 of them (ops/state_format.py)
    buffer           buffers that ranks have otherwise than the first of their pipeline stage, as ``rank 3: NAME``
    residual         what coding has left out of gradients, by rank
    state            tensors that the manifest refers to: random number generators, client state

``zerorun.json`` is ``{"crc32": C, "content": {...}}``, where C is the CRC-32 of the content as JSON with sorted keys and no
spaces. The content:

    schema           1. A reader refuses a number that it does not know
    tag, saved_at    the name of the directory; the time in UTC, ISO 8601
    versions         of zerorun, torch and Python
    counters         global_steps, micro_steps, skipped_steps, global_samples
    layout           how it was saved: world_size, stage, shard, replicate, train_batch_size, dtype, and the degrees pipe,
                     tensor, context and expert if they are not 1. It is for people; only what is by rank depends on it
    parameters       name -> shape, dtype, trainable, group (of the optimizer; null if not optimized), packed (only if
                     its bytes are not values of that dtype)
    aliases          other name of a tied tensor -> the name under which it is stored
    optimizer        type; groups: the hyperparameters of each; scalars: key -> list of {value, dtype, names};
                     states: the keys that have sets; name -> {value, dtype} of what belongs to no parameter, if anything
                     does: apart (under such keys of its state) and more (what its class adds to its state_dict)
    loss_scale, scheduler, data, client_state, extra_state, rng    as plain values (json_values.py)
    scheduler_kind   the class of the scheduler, as ``torch.StepLR``; only if it is one of torch's
    client_states    by rank, as plain values, of ranks that gave others than rank 0 (null: the same); only if any did
    frozen_base      null, or if frozen parameters were left out, name -> {dtype, crc32} of each
    sets             set -> list of its files
    files            file -> {bytes, crc32: 8 hexadecimal digits for each block}
    becomes_latest   false if ``latest`` was not meant to name it
    block_bytes      length of the blocks of a file, each of which has a checksum in crc32
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DamagedError
from .files import is_plain, read_regular
from .tensorfile import BLOCK_BYTES, FileRecord

SCHEMA = 1
MANIFEST = "zerorun.json"
_MOST_BYTES = 256 << 20  # of a manifest: enough for the checksums of 30 TB


def index_name(kind: str) -> str:
    """The name of the file that says which file holds which tensor of a set."""
    return f"{kind}.safetensors.index.json"


@dataclass
class Manifest:
    """The content of ``zerorun.json``. The Note describes the fields."""

    tag: str
    saved_at: str
    counters: dict[str, int]
    versions: dict[str, str] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    loss_scale: dict[str, Any] | None = None
    scheduler: Any = None
    scheduler_kind: str | None = None
    data: Any = None
    client_state: Any = None
    client_states: list[Any] | None = None
    extra_state: Any = None
    rng: Any = None
    frozen_base: dict[str, dict[str, Any]] | None = None
    sets: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    becomes_latest: bool = True

    @property
    def global_steps(self) -> int:
        return self.counters.get("global_steps", 0)

    def add_stage(self, stage: Manifest) -> None:
        """Take in what another pipeline stage's manifest says of its part of the model."""
        for name, described in stage.parameters.items():
            self.parameters.setdefault(name, described)
        self.aliases.update(stage.aliases)
        self.optimizer = self.optimizer or stage.optimizer
        if stage.extra_state is not None:
            self.extra_state = {**(self.extra_state or {}), **stage.extra_state}

    def to_text(self) -> str:
        """The file's text."""
        content = {**asdict(self), "schema": SCHEMA, "block_bytes": BLOCK_BYTES}
        content["files"] = {name: record.to_json() for name, record in self.files.items()}
        for name in ("client_states", "scheduler_kind"):
            if content[name] is None:
                del content[name]
        return json.dumps({"crc32": f"{_sum(content):08x}", "content": content}, indent=1)

    @classmethod
    def from_text(cls, text: str | bytes, path: Path) -> Manifest:
        """Read the file's text. ``path`` is for messages. Raises CheckpointError if it is damaged or too new."""
        try:
            outer = json.loads(text)
            content, expected = outer["content"], int(outer["crc32"], 16)
            schema, block_bytes = content.pop("schema"), content.pop("block_bytes")
            found = _sum({**content, "schema": schema, "block_bytes": block_bytes})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: it cannot be read as a manifest ({error!s:.200}).") from error
        if found != expected:
            raise DamagedError(f"{path} is damaged: its content has the checksum {found:08x}, not {expected:08x}.")
        if schema != SCHEMA or block_bytes != BLOCK_BYTES:
            raise CheckpointError(
                f"{path} has schema {schema!s:.20} with blocks of {block_bytes!s:.20} bytes; this version reads schema "
                f"{SCHEMA} with {BLOCK_BYTES}. Remedy: update zerorun."
            )
        try:
            files = {name: FileRecord.from_json(record) for name, record in content.pop("files").items()}
            _check({**content, "files": files})
            return cls(**content, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is not what schema {SCHEMA} describes ({error!s:.200}).") from error


def _sum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint's directory. Raises CheckpointError."""
    path = directory / MANIFEST
    try:
        text = read_regular(path, _MOST_BYTES, directory)
    except OSError as error:
        raise DamagedError(
            f"{directory} is no complete checkpoint: {MANIFEST} cannot be read: {error.strerror}."
        ) from error
    return Manifest.from_text(text, path)


# -- types -------------------------------------------------------------------------------------------------------
# Types are checked because whoever made the file can have made its checksum, too. Plain values are checked by
# json_values.py, when they are decoded.

_Test = Callable[[Any], bool]


def _is(*kinds: type) -> _Test:
    return lambda value: type(value) in kinds


def _or_null(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _list_of(test: _Test) -> _Test:
    return lambda value: type(value) is list and all(map(test, value))


def _object_of(test: _Test) -> _Test:
    """Test for an object with any keys, all of whose values pass ``test``."""
    return lambda value: type(value) is dict and all(map(test, value.values()))


def _object_with(**tests: _Test) -> _Test:
    """Test for an object that has at least these keys, with values that pass their tests."""
    return lambda value: type(value) is dict and all(key in value and test(value[key]) for key, test in tests.items())


def _is_tensor_file(value: Any) -> bool:
    return is_plain(value) and value.endswith(".safetensors")


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


_TEXT, _NUMBER, _PLAIN = _is(str), _is(int, float), _is(str, int, float, bool, type(None))
_PARAMETER = _object_with(shape=_list_of(_is_size), dtype=_TEXT, trainable=_is(bool), group=_or_null(_is_size))
_JSON, _DTYPE = _is(int, float, bool, str, list, dict, type(None)), _or_null(_TEXT)
_VALUE, _SCALAR = _object_with(value=_JSON, dtype=_DTYPE), _object_with(value=_JSON, dtype=_DTYPE, names=_list_of(_TEXT))
_TYPES: dict[str, _Test] = {
    "tag": _TEXT,
    "saved_at": _TEXT,
    "counters": _object_of(_is(int)),
    "versions": _object_of(_TEXT),
    "layout": _object_of(_PLAIN),
    "parameters": _object_of(_PARAMETER),
    "aliases": _object_of(_TEXT),
    "optimizer": _or_null(_object_with(type=_TEXT, groups=_list_of(_is(dict)), scalars=_object_of(_list_of(_SCALAR)))),
    "loss_scale": _or_null(_object_with(**dict.fromkeys(("scale", "hysteresis_left", "steps", "last_overflow"), _NUMBER))),
    "data": _or_null(_is(list)),
    "scheduler_kind": _or_null(_is(str)),
    "client_states": _or_null(_is(list)),
    "extra_state": _or_null(_is(dict)),
    "rng": _or_null(_is(list)),
    "frozen_base": _or_null(_object_of(_object_with(dtype=_TEXT, crc32=_TEXT))),
    "sets": lambda value: _object_of(_list_of(_is_tensor_file))(value) and all(map(is_plain, map(index_name, value))),
    "files": lambda value: all(map(is_plain, value)),
    "becomes_latest": _is(bool),
}


def _check(content: dict[str, Any]) -> None:
    """Raise ValueError if a field does not have the type that the Note says, or if a name is a path."""
    for key, test in _TYPES.items():
        if key in content and not test(content[key]):
            raise ValueError(f"{key} is {content[key]!r:.80}")
    optimizer = content.get("optimizer") or {}
    for key in ("apart", "more"):
        if not _object_of(_VALUE)(optimizer.get(key, {})):
            raise ValueError(f"the optimizer's {key} is {optimizer[key]!r:.80}")
    states = optimizer.get("states", [])
    if not _list_of(is_plain)(states):
        raise ValueError(f"the optimizer's states are {states!r:.80}")


def never_cast(parameters: Mapping[str, Mapping[str, Any]]) -> Callable[[str], bool]:
    """Return a function that tells by name which tensors must not be cast.

    These are packed parameters, and what else their layers have that is no parameter: their scales.
    """
    packed = {name for name, entry in parameters.items() if entry.get("packed")}
    layers = tuple(f"{name.rpartition('.')[0]}." for name in packed)
    return lambda name: name in packed or (name not in parameters and name.startswith(layers))
