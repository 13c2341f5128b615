"""Jobs on several hosts that stand still: the launcher names the guilty rank and its host, or the link."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest
from harness import patience
from jobs import Job, assert_nothing_left
from testbed import Cluster

SCRIPT = textwrap.dedent("""
    import torch, zerorun
    kind = sys.argv[1]
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(4)))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "hang_timeout_s": 5,
              "zero_optimization": {"stage": 3}}
    engine = zerorun.initialize(model, config)
    def planted_bug():
        if kind == "endless loop":
            while True:
                pass
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "saves alone":
            engine.save_checkpoint(here)
        if kind == "whole weights alone":
            engine.state_dict()
        if kind == "own collective":
            torch.distributed.all_reduce(torch.ones(3))
    for step in range(10**6):
        if step == 10:
            meet("ten")
            while kind == "link" and not os.path.exists(f"{here}/cut"):
                time.sleep(0.05)
        if step == 10 and rank == 1:
            planted_bug()
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
""")
BUSY, ORDER = "rank 1 on node1 does not move", "ranks have been waiting for each other"


def report_of(job: Job, begun: float) -> str:
    code, _, err = job.finish(60)
    assert code == 124, err
    assert time.monotonic() - begun < 15 * patience(), err
    return err.rstrip().split("=" * 80)[-2]


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [2, 12])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("endless loop", BUSY),
        ("own collective", BUSY),
        ("stopped", "rank 1 on node1 is stopped"),
        ("saves alone", ORDER),
        ("whole weights alone", ORDER),
    ],
)
def test_the_guilty_rank_is_named(cluster: Cluster, tmp_path: Path, hosts: int, kind: str, words: str) -> None:
    job = Job(cluster, tmp_path, SCRIPT, hosts=hosts, args=[kind], environment=["OMP_NUM_THREADS=1"])
    deadline = time.monotonic() + 120 * patience()
    while len(list(tmp_path.glob("ten.0.*"))) < hosts:
        assert job.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    report = report_of(job, time.monotonic())
    assert words in report
    assert "in planted_bug" in report or kind == "stopped"
    if words == ORDER:
        assert "rank 1 is " in report and "in forward" in report
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("directions", [("node1", "node2"), ("node1",)])
def test_a_link_that_lets_nothing_through(cluster: Cluster, tmp_path: Path, directions: tuple[str, ...]) -> None:
    """Both hosts hear the launcher, and nothing, or one of them nothing, of each other."""
    job = Job(cluster, tmp_path, SCRIPT, hosts=3, args=["link"], environment=["OMP_NUM_THREADS=1"])
    deadline = time.monotonic() + 120 * patience()
    while len(list(tmp_path.glob("ten.0.*"))) < 3:
        assert job.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    by_name = {host.name: host for host in cluster.hosts}
    for name in directions:
        other = by_name["node2" if name == "node1" else "node1"]
        by_name[name].shell(f"ip route add blackhole {other.address}/32")
    (tmp_path / "cut").touch()
    try:
        report = report_of(job, time.monotonic())
    finally:
        for name in directions:
            by_name[name].shell("ip route flush type blackhole")
    assert "lets nothing through" in report and "node1" in report and "node2" in report
    assert_nothing_left(cluster, 5)
