"""Files of the Hugging Face hub whose tensors are not those of the model's class, but have a tensor for each expert.

transformers knows what belongs together, and how the names became others: its conversion mapping. What it would merge and
concatenate lies one after the other in the merged tensor, so nothing has to be put together: a rank reads of each file's
tensor what falls into its own part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_NUMBER = re.compile(r"\.(\d+)(?=\.)")  # of a layer or an expert, in a name
_Part = tuple[tuple[int, ...], int, str]  # (the numbers in its name, the place among the tensors of one expert, its name)
_MERGED, _JOINED = ["MergeModulelist"], ["MergeModulelist", "Concatenate"]


@dataclass(frozen=True)
class Joined:
    """A tensor of the model whose elements are those of the stored tensors ``parts``, one after the other.

    ``each``: so many of the parts make one row of its first dimension, where they are rows of the second; 0: the first part
    is the tensor, and others are the same tensor under more names. ``problem``: in words, why the parts do not make it.
    """

    parts: tuple[str, ...]
    each: int = 0
    problem: str = ""

    def shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The tensor's shape, from that of every part."""
        if not self.each or not part:
            return tuple(part)
        return (len(self.parts) // self.each, self.each * part[0], *part[1:])


def joined_by(model: nn.Module, stored: Iterable[str], known: Collection[str]) -> dict[str, Joined]:
    """Return what is stored, by the names of a transformers ``model``; {} if there is nothing to translate.

    ``known``: the names of the model, which are not translated. Tensors that would have to be computed keep their names.
    """
    names = list(stored)
    if all(name in known for name in names) or not _is_pretrained(model):
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping  # there, because the model is

    pretrained: Any = model
    transforms = get_model_conversion_mapping(pretrained)
    found: dict[str, list[_Part]] = {}
    counts: dict[str, set[int]] = {}
    for name in names:
        target, place, count = (name, 0, 0) if name in known else _translated(name, transforms)
        part = tuple(int(number) for number in _NUMBER.findall(name)), place, name
        found.setdefault(target, []).append(part)
        counts.setdefault(target, set()).add(count)
    return {target: _put_together(target, sorted(parts), counts[target]) for target, parts in found.items()}


def _put_together(target: str, parts: list[_Part], counts: set[int]) -> Joined:
    """What ``target`` is made of. ``counts``: of how many tensors each part is one, as ``_translated`` says."""
    each = max(counts)
    if not each:
        return Joined(tuple(sorted((name for *_, name in parts), key=lambda name: name != target)))
    names = tuple(name for *_, name in parts)
    if len(counts) > 1:
        return Joined(names, each, f"has {target!r} both whole and in parts, such as {names[0]!r}")
    places: dict[tuple[int, ...], list[int]] = {}
    for numbers, place, _ in parts:
        places.setdefault(numbers, []).append(place)
    wrong = [(0, *numbers)[-1] for numbers, found in places.items() if found != list(range(each))]
    if len({len(numbers) for numbers in places}) == 1:
        varying = [set(column) for column in zip(*places, strict=True) if len(set(column)) > 1]
        wrong += sorted(set(range(max(varying[0]))) - varying[0]) if len(varying) == 1 else []
    if not wrong:
        return Joined(names, each)
    return Joined(
        names, each, f"has not {each} of the tensors that make {target!r} for each expert, as of number {wrong[0]}"
    )


def _translated(name: str, transforms: Sequence[Any]) -> tuple[str, int, int]:
    """Return (the model's name, the place among the tensors of one expert, the number of these or 0)."""
    renamed = name
    for transform in transforms:
        if not hasattr(transform, "operations"):
            renamed, _ = transform.rename_source_key(renamed)
    for transform in transforms:
        if hasattr(transform, "operations"):
            target, pattern = transform.rename_source_key(renamed)
            if pattern is not None:
                operations = [type(operation).__name__ for operation in transform.operations]
                dims = [operation.dim for operation in transform.operations if hasattr(operation, "dim")]
                patterns = list(transform.source_patterns)
                lie_in_order = (operations, dims) in ((_MERGED, [0]), (_JOINED, [0, 1]))
                lie_in_order = lie_in_order and (len(patterns) > 1) == (operations == _JOINED)
                return (target, patterns.index(pattern), len(patterns)) if lie_in_order else (name, 0, 0)
    return renamed, 0, 0


def _is_pretrained(model: nn.Module) -> bool:
    kinds = type(model).__mro__
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)
