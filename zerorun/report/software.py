"""What torch says of one host: versions, GPUs as CUDA sees them, and which native operations are in force and why.

    python -m zerorun.report.software      prints one marked line

A process of its own, because importing torch or starting CUDA is where a broken driver crashes or hangs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerorun.distributed.device import describe_gpus, gpus_here, nccl_version
from zerorun.distributed.transport.peer_memory import PeerMemory
from zerorun.ops import aio, native, on_cuda

from .reporter import mark

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_BOARD_SECONDS = 5.0  # for two threads to find each other


def describe_software() -> dict[str, Any]:
    """Versions, ``cuda`` (what torch sees of the GPUs) and ``native_ops``."""
    return {"versions": _versions(), "cuda": describe_gpus(), "native_ops": _native_ops()}


def _versions() -> dict[str, str | None]:
    cudnn = torch.backends.cudnn.version()
    return {
        "torch": torch.__version__,
        "torch_metadata": _metadata_version("torch"),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": nccl_version(),
        "gloo": f"in torch {torch.__version__}" if dist.is_gloo_available() else None,
        "numpy": _metadata_version("numpy"),
    }


def _metadata_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- native operations -------------------------------------------------------------------------------------------------


def _native_ops() -> list[dict[str, Any]]:
    return [_native_optimizer(), _native_files(), _peer_memory()]


def _native_optimizer() -> dict[str, Any]:
    status = native.status()
    why = status.reason if status.isa is None else f"{status.source}, {status.isa}: {status.reason}"
    for gpu in gpus_here():
        why += f"; on CUDA: {on_cuda.status(gpu)}"
    return {"name": "native optimizer", "in_force": status.isa is not None, "why": why}


def _native_files() -> dict[str, Any]:
    status = aio.status()
    native_backend = status.backend in aio.BACKENDS[:-1]
    why = f"{status.backend}: {status.reason}" if status.backend else status.reason
    return {"name": "native file access", "in_force": native_backend, "why": why}


def _peer_memory() -> dict[str, Any]:
    allowed, why = peer_memory()
    return {"name": "peer memory", "in_force": allowed, "why": why}


def peer_memory() -> tuple[bool, str]:
    """(can ranks of this host read one another's memory, why). Tried as two ranks in threads of this process.

    Between processes the kernel also asks Yama; the live check shows whether it agrees.
    """
    if os.environ.get("ZERORUN_PEER_MEMORY", "1") == "0":
        return False, "ZERORUN_PEER_MEMORY=0"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False, f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not _boards_can_be_read():
        return False, "the kernel or the container forbids process_vm_readv or pidfd_open"
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "0"
    if scope in ("2", "3") and not (scope == "2" and os.geteuid() == 0):
        return False, f"kernel.yama.ptrace_scope = {scope} forbids it; 0 or 1 would do"
    return True, f"Linux x86-64, process_vm_readv works, ptrace_scope {scope}"


def _boards_can_be_read() -> bool:
    barrier, cards, made = threading.Barrier(2), [None, None], [False, False]

    def connect(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            cards[rank] = value
            barrier.wait(_BOARD_SECONDS)
            found = list(cards)
            barrier.wait(_BOARD_SECONDS)
            return found

        made[rank] = PeerMemory.connect(gather, rank, 2) is not None

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(made)


def main() -> int:
    sys.stdout.write(mark(describe_software()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
