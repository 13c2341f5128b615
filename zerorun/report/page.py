"""The report for people: one page of at most 80 columns, the verdict on top. Pure; ``report`` is what --json prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from zerorun.launcher.dump import headline
from zerorun.log import counted, listed

from .finding import ERROR, NOTE, WARNING, Finding, gibibytes
from .findings import jobs_of, versions_of

WIDTH = 80  # columns
_MOST_HOSTS = 16  # in the table, besides those with findings
_HOST_WIDTH = 16
_SHOWN_VERSIONS = (
    "zerorun",
    "zerorun_commit",
    "python",
    "torch",
    "cuda",
    "cudnn",
    "nccl",
    "gloo",
    "driver",
    "kernel",
    "glibc",
)

Report = Mapping[str, Any]


def verdict(findings: Sequence[Finding], summary: str) -> tuple[int, str]:
    """(the exit status, the line on top). ``summary``: what was looked at."""
    errors, warnings, notes = ([f for f in findings if f.severity == severity] for severity in (ERROR, WARNING, NOTE))
    if errors:
        return 2, _cut(f"CANNOT TRAIN: {_first(errors)}")
    if warnings:
        return 1, _cut(f"CAN TRAIN, BUT LOOK: {_first(warnings)}")
    noted = f"; {counted(len(notes), 'note')}" if notes else ""
    return 0, _cut(f"CAN TRAIN: {summary}{noted}")


def _first(found: Sequence[Finding]) -> str:
    more = f" (+{len(found) - 1})" if len(found) > 1 else ""
    text = f"{found[0].host}: {found[0].what}" if found[0].host else found[0].what
    return _cut(text, WIDTH - len("CAN TRAIN, BUT LOOK: ") - len(more)) + more


def render(report: Report, findings: Sequence[Finding]) -> str:
    """The page, without a line feed at its end."""
    hosts = [host for host in report["hosts"] if host["facts"] is not None]
    blamed = {name for finding in findings for name in finding.host.split(", ")}
    lines = [report["verdict"]["line"]]
    for title, section in (
        ("Findings", _findings(findings)),
        ("Hosts", _hosts(hosts, blamed)),
        ("Versions", _versions(hosts)),
        ("Native operations", _native_ops(hosts)),
        ("GPUs", _gpus(hosts)),
        ("Network", _network(hosts)),
        ("Running jobs", _jobs(hosts)),
        ("Live check", _live(report["live"])),
    ):
        body = list(section)
        if body:
            lines += ["", title, *body]
    return "\n".join(_cut(_printable(line)).rstrip() for line in lines)


def _cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def _printable(text: str) -> str:
    """``text`` as a terminal may have it, whatever a remote host has put into it."""
    return "".join(char if char.isprintable() and char.isascii() else "?" for char in text)


def _wrapped(head: str, text: str) -> list[str]:
    """``text`` after ``head``, further lines below its start."""
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head]


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings:
        where = f"{finding.host}: " if finding.host else ""
        yield from _wrapped(f"  {finding.severity:<8} ", where + finding.what)
        if finding.remedy:
            yield from _wrapped(" " * 11, finding.remedy)
    if not findings:
        yield "  none"


# -- facts -------------------------------------------------------------------------------------------------------------


def _hosts(hosts: Sequence[Mapping[str, Any]], blamed: set[str]) -> Iterator[str]:
    if not hosts:
        return
    yield "  name              cores  load    memory     limit  /dev/shm   memlock  clock s"
    shown = [host for index, host in enumerate(hosts) if index < _MOST_HOSTS or host["name"] in blamed]
    for host in shown:
        yield _host_row(host)
    if len(shown) < len(hosts):
        yield f"  and {len(hosts) - len(shown)} more, of which there is nothing to say"
    models = dict.fromkeys(_processor(host["facts"]) for host in hosts)
    for model in models:
        yield from _wrapped("  processor: ", model)


def _host_row(host: Mapping[str, Any]) -> str:
    facts = host["facts"]
    cpu, memory, shared = facts["cpu"] or {}, facts["memory"] or {}, facts["shared_memory"] or {}
    limits = facts["limits"] or {}
    locked = "all" if limits and limits["locked_memory"] is None else _size(limits.get("locked_memory"))
    limit = "none" if memory and memory["limit"] is None else _size(memory.get("limit"))
    clock = f"{round(host['clock']['ahead_s'], 3) + 0.0:+.3f}" if host["clock"] else "?"
    return (
        f"  {_cut(host['name'], _HOST_WIDTH):<{_HOST_WIDTH}} {cpu.get('usable_cores', '?'):>6} {cpu.get('load', '?'):>5}"
        f" {_size(memory.get('total')):>9} {limit:>9} {_size(shared.get('free')):>9} {locked:>9} {clock:>8}"
    )


def _size(value: float | None) -> str:
    return "?" if value is None else gibibytes(value)


def _processor(facts: Mapping[str, Any]) -> str:
    cpu = facts["cpu"] or {}
    return (
        f"{cpu.get('model') or 'unknown'} ({cpu.get('architecture', '?')}; {' '.join(cpu.get('flags', [])) or 'no flags'})"
    )


def _versions(hosts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    same = []
    for name in _SHOWN_VERSIONS:
        by_version: dict[str, list[str]] = {}
        for host in hosts:
            by_version.setdefault(versions_of(host["facts"], name), []).append(host["name"])
        title = name.replace("zerorun_commit", "commit")
        if len(by_version) == 1:
            value = next(iter(by_version))
            same.append(f"{title} {value.removeprefix(f'{title} ')}")
            continue
        for version, names in by_version.items():
            yield from _wrapped(f"  {title} ", f"{version}: {listed(names)}")
    if same:
        yield from _wrapped("  ", ", ".join(same))


def _native_ops(hosts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_text: dict[tuple[str, str], list[str]] = {}
    for host in hosts:
        for op in host["facts"]["native_ops"]:
            text = f"{'in force' if op['in_force'] else 'NOT in force'}: {op['why']}"
            by_text.setdefault((op["name"], text), []).append(host["name"])
    for (name, text), names in by_text.items():
        where = "" if len(names) == len(hosts) else f" ({listed(names)})"
        yield from _wrapped(f"  {name:<12} ", text + where)


def _gpus(hosts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for host in hosts:
        facts = host["facts"]
        devices = (facts["cuda"] or {}).get("devices") or []
        driven = (facts["gpus"] or {}).get("devices") or []
        for index, device in enumerate(devices):
            more = _driven(driven[index]) if len(driven) == len(devices) else ""
            yield _cut(f"  {host['name']} {index}: {device['name']}, {gibibytes(device['memory'])}{more}")
        access = (facts["cuda"] or {}).get("peer_access") or []
        if len(devices) > 1:
            reached = sum(map(sum, access)) - len(devices)
            yield f"  {host['name']}: peer access in {reached} of {len(devices) * (len(devices) - 1)} directions"
        for line in (
            ((facts["gpus"] or {}).get("topology") or "").splitlines()[: len(driven) + 1] if len(driven) > 1 else []
        ):
            yield _cut("    " + " ".join(f"{word:<5}" for word in line.split()))


def _driven(device: Mapping[str, str | None]) -> str:
    ecc = device["ecc.mode.current"] or "none"
    return f", used {device['memory.used']} MiB, ECC {ecc}, {device['temperature.gpu']} C"


def _network(hosts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for host in hosts[:_MOST_HOSTS]:
        network = host["facts"]["network"] or {}
        told = []
        for interface in network.get("interfaces", []):
            if interface["up"] and interface["name"] != "lo" and interface["addresses"]:
                speed = f", {interface['mbit_per_s']} Mbit/s" if interface["mbit_per_s"] else ""
                told.append(f"{interface['name']} {interface['addresses'][0]} (MTU {interface['mtu']}{speed})")
        told += [f"{port['device']}/{port['port']} {port.get('rate', '')}" for port in network.get("infiniband", [])]
        yield from _wrapped(f"  {_cut(host['name'], _HOST_WIDTH):<{_HOST_WIDTH}} ", "; ".join(told) or "loopback only")


# -- the live check ----------------------------------------------------------------------------------------------------


def _jobs(hosts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for ranks in jobs_of(hosts):
        yield from _wrapped("  ", headline(ranks))


def _live(live: Mapping[str, Any] | None) -> Iterator[str]:
    if live is None:
        yield "  none was made"
        return
    kinds = {f"{entry.get('backend')} on {entry['device'].split(':')[0]}" for entry in live["ranks"] if "device" in entry}
    where = f"{counted(live['world_size'], 'rank')} on {counted(len(live['hosts']), 'host')}"
    yield f"  {where}, {listed(sorted(kinds)) or 'no rank joined'}; {live['ended']} after {live['seconds']:.1f} s"
    wrong = {entry["check"] for entry in live["wrong"]}
    if live["checked"]:
        yield f"  results: {len(live['checked']) - len(wrong)} of {len(live['checked'])} checks right, bit for bit"
    if live["transport"]:
        yield f"  ranks of one host exchange data by {listed(sorted(set(live['transport'].values())))}"
    yield from _computing(live)
    yield from _pairs(live)
    yield from _sizes(live["sizes"])


def _computing(live: Mapping[str, Any]) -> Iterator[str]:
    timed = [entry for entry in live["ranks"] if "matmul_ms" in entry]
    if timed:
        slowest = max(timed, key=lambda entry: float(entry["matmul_ms"]))
        usual = median_low([entry["matmul_ms"] for entry in timed])
        yield _cut(
            f"  matrix product: median {usual:.2f} ms; slowest rank {slowest['rank']} on {slowest.get('host', '?')},"
            f" {slowest['matmul_ms']:.2f} ms"
        )


def _pairs(live: Mapping[str, Any]) -> Iterator[str]:
    if not live["pairs"]:
        return
    for word, pick in (("slowest", max), ("fastest", min)):
        pair = pick(live["pairs"], key=lambda pair: float(pair["latency_us"]))
        yield _cut(f"  {word} pair of hosts: {' and '.join(pair['hosts'])}, {pair['latency_us'] / 1e3:.2f} ms one way, "
                   f"{pair['gb_per_s']:.2f} GB/s")  # fmt: skip
        if len(live["pairs"]) == 1:
            return


def _sizes(sizes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Time and bus bandwidth of each collective, a row for each size."""
    names = list(dict.fromkeys(entry["name"] for entry in sizes))
    if not names:
        return
    found = {(entry["name"], entry["bytes"]): entry for entry in sizes}
    yield "              " + "".join(f"{name:^22}" for name in names)
    yield "  message   " + "".join(f"{'us':>11}{'bus GB/s':>11}" for _ in names)
    for size in sorted({entry["bytes"] for entry in sizes}):
        cells = []
        for name in names:
            entry = found.get((name, size))
            cells.append(f"{entry['us']:>11.0f}{entry['bus_gb_per_s']:>11.3f}" if entry else " " * 22)
        yield f"  {_message(size):<10}" + "".join(cells)


def _message(size: int) -> str:
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return f"{size} B"
