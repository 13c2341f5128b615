"""Hostfiles, filters and SLURM's lists: examples by hand, and thousands by chance against an oracle that parses nothing."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from harness import patience

from zerorun.errors import LaunchError
from zerorun.launcher.hosts import Host, expand, first_hosts, limit_slots, parse_hostfile, select, slurm_hosts, split_list

EXAMPLES = 1000


def hosts_of(text: str) -> list[Host]:
    return parse_hostfile(text, "pods.txt")


def slots_of(hosts: Iterable[Host]) -> dict[str, tuple[int, ...] | None]:
    return {host.name: host.slots for host in hosts}


# Hostfiles


def test_every_part_of_a_line() -> None:
    text = "# all\n\n  node1 slots=2 max_slots=8 # two\nalice@node2\tport=2222 slots=1\nnode3 user=b.o-b_1#c\nnode4\n"
    first, second = Host("node1", (0, 1)), Host("node2", (0,), "alice", 2222)
    assert hosts_of(text) == [first, second, Host("node3", None, "b.o-b_1"), Host("node4")]
    assert hosts_of(text.replace("\n", "\r\n")) == hosts_of(text)
    assert [host.address for host in hosts_of(text)] == ["node1", "alice@node2", "b.o-b_1@node3", "node4"]


@pytest.mark.parametrize("address", ["fe80::17", "::1", "2001:db8::ff00:42:8329", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_addresses_keep_their_colons(address: str) -> None:
    for written in (address, f"[{address}]"):
        hosts = hosts_of(f"ann@{written} slots=2\n::2")
        assert [host.address for host in hosts] == [f"ann@{address}", "::2"]
        for spelling in (address, f"[{address}]"):
            assert slots_of(select(hosts, spelling)) == {address: (0, 1)}
            assert slots_of(select(hosts, f"{spelling}:1")) == {address: (1,)}


def test_ranges() -> None:
    assert expand("node[1-3,07,9-10]") == ["node1", "node2", "node3", "node07", "node9", "node10"]
    assert expand("n[08-10]-x") == ["n08-x", "n09-x", "n10-x"]
    assert expand("r[1-2]n[03-4]") == ["r1n03", "r1n04", "r2n03", "r2n04"]
    assert slots_of(hosts_of("g[1-2] slots=1\ng[3]")) == {"g1": (0,), "g2": (0,), "g3": None}


BAD_NAMES = """-oProxyCommand -1 u@-h a;id a|b a& $(id) `id` $HOME 'a' "a" a\\ a* a/b ~ a>b a,b ключ \0 a\x1b[0m \ufeffa
    @ a@ @a a@b@c -u@a $u@a a:8 node1:22 a::g : n[ n] n[] n[1 n[[1]] n[1-] n[2-1] n[a-b] n[1,] n[0-100000]"""
BAD_WORDS = """1 b slots slot=1 max_slots=8 slots= slots=0 slots=-1 slots=4097 slots=1.5 slots=x slots=² slots=٣ slots=1=1
    port= port=0 port=65536 port=ssh user= user=-l user=a;b user=$(id)"""
BAD_LINES = [  # and what must be in the message
    *((name, "") for name in BAD_NAMES.split()),
    *((f"a {word}", repr(word)) for word in [*BAD_WORDS.split(), "slots=" + "9" * 5000]),
    *(("a slots=1 slots=1", "slots="), ("x@a user=y", "user=y"), ("a slots = 1", "'slots'"), ("a\u2028b", "'b'")),
    *(("ok1", "in line 2"), ("x@OK1", "in line 2"), ("ok[2,1]", "'ok1'"), ("c[1-2,2]", "'c2'"), ("c[1,01,1]", "'c1'")),
]


@pytest.mark.parametrize(("line", "culprit"), BAD_LINES)
def test_a_bad_line_is_named_with_reason_and_remedy(line: str, culprit: str) -> None:
    with pytest.raises(LaunchError, match=r"\Apods\.txt, line 4: .+ Remedy: .+\.\Z") as caught:
        hosts_of(f"# c\nok1 slots=1\n\n{line}\nok3")
    assert culprit in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \r\n", "# node1 slots=8", "\x0c", "# a\x85b slots=1 \u2028c"])
def test_a_hostfile_without_hosts(text: str) -> None:
    with pytest.raises(LaunchError, match=r"\Apods\.txt: no host in it\. Remedy: "):
        hosts_of(text)


# Filters


def test_filters_by_hand() -> None:
    hosts, every = hosts_of("w[0-2] slots=4\nx"), (0, 1, 2, 3)
    # What DeepSpeed documents, and drops: a whole host.
    assert slots_of(select(hosts, "w1:0,2@w0")) == {"w0": every, "w1": (0, 2)}
    assert slots_of(select(hosts, "w0")) == {"w0": every}
    assert slots_of(select(hosts, exclude="w[0-1]:1-3 @ w2")) == {"w0": (0,), "w1": (0,), "x": None}
    assert slots_of(select(hosts, "w0:0@w0@w1:0@w1:3,0")) == {"w0": every, "w1": (0, 3)}
    assert select(hosts) == hosts
    with pytest.raises(LaunchError, match=r"no host 'node-5'\. Did you mean \"node-4\""):
        select(hosts_of("node-4"), "node-5")


BAD_FILTERS = {
    "missing": ("w0@@w1", "w0@", " ", ":1", "@"),
    "is not a list of slots": ("w0:", "w0:a", "w0:-1", "w0:2-1", "w0:²", "w0:0,", "w0:" + "9" * 5000, "w0:[0-1]"),
    "has slots 0 to 3, not ": ("w0:4", "w0:0,9", "w2@w[1-2]:0-7"),
    "slots of 'x' are not known": ("x:0", "w0@x:1"),
    "no host '": ("w4", "w[0-3]", "W0", "[fe80::1]", "fe80::1:0", "a@w0", "w0\nw1", "$(id)", "-w0"),
    "": ("w[0-", "w0]", "[fe80::1]x", "[fe80::1", "w[0-999999]"),
}


@pytest.mark.parametrize(("culprit", "text"), [(reason, text) for reason, texts in BAD_FILTERS.items() for text in texts])
def test_a_bad_filter_is_named(culprit: str, text: str) -> None:
    for option, filters in (("--include", (text, "")), ("--exclude", ("", text))):
        with pytest.raises(LaunchError) as caught:
            select(hosts_of("w[0-2] slots=4\nx"), *filters)
        assert str(caught.value).startswith(f"{option} {text!r}: ")
        assert culprit in str(caught.value)


# Hostfiles and filters by chance. The structure comes first, the text is written from it: the oracle reads no text.


@dataclass(frozen=True)
class Group:
    """One line of a hostfile. ``shape``: how it is written, with {} for the numbers. ``slots``: 0 if not given."""

    names: dict[int, str]  # by number
    shape: str
    width: int
    slots: int
    user: str
    port: int | None


def write_numbers(chance: random.Random, numbers: Iterable[int], width: int) -> str:
    """Consecutive numbers become ranges, most of the time."""
    words, left = [], list(numbers)
    while left:
        low = high = left.pop(0)
        while left and left[0] == high + 1 and chance.random() < 0.8:
            high = left.pop(0)
        end = f"-{high:0{chance.choice([1, width])}d}" if low < high or chance.random() < 0.2 else ""
        words.append(f"{low:0{width}d}{end}")
    return ",".join(words)


def make_group(chance: random.Random, letter: str) -> Group:
    """``letter`` keeps its names apart from those of other groups."""
    slots, user, port = chance.choice([0, 1, 2, 4, 8, 8]), chance.choice(["", "ann"]), chance.choice([None, 2222])
    if chance.random() < 0.4:
        name = chance.choice([f"2001:db8::{letter}", f"fe80::{letter}%eth0", f"10.0.0.{ord(letter)}", f"node-{letter}"])
        return Group({0: name}, f"[{name}]" if ":" in name and chance.random() < 0.5 else name, 1, slots, user, port)
    prefix, suffix = chance.choice([f"n{letter}", f"{letter}-", f"r1.{letter}_"]), chance.choice(["", ".lan", "-x"])
    numbers, width = chance.sample(range(chance.choice([12, 120])), chance.randint(1, 8)), chance.randint(1, 4)
    names = {number: f"{prefix}{number:0{width}d}{suffix}" for number in chance.choice([numbers, sorted(numbers)])}
    return Group(names, f"{prefix}[{{}}]{suffix}", width, slots, user, port)


def write_hostfile(chance: random.Random, groups: Sequence[Group]) -> str:
    lines = []
    for group in groups:
        name, before = group.shape.format(write_numbers(chance, group.names, group.width)), chance.random() < 0.5
        values = {"slots": group.slots, "port": group.port, "user": None if before else group.user}
        words = [f"{key}={value}" for key, value in values.items() if value]
        chance.shuffle(words)
        words.insert(0, f"{group.user}@{name}" if before and group.user else name)
        lines += chance.choice([[], [""], ["# zz slots=1"], [" #"]])
        lines.append(chance.choice(["", " "]) + chance.choice([" ", "\t "]).join(words) + chance.choice(["", " # c", "#"]))
    return chance.choice(["\n", "\r\n"]).join([*lines, ""])


Named = list[tuple[str, set[int]]]  # host, slots; none for all


def make_filter(chance: random.Random, groups: Sequence[Group]) -> tuple[str, Named, list[str]]:
    """(text, what it names, the words of the error that it must give: none if it is right)."""
    written: list[str] = []
    named: Named = []
    for group in chance.choices(groups, k=chance.randint(1, 4)):
        numbers = chance.sample(list(group.names), chance.randint(1, len(group.names)))
        slots = chance.choices(range(group.slots), k=chance.randint(1, 9)) if group.slots and chance.random() < 0.6 else []
        colon = ":" + write_numbers(chance, slots, chance.choice([1, 2])) if slots else ""
        spelled = group.shape.format(write_numbers(chance, numbers, group.width))
        written.append(chance.choice(["", " "]) + spelled + colon)
        named += [(group.names[number], set(slots)) for number in numbers]
    if chance.random() < 0.8:
        return "@".join(written), named, []
    group = chance.choice(groups)
    name, slot = chance.choice(list(group.names.values())), chance.choice([group.slots, 99])
    entry, wrong = f"{name}:{slot}", [repr(name), f"not {slot}." if group.slots else "are not known"]
    if chance.random() < 0.5:
        entry, wrong = f"{name[:3]}stranger", [f"no host '{name[:3]}"]
    written.insert(chance.randrange(len(written) + 1), entry)
    return "@".join(written), named, wrong


def oracle(
    groups: Sequence[Group], option: str, named: Named, nodes: int | None, workers: int | None
) -> list[Host] | list[str]:
    """The hosts that must come out, or the words that must be in the error."""
    kept: list[tuple[str, set[int], Group]] = []
    for group in groups:
        every = set(range(group.slots)) or {-1}  # -1: as many as may be asked for
        for name in group.names.values():
            mine = set().union(*(slots or every for host, slots in named if host == name))
            rest = every & mine if option == "--include" else every - mine
            kept += [(name, rest, group)] if rest else []
    if not kept:
        return [option, "leaves no host"]
    if nodes is not None and nodes > len(kept):
        return [f"--num-nodes {nodes}", f"only {len(kept)} "]
    result: list[Host] = []
    for name, slots, group in kept[:nodes]:
        if slots == {-1} and workers is None:
            return ["--nproc-per-node", repr(name)]
        if slots != {-1} and len(slots) < (workers or 0):
            return [f"--nproc-per-node {workers}", repr(name), f"only {len(slots)} "]
        numbers = sorted(range(workers or 0) if slots == {-1} else slots)
        result.append(Host(name, tuple(numbers[:workers]), group.user or None, group.port))
    return result


def test_hostfiles_and_filters_against_the_oracle() -> None:
    chance = random.Random(20261203)
    outcomes: Counter[str] = Counter()
    for _ in range(EXAMPLES):
        groups = [make_group(chance, letter) for letter in chance.sample("abcdef", chance.randint(1, 5))]
        option = chance.choice(["", "--include", "--include", "--exclude", "--exclude", "both"])
        text, named, wrong = make_filter(chance, groups) if option else ("", [], [])
        filters = ("" if option == "--exclude" else text, "" if option == "--include" else text)
        nodes, workers = chance.choice([None, None, 1, 2, 3, 9]), chance.choice([None, 1, 2, 5])
        context = (hostfile := write_hostfile(chance, groups), filters, nodes, workers)
        wrong = ["--include", "--exclude"] if option == "both" else wrong
        expected = wrong or oracle(groups, option, named, nodes, workers)
        hosts = parse_hostfile(hostfile, "f")
        fields = [(host.name, len(host.slots or ()), host.user or "", host.port) for host in hosts]
        assert fields == [(name, it.slots, it.user, it.port) for it in groups for name in it.names.values()], context
        try:
            result = limit_slots(first_hosts(select(hosts, *filters), nodes), workers)
        except LaunchError as error:
            assert all(isinstance(word, str) and word in str(error) for word in expected), (context, str(error))
            outcomes[str(error).split()[0] if wrong or option not in expected else f"{option} leaves none"] += 1
        else:
            assert result == expected, context
            outcomes[f"{option} right"] += 1
    # Each must come often enough, or chance tests less than it seems to.
    assert len(outcomes) == 9 and min(outcomes.values()) > 25, outcomes


# Text that means nothing

PIECES = """node1 n[1-3] w fe80::1 [fe80::1] a@ = [ ] , [01-12,7] [1-2][3-4] - 0 7 : :0,2 :0-3 @ # % . _ -1 $(id) ² ٣ é
    \ud800 \0 [0-999999] [0-999][0-999] [9-999999999]"""
SPACED = (" slots=8", " slots=", " port=22", " user=x", " ", "\n", "\r\n", "\t", "\x85", "\u2028", "9" * 5000)


def test_garbage_gives_hosts_or_a_launch_error() -> None:
    chance = random.Random(11)
    known = hosts_of("node1 slots=8\nn[1-3] slots=2\nw\nfe80::1 slots=4")
    good: Counter[str] = Counter()
    for _ in range(EXAMPLES):
        text = "".join(chance.choices([*PIECES.split(), *SPACED], k=chance.choice([1, 2, 3, 5, 8, 20, 60])))
        start = time.perf_counter()
        for what, call in {
            r"pods\.txt(, line \d+)?: .+ Remedy: ": lambda text: hosts_of(text),
            "--include ": lambda text: select(known, text),
            "--exclude ": lambda text: select(known, exclude=text),
            "SLURM_JOB_NODELIST.+ Remedy: ": lambda text: slurm_hosts({"SLURM_JOB_NODELIST": text}, 1),
        }.items():
            try:
                good[what] += bool(call(text))
            except LaunchError as error:
                assert re.match(what, str(error)), (text, str(error))
        assert time.perf_counter() - start < 2.0 * patience(), text
    assert len(good) == 4 and min(good.values()) > 10, good


@pytest.mark.parametrize("inside", ["0-100000", "0-999999998", ",".join(["0-99999"] * 5000), "0-9][0-9999][0-9"])
def test_huge_ranges_are_refused_at_once(inside: str) -> None:
    start = time.perf_counter()
    with pytest.raises(LaunchError, match="more than 100000 hosts"):
        hosts_of(f"n[{inside}] slots=1")
    with pytest.raises(LaunchError):
        select([Host("n", (0,))], f"n:{inside}")
    assert time.perf_counter() - start < 2.0 * patience()


def test_a_range_may_be_as_long_as_the_message_says() -> None:
    assert expand("n[1-100000]")[::99_999] == ["n1", "n100000"]
    assert len(expand("n[1-1000]m[1-100]")) == 100_000


# SLURM


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("node[01-03,07],gpu-a[1-2]-x,login", "node01 node02 node03 node07 gpu-a1-x gpu-a2-x login"),
        ("n[1-2]m[3-4]", "n1m3 n1m4 n2m3 n2m4"),
        ("tux[099-101],tux7", "tux099 tux100 tux101 tux7"),
    ],
)
def test_slurm_node_lists(listed: str, names: str) -> None:
    assert [name for part in split_list(listed) for name in expand(part)] == names.split()
    assert [host.name for host in slurm_hosts({"SLURM_JOB_NODELIST": listed}, None)] == names.split()


GPUS, PER_NODE, TASKS = "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_TASKS_PER_NODE"


@pytest.mark.parametrize(
    ("variables", "asked", "counts"),
    [
        ({GPUS: "4", TASKS: "2(x3),1"}, None, [4, 4, 4, 4]),
        ({GPUS: "4", TASKS: "2(x3),1"}, 2, [4, 4, 4, 4]),  # limit_slots takes two of them
        ({PER_NODE: "a100:2"}, None, [2, 2, 2, 2]),
        ({PER_NODE: "a100:2,v100:1"}, None, [3, 3, 3, 3]),
        ({GPUS: "0", TASKS: "2(x3),1"}, None, [2, 2, 2, 1]),
        ({TASKS: "1,2(x2),12"}, None, [1, 2, 2, 12]),
        ({TASKS: "2(x3),1"}, 8, [None] * 4),  # what is asked for goes over the tasks
        ({TASKS: "2(x3)"}, None, [None] * 4),  # not as many as nodes
        ({TASKS: "2(x3"}, None, [None] * 4),
        ({}, 3, [None] * 4),
    ],
)
def test_slurm_slots(variables: dict[str, str], asked: int | None, counts: list[int | None]) -> None:
    hosts = slurm_hosts({"SLURM_JOB_NODELIST": "n[1-3],m", **variables}, asked)
    assert [host.slots and len(host.slots) for host in hosts] == counts
    if asked:
        assert [host.slots for host in limit_slots(hosts, asked)] == [tuple(range(asked))] * 4


@pytest.mark.parametrize("listed", ["", ",", "n[1-", "n[2-1]", "n[0-999999]"])
def test_a_broken_slurm_list_is_named(listed: str) -> None:
    with pytest.raises(LaunchError, match=r"\ASLURM_JOB_NODELIST.+ Remedy: "):
        slurm_hosts({"SLURM_JOB_NODELIST": listed}, None)
