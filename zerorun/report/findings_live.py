"""What the live check says: wrong results, hangs, slow ranks, slow pairs of hosts. Pure; ``live`` is ``Live.as_json()``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from zerorun.log import listed, ranks_in_words

from .finding import ERROR, NOTE, WARNING, Finding
from .reporter import PAIR

SLOW_RANK = 1.3  # times the median
SLOW_COPY = 0.5  # of the median
SLOW_PAIR = 5.0  # times what pairs of hosts usually take
SLOW_PAIR_US = 2000.0  # and at least this
NARROW_PAIR = 0.2  # of the bandwidth that pairs of hosts usually have
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "uint8")

Live = Mapping[str, Any]


def live_findings(live: Live) -> list[Finding]:
    return [
        *_wrong(live),
        *_ending(live),
        *_slow_ranks(live),
        *_slow_pairs(live),
        *_narrow_pairs(live),
        *_transports(live),
    ]


def check_in_words(live: Live, name: str) -> str:
    """The name of a check, with hosts in place of node numbers."""
    if not name.startswith(PAIR):
        return name
    first, second = (live["hosts"][int(node)] for node in name.removeprefix(PAIR).split())
    return f"send and receive between {first} and {second}"


def _host(live: Live, rank: int) -> str:
    return next((str(entry["host"]) for entry in live["ranks"] if entry["rank"] == rank and "host" in entry), "")


def _hosts(live: Live, ranks: Sequence[int]) -> str:
    return listed(list(dict.fromkeys(filter(None, (_host(live, rank) for rank in ranks)))))


# -- results -----------------------------------------------------------------------------------------------------------


def _wrong(live: Live) -> Iterator[Finding]:
    """One finding for each collective, whatever the dtypes that it gets wrong."""
    by_collective: dict[str, list[dict[str, Any]]] = {}
    for entry in live["wrong"]:
        name = " ".join(word for word in entry["check"].split() if word not in _DTYPES)
        by_collective.setdefault(name, []).append(entry)
    for name, entries in by_collective.items():
        ranks = sorted({entry["rank"] for entry in entries})
        checks = dict.fromkeys(entry["check"] for entry in entries)
        dtypes = [word for check in checks for word in check.split() if word in _DTYPES]
        where = f" in {listed(dtypes)}" if dtypes else ""
        what = f"wrong result of {name}{where} on {ranks_in_words(ranks)}: {entries[0]['text']}"
        remedy = f"Do not train on this: bytes change on the way. {_remedy(live, name)}"
        yield Finding(ERROR, _hosts(live, ranks), what, remedy)


def _ending(live: Live) -> Iterator[Finding]:
    if live["errors"]:  # the first that came; the others mostly follow from it
        error, *others = live["errors"]
        what = f"{check_in_words(live, error['check'])} failed on rank {error['rank']}: {error['text']}"
        if others:
            what += f"; then on {ranks_in_words(sorted(other['rank'] for other in others))}"
        yield Finding(ERROR, _host(live, error["rank"]), what, _remedy(live, error["check"]))
    match live["ended"]:
        case "hang":
            yield _hang(live)
        case "time limit":
            what = f"the live check was not done after {live['seconds']:.0f} s; it was at {live['furthest']}"
            yield Finding(WARNING, "", what, "Give it more time by --time-limit, or less to do by --quick.")
        case "refused":
            words = _launcher_words(live["words"]) or "no reason was given"
            yield Finding(ERROR, "", f"the live check was not started: {words}")
        case "failed" if not live["errors"]:
            words = " ".join(line.strip() for line in live["words"] if not set(line) <= {"="})[-600:]
            yield Finding(ERROR, "", f"the live check failed: {words}")


def _launcher_words(lines: Sequence[str]) -> str:
    words = [line.strip() for line in lines if line.strip() != "No worker is running."]
    return " ".join(words).removeprefix("zerorun: error: ")[-600:]


def _hang(live: Live) -> Finding:
    if live["silent"]:
        what = f"{ranks_in_words(live['silent'])} did not start within {live['seconds']:.0f} s"
        return Finding(
            ERROR, _hosts(live, live["silent"]), what, "Look at these hosts: importing torch should take seconds."
        )
    name = live["furthest"]
    what = f"hang: {check_in_words(live, name)} did not return"
    late = [int(rank) for rank in live["behind"]]
    if late:
        at = check_in_words(live, live["behind"][str(late[0])])
        what += f", and {ranks_in_words(late)} had not come to it (in {at})"
    return Finding(ERROR, _hosts(live, late), what, _remedy(live, name))


def _remedy(live: Live, name: str) -> str:
    """What to try when ``name`` hangs or fails, by what carried it."""
    backends = {entry.get("backend") for entry in live["ranks"]}
    if "peer memory" in name:
        return "Try ZERORUN_PEER_MEMORY=0."
    if "nccl" in backends:
        return (
            "Try NCCL_P2P_DISABLE=1; if that cures it, switch off the IOMMU (intel_iommu=off or amd_iommu=off) or ACS. "
            "Then NCCL_SHM_DISABLE=1, NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME=INTERFACE. NCCL_DEBUG=INFO tells more."
        )
    if len(live["hosts"]) > 1:
        return (
            "Try GLOO_SOCKET_IFNAME=INTERFACE (and NCCL_SOCKET_IFNAME), let the firewall pass all ports between the hosts, "
            "and send large packets by hand: ping -M do -s 1400 HOST finds a wrong MTU."
        )
    return "Try GLOO_SOCKET_IFNAME=lo; look whether the machine is out of memory or processors."


# -- speed -------------------------------------------------------------------------------------------------------------


def _slow_ranks(live: Live) -> Iterator[Finding]:
    timed = {entry["rank"]: entry for entry in live["ranks"] if "matmul_ms" in entry}
    if len(timed) < 2:
        return
    by_clock, by_processor = _times_the_median(timed, "matmul_ms"), _times_the_median(timed, "processor_ms")
    for rank, entry in timed.items():
        ratio = max(by_clock[rank], by_processor.get(rank, 0.0))
        if ratio > SLOW_RANK:
            what = f"rank {rank} is slow: its own computing takes {ratio:.1f} times the median, {entry['matmul_ms']:.2f} ms"
            remedy = (
                "Look for heat and power limits (sensors, nvidia-smi -q -d PERFORMANCE), and for other processes (top)."
            )
            if by_processor.get(rank, ratio) <= SLOW_RANK:
                what += ", of which it has a processor for only a part"
                remedy = "Look for other processes on that host (top) and for processor limits."
            yield Finding(WARNING, _host(live, rank), what, remedy)
    for key, way in (("to_device_gb_per_s", "to"), ("from_device_gb_per_s", "from")):
        speeds = {rank: entry[key] for rank, entry in timed.items() if key in entry}
        typical = median_low(list(speeds.values())) if speeds else 0.0
        for rank, speed in speeds.items():
            if speed < SLOW_COPY * typical:
                what = f"rank {rank} copies {way} its GPU at {speed:.1f} GB/s, the median is {typical:.1f} GB/s"
                yield Finding(WARNING, _host(live, rank), what, "Look at the PCIe link: nvidia-smi -q -d PCI.")


def _times_the_median(timed: Mapping[int, Mapping[str, Any]], key: str) -> dict[int, float]:
    """Each rank's ``key`` in medians of all; of two ranks the faster one is the median."""
    values = {rank: float(entry[key]) for rank, entry in timed.items() if key in entry}
    return {rank: value / median_low(list(values.values())) for rank, value in values.items()}


