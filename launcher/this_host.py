"""What the launcher asks a host before it starts workers there: its identity, its resources, its way to the first host."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import zerorun
from zerorun.errors import LaunchError

_PROBE_SECONDS = 5.0
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else ""
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def describe_host(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what the launcher needs to know about this host, in types that JSON has."""
    return {
        "version": zerorun.__version__,
        "python": platform.python_version(),
        "hostname": socket.gethostname(),
        "machine": machine_id(),
        "cores": usable_cores(),
        "gpus": visible_gpus(environment),
        "address": own_address(environment),
        "launcher_address": _launcher_address(environment),
        "pid": os.getpid(),
    }


def machine_id() -> str:
    """Return an identifier that is equal for two names of one machine, and different for different machines."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs a worker will see: those that CUDA_VISIBLE_DEVICES allows; if it is unset, the device files."""
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    names = [name.strip() for name in allowed.split(",")]
    return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA stops there too


def trains_on_cpu(environment: Mapping[str, str]) -> bool:
    """Return True if ZERORUN_DEVICE says that workers use no GPU, whether there is one or not."""
    return environment.get("ZERORUN_DEVICE", "").partition(":")[0] in ("cpu", "simulated")


def usable_cores() -> list[int]:
    """Return the cores that this process may use, with those of one NUMA node next to each other."""
    mine = os.sched_getaffinity(0)
    ordered: list[int] = []
    for path in sorted(glob.glob("/sys/devices/system/node/node[0-9]*/cpulist"), key=lambda path: (len(path), path)):
        with contextlib.suppress(OSError, ValueError):
            ordered += [core for core in parse_cores(Path(path).read_text().strip()) if core in mine]
    return [*ordered, *sorted(mine - set(ordered))]


def parse_cores(text: str) -> list[int]:
    """``0-3,8`` -> 0, 1, 2, 3, 8. Raises ValueError."""
    cores: list[int] = []
    for item in filter(None, text.split(",")):
        low, dash, high = item.partition("-")
        cores += range(int(low), int(high if dash else low) + 1)
    return cores


def own_address(environment: Mapping[str, str]) -> str | None:
    """Return an address by which other hosts can reach this one; None if there is only loopback."""
    connection = environment.get("SSH_CONNECTION", "").split()  # client, its port, this host, its port
    if len(connection) == 4 and not is_loopback(connection[2]):
        return connection[2]
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if not is_loopback(str(address[0])):
                return str(address[0])
    # Nothing is sent: connecting a datagram socket only chooses the interface.
    for family, beyond in ((socket.AF_INET, "10.255.255.254"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((beyond, 9))
            if not is_loopback(probe.getsockname()[0]):
                return str(probe.getsockname()[0])
    return None


def _launcher_address(environment: Mapping[str, str]) -> str | None:
    """Return the address of the host that opened this ssh session, as seen from here; None if there is none."""
    connection = environment.get("SSH_CONNECTION", "").split()
    return connection[0] if len(connection) == 4 and not is_loopback(connection[0]) else None


def is_loopback(address: str) -> bool:
    """True for an address that leads to this host only, or to none."""
    return address.startswith("127.") or address in ("::1", "0.0.0.0", "::")


def cgroups(own: str, root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version of cgroups) upwards from the groups in ``own``, the text of /proc/self/cgroup.

    Its lines are ``0::/a/b`` or, in version 1, ``7:memory:/a/b``. The folders need not exist: in a container, the group of
    this process may be mounted as the root.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        folder = Path(path.lstrip("/"))
        if not controllers:
            yield from ((root / part, 2) for part in (folder, *folder.parents))
        elif controller in controllers.split(","):
            yield from ((root / controller / part, 1) for part in (folder, *folder.parents))


# -- the rendezvous ----------------------------------------------------------------------------------------------------


def bound_socket(port: int | None) -> socket.socket:
    """Return a TCP socket bound to ``port``, or to a free one, on all addresses. Raises LaunchError if the port is taken.

    While the socket is bound and does not listen, Linux lets rank 0 listen on the port (both set SO_REUSEADDR), but gives
    it to no program that asks for any free port.
    """
    try:
        return _bind(port or 0)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"master port {port}: {error.strerror}.") from None
        raise LaunchError(
            f"master port {port}: it is already in use{_user_of(port)}. "
            "Remedy: leave --master-port out, and a free port is chosen."
        ) from None


def _bind(port: int) -> socket.socket:
    """Return a socket bound on all IPv4 and IPv6 addresses, or on the IPv4 ones only if the machine has no IPv6."""
    family, anywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((anywhere, port))
    except OSError:
        holder.close()
        raise
    return holder


def _user_of(port: int | None) -> str:
    """Return `` by NAME (process N)`` for the program that uses ``port``; an empty string if it cannot be found out."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) in inodes:
                pid = link.split("/")[2]
                return f" by {Path(f'/proc/{pid}/comm').read_text().strip()!r} (process {pid})"
    return ""


@contextlib.contextmanager
def reserve_port(port: int | None) -> Iterator[int]:
    """Yield ``port``, or a free one for None, and keep it from other launchers meanwhile. Raises LaunchError if taken."""
    with bound_socket(port) as holder:
        yield holder.getsockname()[1]


def probe(address: str, port: int) -> str | None:
    """Connect to ``address``, and return the network interface that leads there; None for loopback. Raises LaunchError."""
    try:
        with socket.create_connection((address, port), timeout=_PROBE_SECONDS) as connection:
            return interface_of(str(connection.getsockname()[0]))
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(f"cannot reach the first host at {address} port {port}: {reason}") from None


def interface_of(address: str) -> str | None:
    """Return the network interface that has ``address``; None for loopback, or if there is none."""
    if is_loopback(address):
        return None
    import psutil  # here, because a job on one host does not need it

    plain = address.removeprefix("::ffff:").partition("%")[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == plain for entry in entries):
            return str(name)
    return None
