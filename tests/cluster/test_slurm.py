"""In SLURM: plain ``zerorun script.py`` finds its nodes; signals, preemption, requeueing and batch jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurmbed
import torch
from covering import by_day
from harness import patience
from jobs import PRELUDE, assert_nothing_left
from slurmbed import Slurm
from test_standing_still import BUSY, KINDS, tells
from test_standing_still import SCRIPT as STANDING_STILL
from testbed import Cluster, wait_for, write

ZERORUN = (sys.executable, "-m", "zerorun.launcher.cli")
NODES, WIDE = 3, 12


@pytest.fixture(scope="module")
def slurm(whole_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """On as many nodes as are needed."""
    reason = slurmbed.missing()
    if reason is not None:
        pytest.skip(reason)
    wide = any(str(WIDE) in item.name for item in request.session.items if item.path == request.path)
    slurm = Slurm(whole_cluster, WIDE if wide else NODES)
    slurm.up()
    yield slurm
    slurm.down()


def script(folder: Path, text: str) -> None:
    write(folder / "train.py", "")
    (folder / "train.py").write_text(PRELUDE + text)


def allocate(slurm: Slurm, folder: Path, *words: str, nodes: int = NODES) -> subprocess.Popen[str]:
    """``words`` as a command inside an allocation."""
    command = slurm.command(["timeout", f"{60 * patience():.0f}", "salloc", f"-N{nodes}", "--quiet", *words], folder)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_nodes_are_found_without_an_option(slurm: Slurm, tmp_path: Path) -> None:
    script(tmp_path, "print(rank, world, socket.gethostname(), *sys.argv[1:], flush=True)\n")
    out, err = allocate(slurm, tmp_path, *ZERORUN, "--nproc-per-node=2", "train.py", "a b", "$HOME").communicate(
        timeout=60 * patience()
    )
    lines = sorted(line.rpartition("] ")[2] for line in out.splitlines())
    assert lines == [f"{rank} 6 node{rank // 2} a b $HOME" for rank in range(6)], err


def test_plan_of_an_allocation(slurm: Slurm, tmp_path: Path) -> None:
    script(tmp_path, "")
    filters = ["--exclude", "node1", "--dry-run=json"]
    out, err = allocate(slurm, tmp_path, *ZERORUN, *filters, "train.py").communicate(timeout=60 * patience())
    plan = json.loads(out)
    assert [node["host"] for node in plan["nodes"]] == ["node0", "node2"], err
    assert all(carrier[0] == "srun" for carrier in plan["carriers"].values())


def test_failure_ends_all_nodes_with_the_worker_s_code(slurm: Slurm, tmp_path: Path) -> None:
    script(tmp_path, "meet()\nif rank == 1: sys.exit(3)\ntime.sleep(100)\n")
    begin = time.monotonic()
    _, err = (job := allocate(slurm, tmp_path, *ZERORUN, "train.py")).communicate(timeout=60 * patience())
    assert job.returncode == 3
    assert "rank 1 on node1 failed first" in err and time.monotonic() - begin < 15 * patience()
    assert_nothing_left(slurm.cluster, 5)


def test_a_signal_from_slurm_reaches_each_worker_once(slurm: Slurm, tmp_path: Path) -> None:
    script(
        tmp_path,
        "caught = []\nsignal.signal(signal.SIGUSR1, lambda *_: caught.append(1))\nmeet()\n"
        "while not caught: time.sleep(0.01)\ntime.sleep(0.5)\nprint('caught', len(caught), flush=True)\n",
    )
    job = allocate(slurm, tmp_path, *ZERORUN, "train.py")
    wait_for(lambda: len(list(tmp_path.glob("here.0.*"))) == NODES, 20, "all ranks run")
    number = slurm.ask("squeue", "-h", "-o", "%i")
    slurm.ask("scancel", "--signal=USR1", number)
    out, err = job.communicate(timeout=30 * patience())
    assert [line.rpartition("] ")[2] for line in out.splitlines()] == ["caught 1"] * NODES, err


def test_cancelled_job_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmeet()\ntime.sleep(100)\n")
    job = allocate(slurm, tmp_path, *ZERORUN, "train.py")
    wait_for(lambda: len(list(tmp_path.glob("here.0.*"))) == NODES, 20, "all ranks run")
    slurm.ask("scancel", slurm.ask("squeue", "-h", "-o", "%i"))
    job.communicate(timeout=30 * patience())
    assert_nothing_left(slurm.cluster, 10)


@pytest.mark.parametrize("told", by_day((True, False), True))
def test_batch_job_is_requeued_when_its_workers_ask(slurm: Slurm, tmp_path: Path, told: bool) -> None:
    """Preemption: SLURM tells the launcher, that tells the workers, they end with 75, and the job runs once more.

    So it does if they end with 75 by themselves. There is no restart in the same allocation.
    """
    script(
        tmp_path,
        "again = os.environ.get('SLURM_RESTART_COUNT')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "meet(f'here{again}')\nprint('run', again, rank, flush=True)\n"
        f"if again is None: {'time.sleep(100)' if told else 'sys.exit(75)'}\n",
    )
    options = ["--sbatch", "--nnodes=3", "--max-restarts=3", "--sbatch-args", "--output=job.log"]
    command = slurm.command([*ZERORUN, *options, "train.py"], tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * patience(), check=False)
    assert "Submitted batch job" in done.stdout, done.stderr
    number, log = done.stdout.split()[-1], tmp_path / "job.log"
    wait_for(lambda: log.exists() and log.read_text().count("run None") == 3, 30, "the job runs")
    if told:
        slurm.ask("scancel", "--batch", "--signal=USR1", number)
    wait_for(lambda: log.read_text().count("run 1") == 3, 60, f"the job runs again: {log.read_text()}")
    text = log.read_text()
    assert "no restart: this batch job goes back into the queue" in text
    assert "the workers ask to be started again (exit code 75)" in text and "[zerorun] requeueing this job" in text
    wait_for(lambda: not slurm.ask("squeue", "-h", "-o", "%i"), 20, "the job ends")


def stands_still(slurm: Slurm, folder: Path, kind: str, nodes: int) -> subprocess.Popen[str]:
    """A job of ``nodes``, in the step in which something happens."""
    script(folder, textwrap.dedent(STANDING_STILL))
    job = allocate(slurm, folder, *ZERORUN, "--export=OMP_NUM_THREADS=1", "train.py", kind, nodes=nodes)
    wait_for(lambda: len(list(folder.glob("ten.0.*"))) == nodes, 120, "ten steps")
    return job


def report_of(job: subprocess.Popen[str], begun: float, *status: int) -> str:
    _, err = job.communicate(timeout=60 * patience())
    assert job.returncode in status and time.monotonic() - begun < 15 * patience(), err
    return err.rstrip().split("=" * 80)[-2]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "words", "status"), KINDS)
@pytest.mark.parametrize("nodes", [2, WIDE])
def test_a_job_that_stands_still(slurm: Slurm, tmp_path: Path, kind: str, words: str, status: int, nodes: int) -> None:
    job = stands_still(slurm, tmp_path, kind, nodes)
    tells(kind, words, report_of(job, time.monotonic(), status, *((124,) if kind == "other shape" else ())))
    assert_nothing_left(slurm.cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [2, WIDE])
def test_a_frozen_node(slurm: Slurm, tmp_path: Path, nodes: int) -> None:
    job = stands_still(slurm, tmp_path, "none", nodes)
    begun, frozen = time.monotonic(), "$(pgrep -f '[l]auncher.agent|[t]rain.py')"
    slurm.cluster[1].shell(f"kill -STOP {frozen}")
    try:
        report = report_of(job, begun, 69)
    finally:
        slurm.cluster[1].shell(f"kill -KILL {frozen}", check=False)
    assert "host node1 failed first" in report and "rank 1 of the job ran there" in report
    assert_nothing_left(slurm.cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [3, WIDE])
@pytest.mark.parametrize("directions", [(1, 2), (1,)])
def test_a_link_that_lets_nothing_through_in_slurm(
    slurm: Slurm, tmp_path: Path, directions: tuple[int, ...], nodes: int
) -> None:
    job, begun = stands_still(slurm, tmp_path, "link", nodes), time.monotonic()
    for index in directions:
        slurm.cluster[index].shell(f"ip route add blackhole {slurm.cluster[3 - index].address}/32")
    (tmp_path / "cut").touch()
    try:
        report = report_of(job, begun, 124)
    finally:
        for index in directions:
            slurm.cluster[index].shell("ip route flush type blackhole")
    assert "the link between node1 and node2 lets nothing through" in report
    assert_nothing_left(slurm.cluster, 5)


@pytest.mark.nightly
def test_a_job_of_srun_alone_that_stands_still(slurm: Slurm, tmp_path: Path) -> None:
    script(tmp_path, textwrap.dedent(STANDING_STILL))
    told = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS TORCHELASTIC_RESTART_COUNT=0 OMP_NUM_THREADS=1"
    place = f"MASTER_ADDR={slurm.cluster[0].address} MASTER_PORT=29512"
    command = ["srun", "--overlap", "bash", "-c", f'{told} {place} {sys.executable} train.py "endless loop"']
    job = allocate(slurm, tmp_path, *command)
    wait_for(lambda: len(list(tmp_path.glob("ten.0.*"))) == NODES, 120, "ten steps")
    begun = time.monotonic()
    _, err = job.communicate(timeout=60 * patience())
    assert job.returncode not in (0, None) and time.monotonic() - begun < 15 * patience()
    report = err.split("=" * 80)[1]
    assert BUSY in report and "in planted_bug" in report
    assert_nothing_left(slurm.cluster, 5)


SHARDS = """
import torch, zerorun
import torch.distributed as dist
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
engine = zerorun.initialize(model, {"train_batch_size": 4, "gradient_clipping": 0, "optimizer": {"type": "SGD"},
                                    "zero_optimization": {"stage": 1, "hybrid_shard": True}})
