"""Restarts: the whole job again, on a new port, on the hosts that are left if that is allowed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from covering import by_day
from harness import patience
from jobs import Job, assert_nothing_left
from testbed import Cluster, wait_for

NOTE = "print('attempt', attempt, 'rank', rank, 'of', world, 'port', os.environ['MASTER_PORT'], 'end', flush=True)\n"


def attempts(out: str) -> list[tuple[int, int, int]]:
    """(attempt, rank, world size) of each line, and the ports must differ between attempts."""
    words = [line.rpartition("] ")[2].split() for line in out.splitlines() if "attempt" in line]
    ports = {(int(word[1]), word[7]) for word in words}
    assert len({port for _, port in ports}) == len(ports) == len({attempt for attempt, _ in ports})
    return sorted((int(word[1]), int(word[3]), int(word[5])) for word in words)


def second(out: str) -> list[tuple[int, int, int]]:
    """The ``attempts`` after a host has crashed: with it went lines, or parts of lines, that were on their way."""
    whole = [line for line in out.splitlines() if line.endswith(" end")]
    return [entry for entry in attempts("\n".join(whole)) if entry[0] > 0]


def test_worker_fails_and_all_start_again(cluster: Cluster, tmp_path: Path) -> None:
    script = NOTE + "meet()\nif rank == 1 and attempt < 2: sys.exit(7)\nif attempt < 2: time.sleep(100)\n"
    code, out, err = Job(cluster, tmp_path, script, "--max-restarts=2", hosts=3).finish(30)
    assert code == 0, err
    assert attempts(out) == [(attempt, rank, 3) for attempt in range(3) for rank in range(3)]
    assert err.count("rank 1 on node1 failed first") == 2
    assert "[zerorun] restart 1 of 2 on 3 of 3 hosts" in err and "[zerorun] restart 2 of 2 on 3 of 3 hosts" in err
    assert_nothing_left(cluster, 0.5)


@pytest.mark.nightly
def test_restarts_are_used_up(cluster: Cluster, tmp_path: Path) -> None:
    script = NOTE + "meet()\nif rank == 1: sys.exit(7)\ntime.sleep(100)\n"
    code, out, err = Job(cluster, tmp_path, script, "--max-restarts=1", hosts=3).finish(30)
    assert code == 7
    assert len(attempts(out)) == 6 and err.count("failed first") == 2
    assert_nothing_left(cluster, 0.5)


@pytest.mark.nightly  # by day the first of the hosts crashes, below
def test_host_crashes_and_the_others_go_on(cluster: Cluster, tmp_path: Path) -> None:
    script = NOTE + "meet()\nif attempt == 0: time.sleep(100)\n"
    job = Job(cluster, tmp_path, script, "--max-restarts=1", "--nnodes=2:3", hosts=3)
    job.wait_until_all_run()
    cluster[1].crash()
    code, out, err = job.finish(40)
    assert code == 0, err
    assert second(out) == [(1, 0, 2), (1, 1, 2)]
    assert "host node1 failed first" in err and "restart 1 of 1 on 2 of 3 hosts" in err
    assert_nothing_left(cluster, 0.5)


@pytest.mark.nightly  # by day: test_a_spare_takes_the_place_of_a_lost_host
def test_host_that_comes_back_takes_part_again(cluster: Cluster, tmp_path: Path) -> None:
    script = NOTE + "meet()\nif attempt == 0: time.sleep(100)\n"
    job = Job(cluster, tmp_path, script, "--max-restarts=1", hosts=3)
    job.wait_until_all_run()
    cluster[1].crash()
    cluster[1].boot()
    code, out, err = job.finish(40)
    assert code == 0, err
    assert second(out) == [(1, rank, 3) for rank in range(3)]


@pytest.mark.nightly
def test_too_few_hosts_are_left(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "meet()\ntime.sleep(100)\n", "--max-restarts=3", hosts=3)
    job.wait_until_all_run()
    cluster[1].crash()
    begin = time.monotonic()
    code, _, err = job.finish(60)
    assert code == 69
    assert "no restart: 2 of 3 hosts are left, 3 are needed" in err, err
    assert time.monotonic() - begin < 45 * patience()
    assert_nothing_left(cluster, 0.5)


@pytest.mark.parametrize("how", by_day(("crash", "power_off"), "power_off"))
def test_a_spare_takes_the_place_of_a_lost_host(cluster: Cluster, tmp_path: Path, how: str) -> None:
    """And its ranks, at once: nobody waits for the lost one. A host that goes silent is lost after six seconds."""
    script = NOTE + "meet()\nprint(f'at {time.monotonic()}', flush=True)\nif attempt == 0: time.sleep(100)\n"
    script += "print('host', rank, os.uname().nodename, flush=True)\n"
    job = Job(cluster, tmp_path, script, "--max-restarts=1", "--spares=1", hosts=4)
    wait_for(lambda: len(list(tmp_path.glob("here.0.*"))) == 3, 20, "all ranks run")
    begin = time.monotonic()
    getattr(cluster[1], how)()
    code, out, err = job.finish(60)
    assert code == 0, err
    assert {tuple(line.rpartition("host ")[2].split()) for line in out.splitlines() if "host" in line} == {
        ("0", "node0"),
        ("1", "node3"),
        ("2", "node2"),
    }
    assert "[zerorun] node3 takes the place of node1" in err and "restart 1 of 1 on 3 of 3 hosts" in err
    assert max(float(line.split()[-1]) for line in out.splitlines() if "at " in line) - begin < 9 * patience()
    assert_nothing_left(cluster, 0.5)


@pytest.mark.nightly
def test_a_host_that_comes_back_is_in_reserve(cluster: Cluster, tmp_path: Path) -> None:
    """While the job goes on: it takes the place of the next one that is lost, at once."""
    script = NOTE + "meet()\nif attempt < 2: time.sleep(100)\nprint('host', rank, os.uname().nodename, flush=True)\n"
    told = tmp_path / "told"
    with told.open("w") as stderr:
        job = Job(cluster, tmp_path, script, "--max-restarts=2", "--spares=1", hosts=3, stderr=stderr)
    wait_for(lambda: len(list(tmp_path.glob("here.0.*"))) == 2, 20, "all ranks run")
    cluster[1].crash()
    cluster[1].boot()
    wait_for(lambda: "node1 is back, in reserve" in told.read_text(), 40, "the lost host is in reserve")
    cluster[2].crash()
    code, out, _ = job.finish(60)
    err = told.read_text()
    assert code == 0, err
    assert "node2 takes the place of node1" in err and "node1 takes the place of node2" in err
    assert "host 1 node1" in out
    assert_nothing_left(cluster, 0.5)


@pytest.mark.parametrize("how", by_day(("crash", "power_off"), "crash"))
def test_first_host_is_lost(cluster: Cluster, tmp_path: Path, how: str) -> None:
    """The rendezvous moves to the next host. The launcher is on host 0, so host 0 is left out of the job here."""
    (tmp_path / "more").write_text("node1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
    script = NOTE + "meet()\nif attempt == 0: time.sleep(100)\nprint('master', os.environ['MASTER_ADDR'])\n"
    job = Job(cluster, tmp_path, script, "--max-restarts=1", "--min-nodes=2", "--hostfile=more", hosts=3)
    job.wait_until_all_run()
    getattr(cluster[1], how)()
    code, out, err = job.finish(90)
    assert code == 0, err
    assert out.count(f"master {cluster[2].address}") == 2


@pytest.mark.nightly  # by day: test_a_spare_takes_the_place_of_a_lost_host
def test_job_starts_without_a_host_that_is_down(cluster: Cluster, tmp_path: Path) -> None:
    cluster[1].power_off()
    code, out, err = Job(cluster, tmp_path, NOTE, "--nnodes=2:3", hosts=3).finish(40)
    assert code == 0, err
    assert attempts(out) == [(0, 0, 2), (0, 1, 2)]
    assert "[zerorun] 2 hosts take part, without\n  node1: ssh ended with status 255" in err
