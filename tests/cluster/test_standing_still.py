"""Jobs on several hosts that stand still: the launcher names the guilty rank and its host, or the link."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from harness import patience
from jobs import PRELUDE, Job, assert_nothing_left
from testbed import Cluster, wait_for

SCRIPT = textwrap.dedent("""
    import re, torch, zerorun
    kind = sys.argv[1]
    torch.set_num_threads(1)
    class Block(torch.nn.Sequential):
        skipped = False
        def forward(self, batch):
            return batch if self.skipped else super().forward(batch)
    model = torch.nn.Sequential(*(Block(torch.nn.Linear(16, 16)) for _ in range(4)))
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
        if kind == "sleep":
            time.sleep(1000)
        if kind == "loop in C":
            re.match("(a*)*b", "a" * 60)
        if kind == "skips a block":
            model[2].skipped = True
            engine.backward(engine(torch.ones(2, 16)).square().mean())
        if kind == "evaluates alone":
            with torch.no_grad():
                engine(torch.ones(2, 16))
        if kind == "fewer batches":
            sys.exit()
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            while kind == "loader runs dry" and rank == 1 and index > 40:
                time.sleep(1)
            return torch.ones(16)
    loader = iter(torch.utils.data.DataLoader(Texts(), batch_size=2, num_workers=1))
    for step in range(90 if kind == "slow" else 10**6):
        if kind == "slow" and rank == 1:
            time.sleep(0.05)
        batch = next(loader) if kind == "loader runs dry" else torch.ones(2, 16)
        if step == 10:
            meet("ten")
            while kind == "link" and not os.path.exists(f"{here}/cut"):
                time.sleep(0.05)
        if step == 10 and kind == "other shape":
            torch.distributed.all_reduce(torch.ones(6 if rank == 1 else 3))
        if step == 10 and rank == 1:
            planted_bug()
        engine.backward(engine(batch).square().mean())
        engine.step()
