"""A picture of ranks as text: which ranks form each group, and where hosts begin. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..log import counted
from .process_topology import ProcessTopology

_MOST_ROWS, _FIRST_ROWS = 16, 12  # more than 16 rows are shown as the first 12 and the last two
_MOST_COLUMNS, _FIRST_COLUMNS = 8, 4
_LAST = 2
_GROUPS = {"tensor": ["tensor"], "shard": ["shard"], "replicate": ["replicate"], "pipe": ["pipe"]}
_GROUPS["data"] = ["replicate", "shard"]


def draw(
    ranks: ProcessTopology, ranks_per_host: int | None = None, views: Mapping[str, Sequence[int]] | None = None
) -> str:
    """``ranks`` over the axes pipe, replicate, shard, tensor: the degrees, a grid, and the first group of each axis.

    The grid has a row for each (pipe, replicate) and a column for each shard rank; a cell is one tensor group. With
    ``ranks_per_host`` it shows hosts as well. ``views``: the first group of axes besides. Long rows and columns are cut in
    the middle; the missing rows are counted.
    """
    degrees = " x ".join(f"{axis} {dim}" for axis, dim in zip(ranks.axes, ranks.dims, strict=True))
    title = f"{counted(ranks.world_size(), 'rank')} = {degrees}; ranks rise fastest along tensor"
    return "\n".join([title, "", *_grid(ranks, ranks_per_host), "", *_table(ranks, views or {})])


def _grid(ranks: ProcessTopology, ranks_per_host: int | None) -> Iterator[str]:
    shard, tensor = ranks.get_dim("shard"), ranks.get_dim("tensor")
    columns = _shown(shard, _MOST_COLUMNS, _FIRST_COLUMNS)
    width = max(len(_listed(range(ranks.world_size() - tensor, ranks.world_size()))), len(f"shard {shard - 1}"))
    places = [(p, r) for p in range(ranks.get_dim("pipe")) for r in range(ranks.get_dim("replicate"))]
    names = [f"pipe {pipe}, replicate {replicate}" for pipe, replicate in places]
    margin = max(map(len, names))
    heads = ["...".rjust(3) if column is None else f"shard {column}".rjust(width) for column in columns]
    yield f"{'':{margin}}  {'   '.join(heads)}".rstrip()
    for row in _shown(len(places), _MOST_ROWS, _FIRST_ROWS):
        if row is None:
            yield f"... {len(places) - _FIRST_ROWS - _LAST} rows more"
            continue
        first = row * shard * tensor
        line = f"{names[row]:{margin}}  {_cells(columns, first, tensor, width, ranks_per_host)}"
        yield f"{line}   {_hosts(first, shard * tensor, ranks_per_host)}" if ranks_per_host else line
    yield ""
    yield "A cell is a tensor group, a row holds one copy of its stage's states."
    if ranks_per_host:
        yield f"A bar stands where another host of {counted(ranks_per_host, 'rank')} begins."


def _cells(columns: Sequence[int | None], first: int, tensor: int, width: int, ranks_per_host: int | None) -> str:
    """The tensor groups of one row, whose first rank is ``first``."""
    text = ""
    for place, column in enumerate(columns):
        begin = first + (column or 0) * tensor
        if place:
            bar = ranks_per_host and column is not None and begin // ranks_per_host != (begin - 1) // ranks_per_host
            text += " | " if bar else "   "
        text += "..." if column is None else _listed(range(begin, begin + tensor)).rjust(width)
    return text


def _hosts(first: int, count: int, ranks_per_host: int) -> str:
    low, high = first // ranks_per_host, (first + count - 1) // ranks_per_host
    return f"host {low}" if low == high else f"hosts {low}-{high}"


def _table(ranks: ProcessTopology, views: Mapping[str, Sequence[int]]) -> Iterator[str]:
    world = ranks.world_size()
    rows = [("axis", "groups", "of", "the first")]
    groups = {axis: ranks.ranks_along(0, *members) for axis, members in _GROUPS.items()}
    for axis, group in {**groups, **views}.items():
        rows.append((axis, str(world // len(group)), str(len(group)), _listed(group)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for axis, count, size, members_text in rows:
        yield f"{axis:{widths[0]}}  {count:>{widths[1]}}  {size:>{widths[2]}}  {members_text}"


def _listed(ranks: Sequence[int]) -> str:
    """Return ``4-7`` for consecutive ranks, else list them one by one; ``...`` stands for the middle of many."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = _shown(len(ranks), _MOST_COLUMNS, _FIRST_COLUMNS)
    return ", ".join("..." if place is None else str(ranks[place]) for place in shown)


def _shown(count: int, most: int, first: int) -> list[int | None]:
    """Return the indices below ``count`` to show; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(first), None, *range(count - _LAST, count)]
