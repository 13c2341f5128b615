"""Match: find a model's tensors in the files of a checkpoint or of pretrained weights, and refuse files that do not fit.

Nothing is changed by it: it comes before the first value is loaded.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckpointError
from ..log import is_rank_zero, listed, logger
from ..plan.parameter_kinds import as_bytes
from .ranks import Ranks
from .read import Read, Reader
from .tensorfile import dtype_of
from .write_plan import MASTER, MODEL

_AT_ONCE = 1 << 22  # elements that are compared at once


@dataclass
class Wanted:
    """What the caller of ``load_checkpoint`` asked for."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    weights_only: bool = False
    random_numbers: bool = True
    allow_missing: tuple[str, ...] = ()

    def allows(self, name: str) -> bool:
        """True if the tensor or component ``name`` may be missing from the checkpoint."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allow_missing)


class NameMap:
    """Maps a model's tensor names to those in the files. ``aliases``: the model's other names of tied tensors.

    ``prefix``: what the base model's names begin with in a Hugging Face model with a head. Files without a manifest may
    have names with or without it.
    """

    def __init__(self, reader: Reader, aliases: dict[str, str], prefix: str = "") -> None:
        self.stored = set(reader.places(MODEL))
        self._kept = dict(reader.manifest.aliases) if reader.manifest else {}
        self._prefix = f"{prefix}." if prefix and reader.manifest is None else ""
        self._others: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._others.setdefault(name, []).append(alias)

    def find(self, name: str) -> str | None:
        """The name under which the files hold the model's tensor ``name``; None if they do not."""
        found = (self._find_as(known) for known in (name, *self._others.get(name, ())))
        return next((stored for stored in found if stored is not None), None)

    def _find_as(self, known: str) -> str | None:
        stored = self._kept.get(known, known)
        if stored not in self.stored and self._prefix:
            stored = known.removeprefix(self._prefix) if known.startswith(self._prefix) else self._prefix + known
        return stored if stored in self.stored else None

    def untied(self) -> list[tuple[str, str]]:
        """The tensors in the files that are one tensor here, in pairs: (the one that is loaded, one that is not)."""
        pairs = []
        for name, others in self._others.items():
            loaded = self.find(name)
            apart = {self._find_as(known) for known in others} - {None, loaded}
            pairs += [(loaded, other) for other in sorted(map(str, apart)) if loaded is not None]
        return pairs

    def left_over(self, names: Iterable[str]) -> list[str]:
        """The tensors in the files that a model with these ``names`` does not have."""
        known = {self.find(name) for name in names} | set(self._kept)
        same = [alias for others in self._others.values() for alias in others]
        known |= {variant for alias in same for variant in (alias, self._prefix + alias, alias.removeprefix(self._prefix))}
        return sorted(name for name in self.stored if name not in known)


def compare_tensors(reader: Reader, names: NameMap, shapes: dict[str, tuple[int, ...]], wanted: Wanted) -> None:
    """Raise CheckpointError if the files do not fit a model with tensors of these names and shapes."""
    found = {name: names.find(name) for name in shapes}
    base = (reader.manifest.frozen_base if reader.manifest else None) or {}
    missing = [n for n, stored in found.items() if stored is None and n not in base and not wanted.allows(n)]
    wrong = [
        f"{name!r} has shape {list(shape)} here and {list(reader.tensor(MODEL, stored).shape)} there"
        for name, shape in shapes.items()
        if (stored := found[name]) is not None and reader.tensor(MODEL, stored).shape != shape
    ]
    if wrong:
        raise misfit(reader, "does not fit this model:", wrong, "build the model as it was when the weights were saved.")
    for what, left in (("lacks", missing), ("has, beside what the model has,", names.left_over(shapes))):
        shown = [repr(name) for name in left]
        if left and wanted.strict:
            remedy = "pass strict=False, or for what is lacking allow_missing=[...] with names or patterns, if meant."
            raise misfit(reader, what, shown, remedy)
        if left and is_rank_zero():
            logger.warning("%s %s %s", reader.path, what, listed(shown))


def misfit(reader: Reader, what: str, items: Sequence[str], remedy: str) -> CheckpointError:
    return CheckpointError(f"{reader.path} {what} {listed(items)}. Remedy: {remedy}")


def compare_ties(reader: Reader, names: NameMap, wanted: Wanted, ranks: Ranks) -> None:
    """Raise CheckpointError if the files have several values of what is one tensor here. Collective: each reads a part.

    If not strict, there is only a warning, and one of them is loaded.
    """
    untied = [(loaded, other) for loaded, other in names.untied() if not _are_equal(reader, loaded, other, ranks)]
    for loaded, other in untied:
        what = f"{reader.path} has other values of {other!r} than of {loaded!r}, which are one tensor in this model"
        if wanted.strict:
            raise CheckpointError(
                f"{what}. Remedy: build the model without tying them (a Hugging Face model: tie_word_embeddings=False in "
                f"its configuration), or pass strict=False to load those of {loaded!r} alone."
            )
        if is_rank_zero():
            logger.warning("%s: those of %r are loaded.", what, loaded)


def _are_equal(reader: Reader, one: str, other: str, ranks: Ranks) -> bool:
    """True if two tensors in the files have the same values, in the dtype of the first. Collective."""
    if reader.tensor(MODEL, one).shape != reader.tensor(MODEL, other).shape:
        return False
    kind = MASTER if {one, other} <= reader.places(MASTER).keys() else MODEL
    described, equal = reader.tensor(kind, one), True
    share = -(-described.numel // ranks.size)
    end = min((ranks.rank + 1) * share, described.numel)
    for begin in range(ranks.rank * share, (ranks.rank + 1) * share, _AT_ONCE):  # as many turns on all ranks
        count = max(min(begin + _AT_ONCE, end) - begin, 0)
        pair = [torch.empty(count, dtype=dtype_of(described.dtype)) for _ in range(2)]
        reader.fetch([Read(kind, name, begin, out) for name, out in zip((one, other), pair, strict=True) if count], ranks)
        equal = equal and torch.equal(*map(as_bytes, pair))
    return all(ranks.gather(equal))