def usual_of_hosts(pairs: Sequence[Mapping[str, Any]], key: str, best: Any) -> float:
    """The median over hosts of what each has with the ``best`` of its pairs: one bad host does not move it."""
    by_host: dict[str, list[float]] = {}
    for pair in pairs:
        for host in pair["hosts"]:
            by_host.setdefault(host, []).append(pair[key])
    return median_low([best(values) for values in by_host.values()])


def _slow_pairs(live: Live) -> Iterator[Finding]:
    pairs = live["pairs"]
    if not pairs:
        return
    usual = usual_of_hosts(pairs, "latency_us", min)
    if len(pairs) == 1:  # nothing to compare with but what a network of hosts should have
        usual = min(usual, SLOW_PAIR_US / SLOW_PAIR)
    slow = [pair for pair in pairs if pair["latency_us"] > max(SLOW_PAIR * usual, SLOW_PAIR_US)]
    if not slow:
        return
    worst = max(slow, key=lambda pair: float(pair["latency_us"]))
    told = f"{worst['latency_us'] / 1e3:.1f} ms one way"
    yield _blame("slow", slow, worst, pairs, told + (f"; usual is {usual / 1e3:.2f} ms" if len(pairs) > 1 else ""))


def _narrow_pairs(live: Live) -> Iterator[Finding]:
    pairs = [pair for pair in live["pairs"] if pair["sure"]]
    if len(pairs) < 2:
        return
    usual = usual_of_hosts(pairs, "gb_per_s", max)
    # Where packets take long they are slow to come up to speed, too: that is one finding, not two.
    narrow = [pair for pair in pairs if pair["gb_per_s"] < NARROW_PAIR * usual and pair["latency_us"] <= SLOW_PAIR_US]
    if narrow:
        worst = min(narrow, key=lambda pair: float(pair["gb_per_s"]))
        yield _blame("narrow", narrow, worst, pairs, f"{worst['gb_per_s']:.2f} GB/s; usual is {usual:.2f} GB/s")


Pair = Mapping[str, Any]


def _blame(word: str, bad: Sequence[Pair], worst: Pair, pairs: Sequence[Pair], told: str) -> Finding:
    """One finding for all ``bad`` pairs, which names the host that they have in common if there is one."""
    common = set.intersection(*(set(pair["hosts"]) for pair in bad))
    remedy = "Look at the cable, the switch port and the interface's errors (ip -s link)."
    if len(common) == 1 and len(bad) > 1:
        host = common.pop()
        other = next(name for name in worst["hosts"] if name != host)
        count = sum(host in pair["hosts"] for pair in pairs)
        what = f"{word} network in {len(bad)} of its {count} pairs of hosts; worst is that with {other}, {told}"
        return Finding(WARNING, host, what, remedy)
    first, second = worst["hosts"]
    what = f"{word} pair of hosts: {first} and {second}, {told}"
    if len(bad) > 1:
        what += f"; and {len(bad) - 1} more"
    return Finding(WARNING, "" if len(bad) > 1 else f"{first}, {second}", what, remedy)


def _transports(live: Live) -> Iterator[Finding]:
    """Hosts whose ranks do not read one another's memory although others' do."""
    by_host: dict[str, str] = {_host(live, int(rank)): name for rank, name in live["transport"].items()}
    sending = [host for host, name in by_host.items() if name == "gloo"]
    if sending and "peer memory" in by_host.values():
        yield Finding(NOTE, listed(sending), "its ranks send by gloo, those of other hosts read one another's memory")
