"""Which hosts take part, with which slots: hostfiles, filters and SLURM's node lists. Pure functions on text.

A hostfile has a line for each host; what follows ``#`` is a comment:

    node1 slots=8
    alice@node2 slots=8 port=2222
    gpu[03-06] slots=4          # four hosts
    node3 slots=4 max_slots=8   # Open MPI's; changes nothing
    fe80::17 slots=2            # or [fe80::17]

A filter has DeepSpeed's grammar, ``HOST[:SLOT[,SLOT...]][@HOST...]``, extended by ranges of slots (``0-3``) and hosts.
The order of ranks is that of the hostfile, whatever the order in a filter.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zerorun.errors import LaunchError, did_you_mean
from zerorun.log import listed
from zerorun.watch.launch_environment import tasks_of_nodes

_NAME = re.compile(r"(?!-)[A-Za-z0-9_.:%-]+")  # also IPv6 addresses, with or without a zone
_USER = re.compile(r"(?!-)[A-Za-z0-9_.-]+")
_RANGE = re.compile(r"\[([^\[\]]*)\]")
_MOST_HOSTS = 100_000  # from one name with ranges: more must be a mistyped number
_MOST_SLOTS = 4096


@dataclass(frozen=True)
class Host:
    """One host. ``slots``: the local devices to use, ascending; None if the hostfile does not say how many it has."""

    name: str
    slots: tuple[int, ...] | None = None
    user: str | None = None
    port: int | None = None  # of its ssh server

    @property
    def address(self) -> str:
        """``NAME`` or ``USER@NAME``, as ssh accepts it."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


# -- hostfiles ---------------------------------------------------------------------------------------------------------


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Return the hosts in ``text``. Raises a LaunchError that names ``source``, the line, the reason and the remedy."""
    found: dict[str, int] = {}  # name in lower case -> line
    hosts: list[Host] = []
    for number, line in enumerate(text.split("\n"), 1):  # as editors count lines; splitlines also splits elsewhere
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entry = _parse_entry(words)
            for name in expand(entry.name):
                _check_name(name)
                if name.lower() in found:
                    raise ValueError(f"host {name!r} is already in line {found[name.lower()]}. Remedy: leave one out.")
                found[name.lower()] = number
                hosts.append(replace(entry, name=name))
        except ValueError as error:
            raise LaunchError(f"{source}, line {number}: {error}") from None
    if not hosts:
        raise LaunchError(f"{source}: no host in it. Remedy: add lines such as 'node1 slots=8'.")
    return hosts


def _parse_entry(words: list[str]) -> Host:
    name, user = words[0], None
    if "@" in name:
        user, _, name = name.partition("@")
        if not _USER.fullmatch(user):
            raise ValueError(f"{user!r} is not a user name. Remedy: USER@HOST, of letters, digits and any of '._-'.")
    name = name[1:-1] if _is_bracketed_address(name) else name
    host, seen = Host(name, user=user), set()
    has_slots = any(word.startswith("slots=") for word in words)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if has_slots and key in ("max_slots", "max-slots"):  # of Open MPI: how many may be there, whoever asks
            _number(word, value, 1, _MOST_SLOTS)
            continue
        if key not in ("slots", "port", "user") or not equals:
            raise ValueError(f"{word!r} is not understood. Remedy: write slots=N, port=N or user=NAME.")
        if key in seen:
            raise ValueError(f"{key}= is given twice. Remedy: leave one out.")
        seen.add(key)
        if key == "user":
            if user is not None or not _USER.fullmatch(value):
                raise ValueError(f"{word!r}: not a user name, or a second one. Remedy: give one, as USER@HOST.")
            host = replace(host, user=value)
        elif key == "slots":
            host = replace(host, slots=tuple(range(_number(word, value, 1, _MOST_SLOTS))))
        else:
            host = replace(host, port=_number(word, value, 1, 65535))
    return host


def _is_bracketed_address(name: str) -> bool:
    return name.startswith("[") and name.endswith("]") and ":" in name


def _number(word: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high):
        raise ValueError(f"{word!r}: expected a number from {low} to {high}. Remedy: correct it or leave it out.")
    return int(value)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host name or address. Remedy: HOST, [IPv6] or a range such as node[1-4].")
    if ":" in name:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:  # MPI's HOST:SLOTS, or HOST:PORT
            raise ValueError(f"{name!r} is not an IPv6 address. Remedy: HOST slots=N port=N, without a colon.") from None


# -- ranges ------------------------------------------------------------------------------------------------------------


def expand(name: str) -> list[str]:
    """``node[1-3,07]`` -> node1, node2, node3, node07; several brackets give all combinations. Raises ValueError."""
    parts = _RANGE.split(name)
    if any("[" in part or "]" in part for part in parts[::2]):
        raise ValueError(f"{name!r}: brackets do not match. Remedy: write ranges as node[1-3,07].")
    choices: list[list[str]] = []
    count = 1
    for index, part in enumerate(parts):
        choices.append([part] if index % 2 == 0 else _expand_range(name, part))
        count *= len(choices[-1])
        if count > _MOST_HOSTS:
            raise ValueError(f"{name!r}: more than {_MOST_HOSTS} hosts. Remedy: correct the range.")
    return ["".join(combination) for combination in product(*choices)]


def _expand_range(name: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        low, dash, high = item.partition("-")
        high = high if dash else low
        if not all(end.isascii() and end.isdigit() and len(end) < 10 for end in (low, high)) or int(low) > int(high):
            raise ValueError(f"{name!r}: {item!r} is not a range. Remedy: write ranges as node[1-3,07].")
        if len(numbers) + int(high) - int(low) >= _MOST_HOSTS:
            raise ValueError(f"{name!r}: more than {_MOST_HOSTS} hosts. Remedy: correct the range.")
        numbers += [str(value).zfill(len(low)) for value in range(int(low), int(high) + 1)]
    return numbers


def split_list(text: str) -> list[str]:
    """``a[1-2,4],b`` -> ``a[1-2,4]`` and ``b``: commas inside brackets do not separate."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text)


