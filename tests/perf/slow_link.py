"""For whom ranks wait when one host's link is slow: four hosts of the test bed, without delay, and with node1 behind some.

    python tests/perf/slow_link.py [--milliseconds 20] [--seconds 15]

Prints for each the steps per second, the part of the time that each rank waits for messages of each other one, read from
their boards, and what the launcher says of slow ranks. Needs root, as tests/cluster does.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from jobs import Job
from test_standing_still import job_in_step_ten
from testbed import Cluster

from zerorun.launcher.worker_boards import open_board
from zerorun.watch.board import PAGE, Sight, read

HOSTS = 4


def boards(folder: Path) -> dict[int, mmap.mmap]:
    """The pages of the ranks that run in ``folder``, seen from outside their hosts."""
    found: dict[int, mmap.mmap] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            if (
                os.readlink(f"/proc/{process}/cwd") == str(folder)
                and b"train.py" in Path(f"/proc/{process}/cmdline").read_bytes()
            ):
                page = mmap.mmap(open_board(int(process))[0], PAGE)
                found[seen(page).rank] = page
    return found


def seen(page: mmap.mmap) -> Sight:
    sight = read(page)
    while sight is None:
        sight = read(page)
    return sight


def sample(job: Job, seconds: float) -> None:
    pages, waits, looks, begun = boards(job.folder), Counter[tuple[int, int]](), 0, time.monotonic()
    first = seen(pages[0]).step
    while time.monotonic() < begun + seconds:
        looks += 1
        for rank, page in pages.items():
            sight = seen(page)
            if sight.waits and sight.span[2] == 1:
                waits[rank, sight.span[0]] += 1
        time.sleep(0.001)
    print(f"{(seen(pages[0]).step - first) / seconds:.1f} steps/s at a load of {os.getloadavg()[0]:.0f}")
    for rank in sorted(pages):
        parts = ", ".join(f"{waits[rank, other] / looks:.2f} for {other}" for other in sorted(pages) if other != rank)
        print(f"  rank {rank} waits {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="zerorun-hosts-")), HOSTS)
    cluster.up()
    try:
        for milliseconds in (0.0, args.milliseconds):
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                if milliseconds:
                    stack.enter_context(cluster[1].delayed(milliseconds))
                print(f"{milliseconds:.0f} ms")
                job = job_in_step_ten(cluster, Path(folder), "none", HOSTS)
                sample(job, args.seconds)
                job.signal(15)
                slow = [line for line in job.finish(60)[2].splitlines() if "is slow" in line]
                print("\n".join(slow or ["  nobody is called slow"]))
    finally:
        cluster.down()


if __name__ == "__main__":
    main()