data = torch.randn(4, 8)
engine.backward(engine(data.chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
engine.step()
place = engine.topology
if dist.get_rank() == 0:
    total = sum(float(value.sum()) for value in engine.state_dict().values())
else:
    engine.state_dict()
if dist.get_rank() == 0:
    print("told", place.world_size, place.replicate, place.shard, place.ranks_per_host, round(total, 4), flush=True)
"""


def told_by(text: str) -> list[str]:
    return [line.removeprefix("told ") for line in text.splitlines() if line.startswith("told ")]


@pytest.mark.nightly
def test_srun_alone_shards_within_hosts(slurm: Slurm, tmp_path: Path) -> None:
    """From a host that has none of the tasks, as from a login node. A batch script has one rank, whatever its tasks are."""
    (tmp_path / "train.py").write_text(SHARDS)
    torch.manual_seed(0)
    model, data = torch.nn.Linear(8, 8), torch.randn(4, 8)
    model(data).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    total = round(sum(float(value.sum()) for value in model.state_dict().values()), 4)
    step = ["srun", "--overlap", "--nodelist=node1,node2", "-N2", "--ntasks-per-node=2", "--ntasks=4"]
    job = allocate(slurm, tmp_path, "--exclusive", *step, sys.executable, "train.py")
    out, err = job.communicate(timeout=120 * patience())
    assert told_by(out) == [f"4 2 2 2 {total}"], err
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{sys.executable} train.py\n")
    command = slurm.command(["sbatch", "--wait", "-N2", "--ntasks=4", "--output=job.log", "job.sh"], tmp_path)
    subprocess.run(command, check=True, timeout=120 * patience())
    log = (tmp_path / "job.log").read_text()
    assert told_by(log) == [f"1 1 1 1 {total}"], log


@pytest.mark.nightly
def test_a_dump_by_the_job_s_number(slurm: Slurm, tmp_path: Path) -> None:
    """From outside the allocation."""
    script(tmp_path, textwrap.dedent(STANDING_STILL))
    options = ["--export=OMP_NUM_THREADS=1", "--export=ZERORUN_HANG_TIMEOUT_S=0"]
    job = allocate(slurm, tmp_path, *ZERORUN, *options, "train.py", "endless loop")
    wait_for(lambda: len(list(tmp_path.glob("ten.0.*"))) == NODES, 120, "ten steps")
    number = slurm.ask("squeue", "-h", "-o", "%i").strip()
    command = slurm.command([*ZERORUN, "--launcher=slurm", "--dump", number], tmp_path)
    dump = subprocess.run(command, capture_output=True, text=True, check=False)
    assert dump.returncode == 0, dump.stderr
    assert f", {number}: 3 of 3 ranks on 3 hosts, " in dump.stdout and "in planted_bug" in dump.stdout
    none = subprocess.run(
        slurm.command([*ZERORUN, "--launcher=slurm", "--dump", "999"], tmp_path), capture_output=True, text=True
    )
    assert none.returncode == 2 and "SLURM knows no such running job" in none.stderr
    slurm.ask("scancel", number)
    job.communicate(timeout=60 * patience())
    assert_nothing_left(slurm.cluster, 10)
