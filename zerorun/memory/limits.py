"""Limits: how much more host memory this process and its node can take. They are read from files, without torch.

Every figure errs on the high side, because a training that would fit must not be refused: memory that only caches files
counts as free, and so does swap space.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 reports a number near 2^63 if there is no limit


@dataclass(frozen=True)
class Limit:
    """A limit on memory. ``available``: bytes that are left.

    ``cgroup``: the path of the control group that shares the limit; "/" for the whole node, None for this process alone.
    ``virtual``: the limit is on address space, which memory takes as soon as it is allocated, written or not.
    """

    name: str
    available: int
    cgroup: str | None = "/"
    virtual: bool = False


def host_limits(root: Path = Path("/")) -> list[Limit]:
    """Return all limits that are set. ``root``: the folder that contains /proc and /sys."""
    swap = _meminfo(root).get("SwapFree", 0)
    return [*_node(root, swap), *_cgroups(root, swap), *_process(root)]


def node_room(root: Path = Path("/")) -> int | None:
    """Return how many more bytes all processes of this node and control group can take; None if it is not known."""
    shared = [limit.available for limit in host_limits(root) if limit.cgroup is not None]
    return min(shared, default=None)


def node_name(root: Path = Path("/")) -> str:
    """Return the host's name and the beginning of its kernel's boot id, because several hosts may have one name."""
    boot = _text(root / "proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} ({boot[:8]})" if boot else socket.gethostname()


def cgroup_path(root: Path = Path("/")) -> str:
    """Return the path of this process's control group that may limit its memory; "/" if there is none."""
    return _memory_cgroup(root)[1]


def _node(root: Path, swap: int) -> Iterator[Limit]:
    available = _meminfo(root).get("MemAvailable")
    if available is not None:
        yield Limit("free memory of the node", available + swap)


def _cgroups(root: Path, swap: int) -> Iterator[Limit]:
    """Yield the limits of this process's control group and of its parents."""
    version, path = _memory_cgroup(root)
    base = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    most, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    v1 = ("total_inactive_file", "total_active_file")
    cache = v1 if version == 1 else ("inactive_file", "active_file", "slab_reclaimable")
    for group in (Path(path), *Path(path).parents):
        folder = base / group.relative_to("/")
        limit, usage = _number(folder / most), _number(folder / used)
        if limit is None or usage is None or limit >= _NO_LIMIT:
            continue
        stat = _fields(folder / "memory.stat")
        reclaimable = sum(stat.get(name, 0) for name in cache)
        yield Limit(f"{most} of cgroup {group}", max(limit - usage + reclaimable, 0) + swap, str(group))


def _memory_cgroup(root: Path) -> tuple[int, str]:
    """Return (cgroup version, path) of this process in the hierarchy that limits memory."""
    found = (2, "/")
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            return 1, path or "/"
        if not controllers:
            found = (2, path or "/")
    return found


def _process(root: Path) -> Iterator[Limit]:
    status = _fields(root / "proc/self/status")
    for name, field in (("RLIMIT_AS", "VmSize:"), ("RLIMIT_DATA", "VmData:")):
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY and field in status:
            yield Limit(name, max(soft - 1024 * status[field], 0), cgroup=None, virtual=True)


def _meminfo(root: Path) -> dict[str, int]:
    """Return the bytes in /proc/meminfo by name."""
    return {name.rstrip(":"): 1024 * value for name, value in _fields(root / "proc/meminfo").items()}


def _fields(path: Path) -> dict[str, int]:
    """Parse the lines that consist of a name and a number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
