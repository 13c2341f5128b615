"""What the hosts' facts say: which host cannot take part, what differs between hosts, what will stand in the way. Pure.

A host is a dictionary as collect.py makes it: ``name``, ``facts`` (host.py), ``clock``, ``trouble``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from zerorun.launcher.dump import RankState, by_job, verdict_of
from zerorun.launcher.this_host import is_loopback
from zerorun.log import listed

from .finding import ERROR, NOTE, SEVERITIES, WARNING, Finding, gibibytes, majority
from .findings_live import live_findings

MIB = 1 << 20
SHARED_MEMORY_ERROR, SHARED_MEMORY_WARNING = 64 * MIB, 512 * MIB  # free bytes
LOCKED_MEMORY_WARNING = 1024 * MIB  # bytes, where there is InfiniBand
BUSY = 1.5  # load, in usable cores
MEMORY_LIMIT_NOTE = 0.5  # of the memory that the host has
CLOCK_WARNING_S, CLOCK_ERROR_S = 1.0, 60.0
# How far versions may differ: True if a difference in the first two numbers means that training cannot work.
_VERSIONS = {"zerorun": True, "python": True, "torch": True, "cuda": True, "nccl": True, "cudnn": False, "driver": False}

# Native operations that training can do without, and what to do about it.
_OPTIONAL = {
    "native optimizer": "Updates in mixed precision take longer on CPUs. Install a C++ compiler (g++), or set $CXX.",
    "native file access": "Offload to NVMe waits for Python to have time. Install a C++ compiler (g++), or set $CXX.",
    "peer memory": "Ranks of one host will send by gloo, which is slower.",
}

Host = Mapping[str, Any]


def find(hosts: Sequence[Host], live: Mapping[str, Any] | None) -> list[Finding]:
    """All findings, the worst first."""
    asked = [host for host in hosts if host["facts"] is not None]
    found = [*_unreachable(hosts), *_twins(asked), *_version_findings(asked), *_clock_findings(asked), *_gpu_counts(asked)]
    for host in asked:
        for look in _LOOKS:
            found += look(host["name"], host["facts"])
    found += [*_loopback_names(asked), *_hangs(asked)]
    if live is not None:
        found += live_findings(live)
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def able(hosts: Sequence[Host], own_version: str) -> list[str]:
    """The names of the hosts on which the live check can run: the launcher refuses a job with any other."""
    asked = [host for host in hosts if host["facts"] is not None and not host["facts"]["software_trouble"]]
    twins = {finding.host for finding in _twins(asked)}
    return [
        host["name"]
        for host in asked
        if host["name"] not in twins and host["facts"]["versions"].get("zerorun") == own_version
    ]


def _unreachable(hosts: Sequence[Host]) -> Iterator[Finding]:
    for host in hosts:
        if host["facts"] is None:
            remedy = "Start a command there by hand (ssh HOST true); it must work without a password and have this Python."
            yield Finding(ERROR, host["name"], f"does not answer: {host['trouble']}", remedy)


def _twins(hosts: Sequence[Host]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for host in hosts:
        first = seen.setdefault(host["facts"]["machine"] or host["name"], host["name"])
        if first != host["name"]:
            yield Finding(ERROR, host["name"], f"is the same machine as {first}", "Leave one of the two names out.")


# -- what differs ------------------------------------------------------------------------------------------------------


def versions_of(facts: Mapping[str, Any], name: str) -> str:
    """The version of ``name`` on a host, "none" if it has none. "driver" is nvidia's."""
    if name != "driver":
        return str((facts["versions"] or {}).get(name) or "none")
    devices = (facts["gpus"] or {}).get("devices") or []
    return str(devices[0]["driver_version"]) if devices else "none"


def _version_findings(hosts: Sequence[Host]) -> Iterator[Finding]:
    well = [host for host in hosts if not host["facts"]["software_trouble"]]
    for name, strict in _VERSIONS.items():
        differing = _differing(hosts if name in ("zerorun", "python", "driver") else well, name)
        if name == "torch":  # a second torch that is installed over the first shows only in its metadata
            differing = {**_differing(well, "torch_metadata"), **differing}
        for where, (own, usual) in differing.items():
            severity = ERROR if strict and _release(own) != _release(usual) else WARNING
            yield Finding(severity, where, f"has {name} {own}, most hosts have {usual}", _version_remedy(name, usual))
    for name, (own, usual) in _differing(hosts, "zerorun_commit").items():
        yield Finding(WARNING, name, f"has zerorun at commit {own}, most hosts at {usual}", "Update one of the two.")
    for host in well:
        loaded, installed = versions_of(host["facts"], "torch"), versions_of(host["facts"], "torch_metadata")
        if installed != "none" and loaded.partition("+")[0] != installed.partition("+")[0]:
            what = f"imports torch {loaded}, but the package that is installed says {installed}"
            yield Finding(WARNING, host["name"], what, "Two installations are mixed: install torch anew.")


