"""``zerorun-checkpoint diff``: say how two checkpoints differ, reading a chunk of a tensor at a time."""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import DamagedError
from ...log import counted, listed
from ..manifest import Manifest
from ..quantised_states import decoded, is_coded, scales
from ..read import Read, Reader
from ..tensorfile import dtype_of, memory_of
from ..write_plan import MODEL
from .choose import locate
from .inspect import readable, table
from .salvage import Salvage

_CHUNK = 1 << 20  # elements, of which a comparison makes a few copies in fp64
_SHOWN = 20
_FACTS = ("counters", "scheduler", "loss_scale", "client_state", "client_states", "extra_state", "aliases")
_ABSENT = {"$": "absent"}


def run(args: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """The exit status and the lines to print. Raises CheckpointError if one of them is not there."""
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(Salvage(locate(Path(directory), tag)))
            for directory, tag in ((args.a, args.tag_a), (args.b, args.tag_b))
        )
        sets = [compare_set(a, b, kind, args.tolerance) for kind in dict.fromkeys([*a.sets, *b.sets])]
        facts = compare_facts(a, b, args.tolerance)
    differ = bool(facts or a.problems or b.problems) or any(found.differ for found in sets)
    most = None if args.all else _SHOWN
    return int(differ), _page(a, b, [found for found in sets if found.differ or found.notes], facts, most)


# -- tensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How two tensors of one shape differ: in ``elements`` of them, by at most ``absolute``.

    ``relative``: that divided by the largest finite magnitude in either tensor.
    """

    name: str
    elements: int
    absolute: float
    relative: float


@dataclass
class SetDifference:
    """What differs between the sets of one name in A and B. ``forms``: (tensor, dtype and shape in A, in B).

    ``damaged``: tensors that could not be compared. ``notes``: what is no difference, but not what one might expect.
    """

    name: str
    equal: int
    only_a: list[str]
    only_b: list[str]
    forms: list[tuple[str, str, str]]
    values: list[Difference]
    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differ(self) -> bool:
        return bool(self.only_a or self.only_b or self.forms or self.values or self.damaged)


def compare_set(a: Salvage, b: Salvage, kind: str, tolerance: float) -> SetDifference:
    """Compare the tensors of one set. Values are compared if shapes are equal, whatever the dtypes."""
    in_a, in_b = a.places(kind), b.places(kind)
    only_a, only_b = [name for name in in_a if name not in in_b], [name for name in in_b if name not in in_a]
    found = SetDifference(kind, 0, only_a if b.is_whole(kind) else [], only_b if a.is_whole(kind) else [], [], [])
    found.damaged += (only_b if not a.is_whole(kind) else []) + (only_a if not b.is_whole(kind) else [])
    if kind == MODEL:
        _compare_left_out(a, b, found)
    for name in (name for name in in_a if name in in_b):
        left, right = a.tensor(kind, name), b.tensor(kind, name)
        alike = (left.dtype, left.shape) == (right.dtype, right.shape)
        if not alike:
            form = f"{left.dtype} {list(left.shape)}", f"{right.dtype} {list(right.shape)}"
            found.forms.append((name, *form))
        try:
            difference = compare_values(a, b, kind, name) if left.shape == right.shape else None
        except DamagedError as error:
            (a if str(error).startswith(f"{a.path}/") else b).note(error)
            found.damaged.append(name)
            continue
        if difference is not None and not (tolerance and difference.relative <= tolerance):
            found.values.append(difference)
        elif alike:
            found.equal += 1
    found.values.sort(key=lambda difference: (-difference.relative, -difference.absolute))
    return found


def _compare_left_out(a: Salvage, b: Salvage, found: SetDifference) -> None:
    """Compare frozen weights that one checkpoint has, and of which the other has only the checksums."""
    for here, there, names, side in ((a, b, found.only_a, "B"), (b, a, found.only_b, "A")):
        base = (there.manifest.frozen_base if there.manifest else None) or {}
        same = 0
        for name in [name for name in names if name in base]:
            try:
                own = {"dtype": here.tensor(MODEL, name).dtype, "crc32": _checksum(here, name)}
            except DamagedError as error:
                here.note(error)
                found.damaged.append(name)
                continue
            same += own == base[name]
            if own != base[name]:
                forms = [f"{value['dtype']} crc32 {value['crc32']}" for value in (own, base[name])]
                found.forms.append((name, *(forms if side == "B" else reversed(forms))))
        if same:
            what = counted(same, "frozen weight")
            found.notes.append(f"left out of {side} (frozen_base), with the checksums of the other's: {what}")


def _checksum(reader: Reader, name: str) -> str:
    """The checksum of the whole tensor's bytes, as in a manifest's ``frozen_base``."""
    crc = 0
    for (part,) in _chunks((reader,), MODEL, name):
        crc = zlib.crc32(memory_of(part), crc)
    return f"{crc:08x}"


def compare_values(a: Reader, b: Reader, kind: str, name: str) -> Difference | None:
    """How the two tensors ``name``, of one shape, differ; None if they do not. NaN equals NaN."""
    elements, absolute = 0, 0.0
    for left, right in _chunks((a, b), kind, name):
        if left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            continue
        left, right = _exact(left), _exact(right)
        differing = (left != right) & ~(left.isnan() & right.isnan())
        count = int(differing.sum())
        if count:
            gaps = (left[differing].double() - right[differing].double()).abs()
            elements, absolute = (
                elements + count,
                max(absolute, float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).max())),
            )
    if not elements:
        return None
    largest = max(float(_exact(part).double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for pair in _chunks((a, b), kind, name)
                  for part in pair)  # fmt: skip
    return Difference(name, elements, absolute, absolute / largest if largest else math.inf)


def _chunks(readers: Sequence[Reader], kind: str, name: str) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors ``name`` of all ``readers``, flattened, chunk by chunk. Codes of states are given as values."""
    described = [reader.tensor(kind, name) for reader in readers]
    beside = [scales(reader, kind, name) if is_coded(reader, kind, name) else None for reader in readers]
    for reader, scale in zip(readers, beside, strict=True):
        if scale is not None:
            reader.read(scale)
    for start in range(0, described[0].numel, _CHUNK):
        numel = min(_CHUNK, described[0].numel - start)
        parts = [torch.empty(numel, dtype=dtype_of(tensor.dtype)) for tensor in described]
        for reader, part in zip(readers, parts, strict=True):
            reader.read(Read(kind, name, start, part))
        coded = zip(parts, beside, strict=True)
        yield [part if scale is None else decoded(kind, part, scale.out, start, None) for part, scale in coded]


