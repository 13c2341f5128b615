"""``zerorun-checkpoint export``: write a checkpoint's weights as a Hugging Face directory, one stretch at a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...log import counted, listed
from ...optim.loss_scaler import DTYPES
from ..adapters import Adapters, stored_adapters
from ..extra_states import left_out
from ..manifest import Manifest, never_cast
from ..offline import STRETCH_BYTES, Stream, refuse_existing, write_weights
from ..read import Read, Reader
from ..tensorfile import Described, dtype_code, dtype_of
from ..write_plan import MASTER, MODEL, is_single
from .choose import in_bytes, locate, open_reader

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_SHOWN = 5


def run(args: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """The exit status and the lines to print. If it raises CheckpointError, OUT was not made."""
    out = Path(args.out)
    refuse_existing(out)
    with open_reader(locate(Path(args.dir), args.tag)) as reader:
        assert reader.manifest is not None
        weights = Weights(reader, DTYPES[args.dtype] if args.dtype else None)
        adapters, lost = stored_adapters(reader), list[str]()
        if adapters is not None:
            lost = _leave_out(adapters, reader)
            named = [(kind, *pair) for kind, pairs in adapters.names.items() for pair in pairs.items()]
            streams = [weights.stream(name, kind, new) for kind, new, name in named]
            small = adapters.files
        else:
            _refuse_partial(reader.manifest, reader.path)
            streams = [weights.stream(name) for name in reader.places(MODEL)]
            small = _configuration(reader, args.dtype and str(DTYPES[args.dtype]).removeprefix("torch."))
        path, left = write_weights(out, streams, small, args.max_shard_size), left_out(reader.manifest.extra_state)
    return 0, chain(_lines(path, streams, small, weights.overflowed, lost), [f"note: {left}"] if left else [])


def _refuse_partial(manifest: Manifest, path: Path) -> None:
    if manifest.frozen_base:
        raise CheckpointError(
            f"{path} was saved with exclude_frozen_parameters: {counted(len(manifest.frozen_base), 'frozen weight')} are "
            "not in it. Remedy: load it into an engine of the base model, and call engine.export()."
        )


def _leave_out(adapters: Adapters, reader: Reader) -> list[str]:
    """Take out of ``adapters`` those that were frozen, and so were not saved. Return what they are called.

    Raises CheckpointError if none remains, or if PEFT computes tensors of any.
    """
    lost = [kind for kind, names in adapters.names.items() if any(n not in reader.places(MODEL) for n in names.values())]
    if adapters.computed or len(lost) == len(adapters.names):
        what = "PEFT computes from its parameters when it saves them" if adapters.computed else "were frozen, and left out"
        raise CheckpointError(
            f"{reader.path} is of a model whose adapters {what}. Remedy: load it into an engine, and call engine.export()."
        )
    folders = [kind.rpartition("/")[0] for kind in lost]
    for kind in lost:
        del adapters.names[kind]
    for name in [name for name in adapters.files if name.rpartition("/")[0] in folders]:
        del adapters.files[name]
    return [folder or "default" for folder in folders]


def _lines(
    path: Path, streams: list[Stream], small: dict[str, bytes], overflowed: list[str], lost: list[str]
) -> Iterator[str]:
    size = in_bytes(sum(stream.tensor.nbytes for stream in streams))
    dtypes = ", ".join(sorted({stream.tensor.dtype for stream in streams}))
    yield f"{path}: {counted(len(streams), 'tensor')}, {size}, {dtypes}"
    if any(is_single(stream.set) for stream in streams):
        yield "note: these are the adapters alone; PeftModel.from_pretrained(the base model, this directory) opens them"
        if lost:
            yield f"note: without {', '.join(lost)}: frozen, and left out of the checkpoint"
    elif _CONFIG not in small:
        yield f"note: there is no {_CONFIG}, since the model was none of Hugging Face's: only the weights can be loaded"
    if overflowed:
        yield f"note: values beyond the range of the dtype became infinite in {listed(overflowed, _SHOWN)}"


@dataclass
class Weights:
    """The weights of a checkpoint in ``dtype`` (None: as they are). ``overflowed``: tensors with values that exceed it."""

    reader: Reader
    dtype: torch.dtype | None
    overflowed: list[str] = field(default_factory=list)

    def stream(self, name: str, kind: str = MODEL, new: str = "") -> Stream:
        """One tensor, to be read when it is written into the set ``kind``, under the name ``new`` if that is given."""
        stored = dtype_of(self.reader.tensor(MODEL, name).dtype)
        cast = self.dtype is not None and stored.is_floating_point and not self._as_it_is(name)
        wanted = self.dtype if self.dtype is not None and cast else stored
        shape = self.reader.tensor(MODEL, name).shape
        source, described = self._source(name, stored, wanted), Described(name, dtype_code(wanted, name), shape)
        return Stream(kind, replace(described, name=new or name), partial(self._stretches, source, described, wanted))

    @cached_property
    def _as_it_is(self) -> Callable[[str], bool]:
        manifest = self.reader.manifest
        return never_cast(manifest.parameters if manifest is not None else {})

    def _source(self, name: str, stored: torch.dtype, wanted: torch.dtype) -> str:
        """The set with the most precise values of the weight: the master's, unless it is wanted as it is, or is fp64."""
        if wanted == stored or name not in self.reader.places(MASTER):
            return MODEL
        master = dtype_of(self.reader.tensor(MASTER, name).dtype)
        return MASTER if master.itemsize > stored.itemsize else MODEL

    def _stretches(self, source: str, tensor: Described, wanted: torch.dtype) -> Iterator[torch.Tensor]:
        stored = dtype_of(self.reader.tensor(source, tensor.name).dtype)
        length = STRETCH_BYTES // stored.itemsize
        for start in range(0, tensor.numel, length):
            part = torch.empty(min(length, tensor.numel - start), dtype=stored)
            self.reader.read(Read(source, tensor.name, start, part))
            cast = part.to(wanted)
            if (
                cast is not part
                and tensor.name not in self.overflowed[-1:]
                and bool((cast.isinf() & part.isfinite()).any())
            ):
                self.overflowed.append(tensor.name)
            yield cast


def _configuration(reader: Reader, dtype: str | None) -> dict[str, bytes]:
    """config.json, with ``dtype`` in it, and generation_config.json, if the checkpoint has them."""
    assert reader.manifest is not None
    small = {name: reader.small_file(name) for name in (_CONFIG, _GENERATION) if name in reader.manifest.files}
    if dtype and _CONFIG in small:
        config = json.loads(small[_CONFIG])
        old = [key for key in ("torch_dtype",) if key in config]  # as transformers called it before 4.56
        config.update(dict.fromkeys(["dtype", *old], dtype))
        small[_CONFIG] = json.dumps(config, indent=2).encode()
    return small