def _differing(hosts: Sequence[Host], name: str) -> dict[str, tuple[str, str]]:
    """Host -> (its version, that of most hosts) where they differ."""
    values = {host["name"]: versions_of(host["facts"], name) for host in hosts}
    usual = majority(values) if values else ""
    return {host: (value, usual) for host, value in values.items() if value != usual}


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _version_remedy(name: str, usual: str) -> str:
    if name in ("torch", "zerorun") and usual != "none":
        return f"Install {name} {usual} there, or name another Python by --python."
    return "Let all hosts have the same."


def _clock_findings(hosts: Sequence[Host]) -> Iterator[Finding]:
    clocks = {host["name"]: host["clock"] for host in hosts if host["clock"]}
    if len(clocks) < 2:
        return
    usual = median_low(sorted(clock["ahead_s"] for clock in clocks.values()))
    for name, clock in clocks.items():
        ahead = clock["ahead_s"] - usual
        if abs(ahead) - clock["within_s"] > CLOCK_WARNING_S:
            severity = ERROR if abs(ahead) > CLOCK_ERROR_S else WARNING
            side = "ahead of" if ahead > 0 else "behind"
            yield Finding(severity, name, f"its clock is {abs(ahead):.1f} s {side} the others'", "Let NTP set the clocks.")


def _gpu_counts(hosts: Sequence[Host]) -> Iterator[Finding]:
    counts = {host["name"]: str((host["facts"]["gpus"] or {}).get("visible", 0)) for host in hosts}
    usual = majority(counts) if counts else "0"
    if counts and set(counts.values()) == {"0"}:
        yield Finding(NOTE, "", "no GPU: training will be on the processors")
        return
    for name, count in counts.items():
        if count != usual:
            yield Finding(
                WARNING, name, f"has {count} GPUs, most hosts have {usual}", "Check the driver and its device files."
            )


def _loopback_names(hosts: Sequence[Host]) -> Iterator[Finding]:
    names = []
    for host in hosts:
        network = host["facts"]["network"] or {}
        addresses = network.get("own_name_addresses") or []
        if addresses and all(map(is_loopback, addresses)) and not network.get("gloo_interface"):
            names.append(host["name"])
    if len(hosts) > 1 and len(names) > 1:
        what = "their own names lead to a loopback address: gloo would listen where no other host can reach it"
        remedy = "zerorun tells gloo the interface; for other launchers set GLOO_SOCKET_IFNAME or mend /etc/hosts."
        yield Finding(NOTE, listed(names), what, remedy)


def jobs_of(hosts: Sequence[Host]) -> list[list[RankState]]:
    """The ranks of each zerorun job that runs on the hosts."""
    return by_job([RankState.of(told) for host in hosts for told in host["facts"]["ranks"]])


def _hangs(hosts: Sequence[Host]) -> Iterator[Finding]:
    for ranks in jobs_of(hosts):
        verdict = verdict_of(ranks)
        if verdict is not None:
            where = listed(list(dict.fromkeys(rank.host for rank in ranks)))
            what = f"job {ranks[0].job} stands still: {verdict.text}"
            yield Finding(WARNING, where, what, "zerorun --dump shows the stacks of its ranks.")


# -- one host ----------------------------------------------------------------------------------------------------------

Facts = Mapping[str, Any]


def _look_at_software(name: str, facts: Facts) -> Iterator[Finding]:
    if facts["software_trouble"]:
        remedy = "Install torch there, or look at the driver: nvidia-smi must answer."
        yield Finding(ERROR, name, f"torch cannot be used: {facts['software_trouble']}", remedy)
    for op in facts["native_ops"]:
        if not op["in_force"]:
            what = f"{op['name']} is not in force: {op['why']}"
            severity = NOTE if op["name"] in _OPTIONAL else ERROR
            yield Finding(severity, name, what, _OPTIONAL.get(op["name"], "Install another torch."))
    for problem in facts["problems"]:
        yield Finding(NOTE, name, f"could not be read: {problem}")


