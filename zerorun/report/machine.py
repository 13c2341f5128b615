"""What one host has: processor, memory, limits, network and GPUs, as JSON takes it. Needs no torch.

Every part is read by itself: what cannot be read is a line in ``problems``, and never the end of the report.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zerorun
from zerorun.launcher.job_plan import shown_values
from zerorun.launcher.this_host import CGROUPS, OWN_CGROUP, cgroups, machine_id, usable_cores, visible_gpus

PROGRAM_SECONDS = 8.0  # for git and nvidia-smi, which hangs with its driver
SHARED_MEMORY = "/dev/shm"  # where data loaders and NCCL put what their processes share
_INFINIBAND = Path("/sys/class/infiniband")
_NO_LIMIT = 1 << 60  # bytes; version 1 of cgroups has no word for it
_TOLD_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_TOLD_VARIABLES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "UCX_", "ZERORUN_")
_GPU_QUERY = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.used", "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total", "pcie.link.gen.current", "pcie.link.width.current", "temperature.gpu",
)  # fmt: skip


def describe_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """All that is known without torch. Sizes are in bytes unless their names say otherwise."""
    facts: dict[str, Any] = {"problems": []}
    parts: dict[str, Callable[[], Any]] = {
        "hostname": socket.gethostname,
        "machine": machine_id,
        "versions": _versions,
        "cpu": _cpu,
        "memory": _memory,
        "shared_memory": _shared_memory,
        "limits": _limits,
        "network": lambda: _network(environment),
        "gpus": lambda: _gpus(environment),
        "environment": lambda: _variables(environment),
    }
    for name, read in parts.items():
        try:
            facts[name] = read()
        except Exception as error:  # a report about broken machines must survive them
            facts["problems"].append(f"{name}: {type(error).__name__}: {error}")
            facts[name] = None
    return facts


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "zerorun": zerorun.__version__,
        "zerorun_commit": _commit(Path(zerorun.__file__).parents[1]),
        "kernel": platform.release(),
        "glibc": " ".join(platform.libc_ver()).strip() or None,
    }


def _commit(root: Path) -> str | None:
    """The git commit of the checkout in ``root``; None if zerorun is installed in another way."""
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return run_program("git", "-C", str(root), "rev-parse", "--short=12", "HEAD").strip() or None
    return None


def run_program(*command: str) -> str:
    """The stdout of ``command``. Raises OSError or SubprocessError: it is not there, it fails, or it hangs."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROGRAM_SECONDS, check=True)
    return done.stdout.decode(errors="replace")


# -- processor and memory ----------------------------------------------------------------------------------------------


def _cpu() -> dict[str, Any]:
    with contextlib.suppress(Exception):  # it reads many places, some of which a container may not have
        import cpuinfo

        found = cpuinfo.get_cpu_info()
        flags = set(found.get("flags", ()))
        return {
            "model": found.get("brand_raw"),
            "flags": [flag for flag in _TOLD_FLAGS if flag in flags],
            **_cores(),
        }
    return {"model": platform.processor() or None, "flags": [], **_cores()}


def _cores() -> dict[str, Any]:
    return {
        "architecture": platform.machine(),
        "usable_cores": len(usable_cores()),
        "present_cores": os.cpu_count(),
        "limit_cores": processor_limit(OWN_CGROUP.read_text()),
        "load": round(os.getloadavg()[0], 2),
    }


def _memory() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "limit": memory_limit(OWN_CGROUP.read_text()),
        "swap": psutil.swap_memory().total,
    }


def memory_limit(own: str, root: Path = CGROUPS) -> int | None:
    """The lowest memory limit, in bytes, of the cgroup that ``own`` names and those above it; None if there is none."""
    limits = []
    for folder, version in cgroups(own, root, "memory"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def processor_limit(own: str, root: Path = CGROUPS) -> float | None:
    """How many cores' time the cgroup that ``own`` names and those above it may use; None if there is no limit."""
    limits = []
    for folder, version in cgroups(own, root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            limits.append(int(quota) / int(period))
    return min((limit for limit in limits if limit > 0), default=None)


def _shared_memory() -> dict[str, int]:
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"total": usage.total, "free": usage.free}


def _limits() -> dict[str, int | None]:
    """Soft limits; None for no limit."""
    names = {
        "locked_memory": resource.RLIMIT_MEMLOCK,
        "open_files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
    }
    found = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in found.items()}


# -- network -----------------------------------------------------------------------------------------------------------


def _network(environment: Mapping[str, str]) -> dict[str, Any]:
    import psutil

    states = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        state = states.get(name)
        interfaces.append(
            {
                "name": name,
                "up": bool(state and state.isup),
                "mbit_per_s": state.speed if state and state.speed > 0 else None,
                "mtu": state.mtu if state else None,
                "addresses": addresses,
            }
        )
    return {
        "interfaces": interfaces,
        "infiniband": _infiniband(),
        "own_name_addresses": _own_name_addresses(),
        "gloo_interface": environment.get("GLOO_SOCKET_IFNAME"),
    }


def _infiniband() -> list[dict[str, str]]:
    ports = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        values = {}
        for name in ("state", "rate", "link_layer"):
            with contextlib.suppress(OSError):
                values[name] = (port / name).read_text().strip()
        ports.append({"device": port.parts[-3], "port": port.name, **values})
    return ports


def _own_name_addresses() -> list[str]:
    """The addresses that this host's own name leads to: where gloo listens if it is not told an interface."""
    with contextlib.suppress(OSError):
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)})
    return []


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return shown_values({name: value for name, value in sorted(environment.items()) if name.startswith(_TOLD_VARIABLES)})


# -- GPUs, as the driver sees them -------------------------------------------------------------------------------------


def _gpus(environment: Mapping[str, str]) -> dict[str, Any]:
    """``visible``: how many a worker will see. ``devices``: nvidia-smi's values, None where there is no such program."""
    found: dict[str, Any] = {"visible": visible_gpus(environment), "devices": None, "topology": None, "trouble": None}
    program = shutil.which("nvidia-smi")
    if program is None:
        return found
    try:
        text = run_program(program, f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader,nounits")
        found["devices"] = parse_gpus(text)
        found["topology"] = run_program(program, "topo", "-m").rstrip()
    except subprocess.TimeoutExpired:
        found["trouble"] = f"nvidia-smi did not answer within {PROGRAM_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).decode(errors="replace").strip().splitlines()
        found["trouble"] = f"nvidia-smi ended with status {error.returncode}" + (f": {said[-1]}" if said else "")
    except (OSError, ValueError) as error:
        found["trouble"] = f"nvidia-smi: {error}"
    return found


def parse_gpus(text: str) -> list[dict[str, str | None]]:
    """nvidia-smi's lines as dictionaries; None for what a device does not have. Raises ValueError."""
    devices = []
    for line in filter(None, map(str.strip, text.splitlines())):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_GPU_QUERY):
            raise ValueError(f"its line {line[:60]!r} is not understood")
        absent = ("[N/A]", "N/A", "[Not Supported]")
        devices.append({n: None if value in absent else value for n, value in zip(_GPU_QUERY, values, strict=True)})
    return devices