# -- filters -----------------------------------------------------------------------------------------------------------


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Return the hosts and slots that ``include`` names, or those that ``exclude`` does not name. Raises LaunchError."""
    if include and exclude:
        raise LaunchError("--include and --exclude exclude each other. Remedy: use one of them.")
    if not include and not exclude:
        return list(hosts)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named = _parse_filter(option, text, hosts)
    kept: list[Host] = []
    for host in hosts:
        slots = named.get(host.name)
        whole = host.name in named and slots is None
        if whole or (exclude and host.name not in named):
            kept += [host] if whole == bool(include) else []
        elif slots is not None and host.slots is not None:
            kept.append(replace(host, slots=tuple(slot for slot in host.slots if (slot in slots) == bool(include))))
    kept = [host for host in kept if host.slots != ()]
    if not kept:
        raise LaunchError(f"{option} {text!r} leaves no host. Hosts: {_names(hosts)}.")
    return kept


def _parse_filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, frozenset[int] | None]:
    """Return host name -> the slots that ``text`` names; None stands for all slots. Raises LaunchError."""
    known = {host.name: host for host in hosts}
    named: dict[str, frozenset[int] | None] = {}
    for entry in text.split("@"):
        try:
            names, slots = _parse_filter_entry(entry.strip(), known)
            for name in names:
                host = known.get(name)
                if host is None:
                    hint = f"no host {name!r}. {did_you_mean(name, known)}".rstrip()
                    raise ValueError(f"{hint} Hosts: {_names(hosts)}.")
                _check_slots(host, slots)
                before = named.get(name, frozenset())
                named[name] = None if slots is None or before is None else before | slots
        except ValueError as error:
            raise LaunchError(f"{option} {text!r}: {error}") from None
    return named


def _parse_filter_entry(entry: str, known: Iterable[str]) -> tuple[list[str], frozenset[int] | None]:
    if entry in known:  # before any splitting: an IPv6 address has colons of its own
        return [entry], None
    address, bracket, rest = entry.partition("]")
    if entry.startswith("[") and bracket and ":" in address:
        names, colon, slots = [address[1:]], rest[:1], rest[1:]
        if rest and colon != ":":
            raise ValueError(f"{entry!r} is not understood.")
    else:
        name, colon, slots = entry.rpartition(":")
        names = expand(name if colon else entry)
    if not names[0]:
        raise ValueError("a host is missing. Remedy: HOST, HOST:0,2 or several of them with @ between.")
    return names, _parse_slots(entry, slots) if colon else None


def _parse_slots(entry: str, text: str) -> frozenset[int]:
    try:
        return frozenset(int(number) for number in _expand_range(entry, text))
    except ValueError:
        raise ValueError(f"{entry!r}: {text!r} is not a list of slots. Remedy: 0,2 or 0-3.") from None


def _check_slots(host: Host, slots: frozenset[int] | None) -> None:
    if slots is None:
        return
    if host.slots is None:
        raise ValueError(f"the slots of {host.name!r} are not known. Remedy: add slots=N to its line in the hostfile.")
    missing = sorted(slots - set(host.slots))
    if missing:
        raise ValueError(f"host {host.name!r} has slots 0 to {len(host.slots) - 1}, not {missing[0]}.")


def _names(hosts: Sequence[Host]) -> str:
    return listed([host.name for host in hosts], 12)


def first_hosts(hosts: Sequence[Host], count: int | None, least: int | None = None) -> list[Host]:
    """Return the first ``count`` hosts; all for None.

    With a ``count``, raises LaunchError if there are fewer than ``least`` or, if that is None, fewer than ``count``.
    """
    if count is not None and (count if least is None else least) > len(hosts):
        raise LaunchError(f"--num-nodes {count}: there are only {len(hosts)} hosts: {_names(hosts)}.")
    return list(hosts[:count])


def limit_slots(hosts: Sequence[Host], count: int | None) -> list[Host]:
    """Return ``hosts`` with ``count`` slots each; None keeps the slots that they have.

    Raises LaunchError for a host with fewer slots, or if neither its slots nor ``count`` are known.
    """
    limited = []
    for host in hosts:
        if host.slots is None:
            if count is None:
                raise LaunchError(
                    f"host {host.name!r}: how many workers? Remedy: add slots=N to its line in the hostfile, or give "
                    "--nproc-per-node N."
                )
            limited.append(replace(host, slots=tuple(range(count))))
        elif count is not None and count > len(host.slots):
            raise LaunchError(f"--nproc-per-node {count}: host {host.name!r} has only {len(host.slots)} slots.")
        else:
            kept = host.slots[:count]
            limited.append(replace(host, slots=kept))
    return limited


# -- SLURM -------------------------------------------------------------------------------------------------------------


def slurm_hosts(environment: Mapping[str, str], asked: int | None) -> list[Host]:
    """Return the nodes of the allocation in ``environment``. Raises LaunchError.

    A node has a slot for each GPU. Without GPUs it has a slot for each task; the number of slots is unknown if SLURM does
    not tell the tasks, or if the user has ``asked`` for a number of workers.
    """
    told = environment["SLURM_JOB_NODELIST"]
    try:
        names = [name for part in split_list(told) for name in expand(part)]
    except ValueError as error:
        raise LaunchError(f"SLURM_JOB_NODELIST: {error}") from None
    if not names:
        raise LaunchError("SLURM_JOB_NODELIST is empty. Remedy: run in salloc or sbatch, or give --hostfile.")
    gpus = slurm_gpus(environment)
    if gpus:
        return [Host(name, tuple(range(gpus))) for name in names]
    tasks = [] if asked is not None else tasks_of_nodes(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(names):
        return [Host(name) for name in names]
    return [Host(name, tuple(range(count))) for name, count in zip(names, tasks, strict=True)]


def slurm_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs each node of the allocation has; 0 if SLURM tells of none."""
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        counts = [item.rpartition(":")[2] for item in environment.get(variable, "").split(",")]  # perhaps a100:4,v100:2
        if all(count.isdecimal() for count in counts) and any(int(count) for count in counts):
            return sum(int(count) for count in counts)
    return 0
