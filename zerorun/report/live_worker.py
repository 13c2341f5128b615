"""The live check's worker: ``zerorun-report`` has the launcher run it as every rank.

    zerorun --nproc-per-node 2 -m zerorun.report.live_worker [--quick]

Every rank says on its stdout, in marked lines, what it begins (``begin``) and what came out, so that whoever reads knows
what was running when nothing comes any more, and which ranks had not got there. No result needs a collective to be told.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable

from .reporter import FIRST, JOINING, LIFETIME_SECONDS, Reporter


def main() -> int:
    reporter = Reporter()
    _end_in_time()
    try:
        _run(reporter, quick="--quick" in sys.argv[1:])
    except Exception as error:
        reporter.say(error=f"{type(error).__name__}: {error}"[:2000], check=reporter.running)
        return 1
    return 0


def _run(reporter: Reporter, *, quick: bool) -> None:
    reporter.say(begin="start")
    from zerorun.distributed.device import default_device, synchronize  # imports torch
    from zerorun.distributed.transport import world
    from zerorun.distributed.transport.process_group import init_distributed, shutdown

    device = default_device()
    with reporter.check(JOINING):
        init_distributed(device)
    import torch

    from . import collective_checks, speed

    backend = "nccl" if world.uses_nccl(device) else "gloo"
    node = int(os.environ.get("GROUP_RANK", "0"))
    reporter.say(joined={"hostname": socket.gethostname(), "node": node, "device": str(device), "backend": backend})
    # gloo has few collectives on GPUs: where ranks share one, the engine goes through host memory.
    wire = device if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        with reporter.check(FIRST):
            world.all_reduce(torch.zeros(1, device=wire), FIRST)
            synchronize(device)
    parts: list[Callable[[], None]] = [
        lambda: speed.compute(reporter, device, wire),
        lambda: collective_checks.check_all(reporter, device, wire),
        lambda: speed.pairs(reporter, wire, node, quick=quick),
        lambda: speed.sizes(reporter, device, wire, quick=quick),
    ]
    for part in parts:
        part()
    with reporter.check("leaving the process group"):
        world.barrier("leaving the process group")
        shutdown()
    reporter.say(done=True)


def _end_in_time() -> None:
    """Leave nothing behind on a host that nobody hears of any more, whatever this process hangs in."""
    timer = threading.Timer(LIFETIME_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