""")
IN_PLANTED_BUG = ("endless loop", "own collective", "saves alone", "whole weights alone", "sleep", "loop in C")
BUSY, ORDER = "rank 1 on node1 does not move", "ranks have been waiting for each other"
SIZES = "ranks disagree on the size of 'all_reduce of the script': "
KINDS = [  # what goes wrong, what the report says, the exit status
    ("endless loop", BUSY, 124),
    ("own collective", ORDER, 124),
    ("stopped", "rank 1 on node1 is stopped", 124),
    ("saves alone", ORDER, 124),
    ("whole weights alone", ORDER, 124),
    ("sleep", BUSY, 124),
    ("loop in C", BUSY, 124),
    ("loader runs dry", BUSY, 124),
    ("skips a block", ORDER, 124),
    ("evaluates alone", ORDER, 124),
    ("fewer batches", "zerorun: rank 1 on node1 ended with exit code 0", 1),
    ("killed", "rank 1 on node1 failed first", 137),
    ("other shape", SIZES, 134),
]


def job_in_step_ten(cluster: Cluster, folder: Path, kind: str, hosts: int, *environment: str) -> Job:
    """A job of SCRIPT, all of whose ranks have come to the step in which something happens."""
    job = Job(cluster, folder, SCRIPT, hosts=hosts, args=[kind], environment=["OMP_NUM_THREADS=1", *environment])
    deadline = time.monotonic() + 120 * patience()
    while len(list(folder.glob("ten.0.*"))) < hosts:
        assert job.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return job


def report_of(job: Job, begun: float, status: int = 124) -> str:
    code, _, err = job.finish(60)
    assert code == status or (status, code) == (134, 124), err  # where gloo does not notice, ranks stand still
    assert time.monotonic() - begun < 15 * patience(), err
    return err.rstrip().split("=" * 80)[-2]


def tells(kind: str, words: str, report: str) -> None:
    """Assert that the report names the guilty, the cause, and where it is."""
    assert words in report
    if kind == "other shape":
        assert re.search(r": rank 0 on node0 has 12 bytes, rank 1 on node1 has 24 bytes\.", report) or re.search(
            r": rank 1 on node1 has 24 bytes, ranks 0, 2-\d+ have 12 bytes\.", report
        )
    assert "in planted_bug" in report or kind not in IN_PLANTED_BUG
    if words == ORDER:
        assert "rank 1 is " in report and "in forward" in report
    if kind == "own collective":
        assert "rank 1 is in the script between calls of the engine, at 'all_reduce of the script'" in report
    if kind == "fewer batches":  # the others lose the connection to it at once
        assert "after 10 micro-batches; others were" in report and "give all ranks the same number of batches" in report
    if kind == "killed":
        assert "killed by SIGKILL" in report


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [2, 12])
@pytest.mark.parametrize(("kind", "words", "status"), KINDS)
def test_the_guilty_rank_is_named(cluster: Cluster, tmp_path: Path, hosts: int, kind: str, words: str, status: int) -> None:
    job = job_in_step_ten(cluster, tmp_path, kind, hosts)
    tells(kind, words, report_of(job, time.monotonic(), status))
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [2, 12])
def test_a_host_that_is_frozen(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    job = job_in_step_ten(cluster, tmp_path, "none", hosts)
    frozen = cluster[1]
    frozen.shell("kill -STOP $(pgrep -f '[l]auncher.agent|[t]rain.py')")
    try:
        report = report_of(job, time.monotonic(), status=69)
    finally:
        frozen.shell("kill -KILL $(pgrep -f '[l]auncher.agent|[t]rain.py')", check=False)
    assert "host node1 failed first" in report and "rank 1 of the job ran there" in report
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("endless loop", BUSY),
        ("whole weights alone", ORDER),
        ("stopped", "rank 1 on node1 is stopped"),
        (
            "frozen",
            "host node1 is lost: nothing was heard from it for 6 s: the host or the network is down. Its ranks: 1\n",
        ),
        ("fewer batches", "rank 1 has come to the end of its script after 10 micro-batches, and then rank 0 began '"),
        ("other shape", f"{SIZES}rank 0 on node0 has 12 bytes, rank 1 on node1 has 24 bytes."),
    ],
)
def test_ranks_of_torchrun_on_several_hosts(cluster: Cluster, tmp_path: Path, kind: str, words: str) -> None:
    """Nobody but the ranks themselves sees to it that their boards are read."""
    (tmp_path / "train.py").write_text(PRELUDE + SCRIPT)
    jobs = []
    for index in range(2):
        where = ["--nnodes=2", f"--node-rank={index}", f"--master-addr={cluster[0].address}", "--master-port=29511"]
        run = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node=1", "train.py", kind]
        command = cluster[index].command(["env", "OMP_NUM_THREADS=1", *run], tmp_path)
        jobs.append(subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1))
    deadline, begun = time.monotonic() + 120 * patience(), 0.0
    while len(list(tmp_path.glob("ten.0.*"))) < 2:
        assert jobs[0].poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    begun = time.monotonic()
    if kind == "frozen":
        connected = "ls -l /proc/$(pgrep -of '[l]auncher.sidecar')/fd | grep -q socket:"
        wait_for(lambda: cluster[1].shell(connected, check=False).returncode == 0, 60, "a supervisor on node1")
        time.sleep(2 * patience())  # what it then tells of its ranks
        begun = time.monotonic()
        cluster[1].shell("kill -STOP $(pgrep -f '[l]auncher.sidecar|[t]rain.py')")
    err = jobs[0].communicate(timeout=60 * patience())[1]
    assert time.monotonic() - begun < 15 * patience(), err
    if kind == "frozen":
        cluster[1].shell("kill -KILL $(pgrep -f '[l]auncher.sidecar|[t]rain.py')", check=False)
        jobs[1].send_signal(signal.SIGCONT)  # nsenter stops with its child
    jobs[1].communicate(timeout=60 * patience())
    assert jobs[0].returncode not in (0, None)
    assert jobs[1].returncode not in (0, None) or kind == "fewer batches"  # its ranks have ended well
    report = err.split("=" * 80)[1]
    assert words in report
    assert "in planted_bug" in report or kind not in IN_PLANTED_BUG
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
def test_a_dump_of_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """From a host that has nothing to do with the job."""
    job = job_in_step_ten(cluster, tmp_path, "endless loop", 2, "ZERORUN_HANG_TIMEOUT_S=0")
    command = cluster[2].command(
        [sys.executable, "-m", "zerorun.launcher.cli", "--dump", "--hostfile", "hostfile"], tmp_path
    )
    deadline = time.monotonic() + 60 * patience()
    while True:
        dump = subprocess.run(command, capture_output=True, text=True, check=False)
        assert dump.returncode == 0, dump.stderr
        if "in planted_bug" in dump.stdout and "none of them moving" in dump.stdout:
            break
        assert time.monotonic() < deadline, dump.stdout
    assert "2 of 2 ranks on 2 hosts, 10 steps" in dump.stdout
    assert "rank 1: 10 steps, micro-batch 10; in the script between calls of the engine, for " in dump.stdout
    assert "rank 0: 10 steps, micro-batch 10; in forward, at '" in dump.stdout
    job.signal(signal.SIGTERM)
    job.finish(30)
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("asker", [0, 2])
def test_a_trace_of_all_hosts(cluster: Cluster, tmp_path: Path, asker: int) -> None:
    """From the host of rank 0, and from one that has nothing to do with the job. Rank 0 writes what all have done."""
    job = job_in_step_ten(cluster, tmp_path, "none", 2)
    words = ["--trace", "--steps", "3", "--hostfile", "hostfile"]
    asked = subprocess.run(
        cluster[asker].command([sys.executable, "-m", "zerorun.launcher.cli", *words], tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    told = re.fullmatch(
        r"rank 0 of job (\S+) writes its next 3 steps to (zerorun-trace-\d+\.json), in its folder on node0\n", asked.stdout
    )
    assert told is not None, asked.stdout
    file = tmp_path / told[2]
    wait_for(lambda: file.exists() and file.read_text().rstrip().endswith("]}"), 30, "the trace")
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 on node0", "rank 1 on node1"]
    updates = [[event for event in events if (event["pid"], event["name"]) == (rank, "update")] for rank in range(2)]
    ends = [[event["ts"] + event["dur"] for event in found if event["cat"] == "program"] for found in updates]
    assert [len(found) for found in ends] == [3, 3]
    for one, next_one, other in zip(ends[0], ends[0][1:], ends[1], strict=False):  # by one clock: they update together
        assert other < next_one and one < ends[1][2]
    assert all(f"{unit}: all-gather for forward" in {event["name"] for event in events} for unit in range(4))
    unknown = subprocess.run(
        cluster[asker].command([sys.executable, "-m", "zerorun.launcher.cli", "--trace", "99", *words[1:]], tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert unknown.returncode == 2 and f"Jobs that do: {told[1]}" in unknown.stderr, unknown.stderr
    job.signal(signal.SIGTERM)
    job.finish(30)
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
def test_a_slow_rank_of_another_host_is_named(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, SCRIPT, hosts=3, args=["slow"], environment=["OMP_NUM_THREADS=1"])
    code, _, err = job.finish(120)
    assert code == 0, err
    assert "[zerorun] rank 1 on node1 is slow: of each step it is in the script between calls of the engine for" in err
    assert err.count("is slow") == 1
    assert_nothing_left(cluster, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", [3, 12])
@pytest.mark.parametrize("directions", [("node1", "node2"), ("node1",)])
def test_a_link_that_lets_nothing_through(
    cluster: Cluster, tmp_path: Path, directions: tuple[str, ...], hosts: int
) -> None:
    """Both hosts hear the launcher, and nothing, or one of them nothing, of each other."""
    job = job_in_step_ten(cluster, tmp_path, "link", hosts)
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
    assert "ranks 1-2 are all at '" in report and "the link between node1 and node2 lets nothing through" in report
    assert_nothing_left(cluster, 5)