def _exact(values: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that can be compared: fp64 or int64."""
    if values.dtype.is_complex:
        return torch.view_as_real(values).flatten().double()
    if values.dtype == torch.uint64:
        return values.view(torch.int64)
    return values.to(torch.float64 if values.dtype.is_floating_point else torch.int64)


# -- what manifests say ------------------------------------------------------------------------------------------


Tensors = Mapping[str, torch.Tensor]


def compare_facts(a: Salvage, b: Salvage, tolerance: float) -> list[tuple[str, str, str]]:
    """(what, its value in A, in B) for all that differs beside the tensors of sets; empty if a manifest is lost."""
    if a.manifest is None or b.manifest is None:
        return []
    left = {**_flat(a.manifest), **_flat_base(a.manifest, b.manifest), **_flat_adapters(a)}
    right = {**_flat(b.manifest), **_flat_base(b.manifest, a.manifest), **_flat_adapters(b)}
    tensors = a.state(), b.state()
    found = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, _ABSENT), right.get(key, _ABSENT)
        try:
            same = _same(one, other, *tensors, tolerance)
        except KeyError:  # a tensor that cannot be read
            continue
        if not same:
            found.append((key, _shown(one), _shown(other)))
    return [*found, *_compare_parameters(a.manifest, b.manifest, tolerance)]


def _flat(manifest: Manifest) -> dict[str, Any]:
    """Return dotted key -> value, encoded as in the manifest."""
    flat: dict[str, Any] = {}
    for key in _FACTS:
        _flatten(getattr(manifest, key), key, flat)
    optimizer = manifest.optimizer or {}
    for key in ("type", "groups"):
        _flatten(optimizer.get(key), f"optimizer.{key}", flat)
    return flat


def _flat_base(one: Manifest, other: Manifest) -> dict[str, Any]:
    """The checksums in ``one`` of frozen weights that are left out of both. ``_compare_left_out`` compares the others."""
    both = (other.frozen_base or {}).keys()
    return {f"frozen_base.{name}": str(value) for name, value in (one.frozen_base or {}).items() if name in both}


def _flat_adapters(side: Salvage) -> dict[str, Any]:
    """The configurations of adapters, which say what their tensors mean."""
    flat: dict[str, Any] = {}
    adapters = side.adapters()
    for path, content in adapters.files.items() if adapters is not None else ():
        config = _parsed(content) if path.endswith(".json") else {}
        for key, value in config.items():
            flat[f"{path}.{key}"] = sorted(map(str, value)) if isinstance(value, list) else value  # sets
    return flat


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _flatten(value: Any, where: str, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and "$" not in value and value:
        for key, item in value.items():
            _flatten(item, f"{where}.{key}", found)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            _flatten(item, f"{where}[{index}]", found)
    elif value not in (None, {}, []):
        found[where] = value


def _compare_parameters(a: Manifest, b: Manifest, tolerance: float) -> Iterator[tuple[str, str, str]]:
    """Compare what is said of each parameter that both have: whether it is trained, its group, the optimizer's scalars."""
    left, right = _by_parameter(a), _by_parameter(b)
    for key in dict.fromkeys([*left, *right]):
        of_a, of_b = left.get(key, {}), right.get(key, {})
        both = [name for name in a.parameters if name in b.parameters]
        pairs = {name: (of_a.get(name, _ABSENT), of_b.get(name, _ABSENT)) for name in both}
        wrong = [name for name, (one, other) in pairs.items() if not _same(one, other, {}, {}, tolerance)]
        if wrong:
            one, other = pairs[wrong[0]]
            yield f"{key} of {listed(wrong, 1)}", _shown(one), _shown(other)


def _by_parameter(manifest: Manifest) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key in ("trainable", "group"):
        found[key] = {name: entry[key] for name, entry in manifest.parameters.items()}
    for key, entries in manifest.optimizer["scalars"].items() if manifest.optimizer is not None else ():
        found[f"optimizer.{key}"] = {name: entry["value"] for entry in entries for name in entry["names"]}
    return found


def _same(one: Any, other: Any, tensors_a: Tensors, tensors_b: Tensors, tolerance: float) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        if one.get("$") == other.get("$") and one.get("$") in ("tensor", "ndarray"):
            return _same_tensors(tensors_a[one["name"]], tensors_b[other["name"]], tolerance)
        return one.keys() == other.keys() and all(_same(one[k], other[k], tensors_a, tensors_b, tolerance) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(x, y, tensors_a, tensors_b, tolerance) for x, y in pairs)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one == other or (isinstance(one, float) and math.isclose(one, other, rel_tol=tolerance))
    return bool(one == other)


def _same_tensors(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.allclose(_exact(one).double(), _exact(other).double(), rtol=tolerance, atol=0.0, equal_nan=True)


def _shown(value: Any, most: int = 60) -> str:
    text = "absent" if value is _ABSENT else str(readable(value))
    return text if len(text) <= most else text[: most - 3] + "..."


# -- the page ----------------------------------------------------------------------------------------------------


def _page(
    a: Salvage, b: Salvage, sets: Sequence[SetDifference], facts: Sequence[tuple[str, str, str]], most: int | None
) -> Iterator[str]:
    yield from table([("A", str(a.path)), ("B", str(b.path))])
    yield from _damage(a, b)
    for found in sets:
        yield ""
        yield f"{found.name}: {_summary(found)}"
        yield from (f"  {note}" for note in found.notes)
        kinds = (("only in A", found.only_a), ("only in B", found.only_b), ("not compared, being damaged", found.damaged))
        for what, names in kinds:
            if names:
                yield f"  {what}: {', '.join(names[:most])}{_more(names, most)}"
        if found.forms:
            yield from table([("of another form", "A", "B"), *found.forms[:most]])
            yield from _rest(found.forms, most)
        if found.values:
            rows = [(d.name, f"{d.elements:,}", f"{d.absolute:.3g}", f"{d.relative:.3g}") for d in found.values[:most]]
            yield from table([("differing", "elements", "absolute", "relative"), *rows], right=(1, 2, 3))
            yield from _rest(found.values, most)
    if facts:
        yield from ("", *table([("beside tensors", "A", "B"), *facts[:most]]), *_rest(facts, most))
    if not any(found.differ for found in sets) and not facts:
        yield "what can be compared is equal" if a.problems or b.problems else "equal"


def _damage(a: Salvage, b: Salvage) -> Iterator[str]:
    """What of the two cannot be compared, and why."""
    for letter, side in (("A", a), ("B", b)):
        if side.problems:
            yield f"  {letter} is damaged; what can be read is compared:"
            yield from (f"    {problem}" for problem in side.problems)
        if side.manifest is None:
            yield "    without a manifest: its tensors as their files have them, unchecked, and nothing beside them"


def _summary(found: SetDifference) -> str:
    text = f"{counted(found.equal, 'tensor')} alike"
    if not found.values:
        return text
    absolute, relative = (max(getattr(d, key) for d in found.values) for key in ("absolute", "relative"))
    return f"{text}, {len(found.values):,} differing by up to {absolute:.3g}, relative {relative:.3g}"


def _more(items: Sequence[Any], most: int | None) -> str:
    return f" and {len(items) - most} more" if most is not None and len(items) > most else ""


def _rest(items: Sequence[Any], most: int | None) -> Iterator[str]:
    if _more(items, most):
        yield f"  {_more(items, most).strip()} (--all lists them)"