def _look_at_shared_memory(name: str, facts: Facts) -> Iterator[Finding]:
    shared = facts["shared_memory"]
    if not shared or shared["free"] >= SHARED_MEMORY_WARNING:
        return
    what = f"/dev/shm has {gibibytes(shared['free'])} free of {gibibytes(shared['total'])}"
    remedy = "Remove what lies there, or make it larger (docker: --shm-size; else mount -o remount,size=8G /dev/shm)."
    if shared["free"] < SHARED_MEMORY_ERROR:
        yield Finding(ERROR, name, what + ": data loaders with workers, and NCCL, will fail", remedy)
        return
    yield Finding(WARNING, name, what, remedy)


def _look_at_processor(name: str, facts: Facts) -> Iterator[Finding]:
    cpu = facts["cpu"]
    if not cpu:
        return
    if cpu["limit_cores"] and cpu["limit_cores"] < cpu["usable_cores"]:
        what = f"may use the time of {cpu['limit_cores']:g} of its {cpu['usable_cores']} cores: the limit of its cgroup"
        yield Finding(NOTE, name, what, "Give each worker fewer threads (--omp-threads), or ask for more.")
    if cpu["load"] > BUSY * cpu["usable_cores"]:
        yield Finding(
            NOTE, name, f"is busy: load {cpu['load']:.1f} on {cpu['usable_cores']} cores", "Look who computes: top."
        )


def _look_at_memory(name: str, facts: Facts) -> Iterator[Finding]:
    memory, limits = facts["memory"], facts["limits"] or {}
    if memory and memory["limit"] and memory["limit"] < MEMORY_LIMIT_NOTE * memory["total"]:
        what = f"may use {gibibytes(memory['limit'])} of {gibibytes(memory['total'])} memory: the limit of its cgroup"
        yield Finding(NOTE, name, what, "Ask the scheduler or the container for more, if training ends by SIGKILL.")
    locked = limits.get("locked_memory")
    if (facts["network"] or {}).get("infiniband") and locked is not None and locked < LOCKED_MEMORY_WARNING:
        what = f"only {gibibytes(locked)} of memory may be locked, and InfiniBand locks its buffers"
        yield Finding(WARNING, name, what, "Set 'memlock unlimited' in /etc/security/limits.conf, or ulimit -l unlimited.")


def _look_at_gpus(name: str, facts: Facts) -> Iterator[Finding]:
    gpus, cuda = facts["gpus"] or {}, facts["cuda"] or {}
    if gpus.get("trouble"):
        yield Finding(WARNING, name, gpus["trouble"], "Look at the driver: dmesg, modinfo nvidia.")
    if gpus.get("visible") and cuda.get("trouble"):
        without = "without CUDA" in cuda["trouble"]
        remedy = (
            "Install a torch with CUDA." if without else "The driver may be too old for this torch: nvidia-smi shows it."
        )
        what = f"has {gpus['visible']} GPUs that torch cannot use: {cuda['trouble']}"
        yield Finding(WARNING if without else ERROR, name, what, remedy)
    for device in gpus.get("devices") or []:
        errors = device["ecc.errors.uncorrected.volatile.total"]
        unread = next((value for value in device.values() if value is not None and value.startswith("[")), None)
        if unread is not None:  # such as [GPU requires reset]
            what = f"nvidia-smi says {unread} of GPU {device['index']}"
            yield Finding(WARNING, name, what, "Look into dmesg for its Xid errors; reset the GPU or have it replaced.")
        elif errors not in (None, "0"):
            what = f"GPU {device['index']} has {errors} memory errors that ECC could not correct"
            yield Finding(WARNING, name, what, "Reset the GPU or have it replaced.")
    access = cuda.get("peer_access") or []
    cut = [f"{a}-{b}" for a, row in enumerate(access) for b, allowed in enumerate(row) if a < b and not allowed]
    if cut:
        yield Finding(NOTE, name, f"no peer access between GPUs {listed(cut)}: NCCL goes through host memory")


_LOOKS: tuple[Callable[[str, Facts], Iterator[Finding]], ...] = (
    _look_at_software,
    _look_at_shared_memory,
    _look_at_processor,
    _look_at_memory,
    _look_at_gpus,
)
