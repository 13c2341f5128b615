"""What reaches the workers on other hosts, the rendezvous, hosts that join by hand, and training as on one host."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import fork_program, patience
from jobs import PRELUDE, Job, assert_nothing_left
from testbed import ROOT, Cluster, wait_for

import zerorun

HOSTILE = ["a b", "it's", 'say "x"', "$HOME", "`id`", "two\nlines", "", "*", "\\", "--", "-m", "; touch injected", "ключ"]
ZERORUN = (sys.executable, "-m", "zerorun.launcher.cli")


def test_arguments_paths_and_variables_arrive_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a $HOME 'quoted' \"folder\"; touch injected\n"
    folder.mkdir()
    script = "import json\nprint(json.dumps([sys.argv[1:], os.getcwd(), os.environ['ODD'], os.environ['SECRET_KEY']]))\n"
    value = "x'y\"z$HOME`id`\n; touch injected"
    environment = [f"ODD={value}", "SECRET_KEY=s3cret"]
    exports = ["--export", "ODD", "--export", "SECRET_KEY"]
    job = Job(cluster, folder, script, *exports, hosts=3, args=HOSTILE, environment=environment)
    code, out, err = job.finish(30)
    assert code == 0, err
    found = [json.loads(re.sub(r"^\[rank \d\] ", "", line)) for line in out.splitlines()]
    assert found == [[HOSTILE, str(folder), value, "s3cret"]] * 3
    assert not list(tmp_path.rglob("injected"))


def test_secrets_are_on_no_command_line_and_in_no_plan(cluster: Cluster, tmp_path: Path) -> None:
    script = "meet()\nprint(subprocess.run(['ps', 'axww'], capture_output=True, text=True).stdout)\n"
    secret = "s3cr3t-value"
    job = Job(cluster, tmp_path, script, "--export=API_TOKEN", hosts=2, environment=[f"API_TOKEN={secret}"])
    out = job.finish(30)[1]
    assert "zerorun.launcher.agent" in out
    # The launcher itself was started by ``env`` in this test; nothing that it starts may show the value.
    shown = [line for line in out.splitlines() if secret in line and "nsenter" not in line and " env " not in line]
    assert not shown
    command = ["env", f"API_TOKEN={secret}", *ZERORUN, "--hostfile=hostfile", "--export=API_TOKEN", "--dry-run", "train.py"]
    plan = subprocess.run(
        cluster[0].command(command, tmp_path), capture_output=True, text=True, timeout=30 * patience(), check=True
    )
    assert "API_TOKEN='(hidden)'" in plan.stdout and secret not in plan.stdout


def test_env_files(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# a comment\n\nONE=1\nTWO=a b $HOME\n")
    (tmp_path / ".zerorun_env").write_text("export TWO='over'\n")
    code, out, err = Job(cluster, tmp_path, "print(os.environ['ONE'], os.environ['TWO'])\n", hosts=2).finish(30)
    assert code == 0 and sorted(out.splitlines()) == ["1 over", "[rank 1] 1 over"], err


def test_rendezvous_is_an_address_that_all_reach(cluster: Cluster, tmp_path: Path) -> None:
    """Although each host believes that its own name is a loopback address, as Debian's installer has it."""
    script = "print(*(os.environ[n] for n in ('MASTER_ADDR', 'GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')), flush=True)\n"
    for index in range(2):
        cluster[index].shell(f"cp /etc/hosts /run/hosts; sed -i 's/^.* node{index}$/127.0.1.1 node{index}/' /run/hosts; "
                             "mount --bind /run/hosts /etc/hosts")  # fmt: skip
    try:
        code, out, err = Job(cluster, tmp_path, script, hosts=2).finish(30)
    finally:
        for index in range(2):
            cluster[index].shell("umount /etc/hosts")
    assert code == 0, err
    line = f"{cluster[0].address} eth0 eth0"
    assert sorted(out.splitlines()) == sorted([line, f"[rank 1] {line}"])


def test_master_that_cannot_be_reached_is_named_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "open(f'{here}/ran', 'w')\n", "--master-addr=127.0.0.1", hosts=3)
    code, _, err = job.finish(30)
    assert code == 2 and not (tmp_path / "ran").exists()
    assert "node1: cannot reach the first host at 127.0.0.1" in err and "--master-addr" in err


def test_shell_start_up_files_may_talk(cluster: Cluster, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("echo Welcome to the cluster\necho '{not json'\nprintf 'no line feed'\n")
    cluster[1].shell(f"sed 's#:/root:#:{home}:#' /etc/passwd > /run/passwd; mount --bind /run/passwd /etc/passwd")
    try:
        code, out, err = Job(cluster, tmp_path, "print('ran', rank)\n", hosts=2).finish(30)
    finally:
        cluster[1].shell("umount /etc/passwd")
    assert code == 0 and sorted(out.splitlines()) == ["[rank 1] ran 1", "ran 0"], err


def test_a_terminal_multiplies_no_lines(cluster: Cluster, tmp_path: Path) -> None:
    """Lines of many ranks never mix, however they come."""
    script = "for index in range(200):\n    os.write(1, f'{rank}-{index} {\"x\" * 100}\\n'.encode())\n"
    code, out, err = Job(cluster, tmp_path, script, hosts=4, slots=3).finish(30)
    assert code == 0, err
    found = sorted(re.sub(r"^\[rank \d+\] ", "", line) for line in out.splitlines())
    assert found == sorted(f"{rank}-{index} {'x' * 100}" for rank in range(12) for index in range(200))


@pytest.mark.parametrize("launcher", ("pdsh", "openmpi"))
def test_other_launchers(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    if launcher == "openmpi" and shutil.which("mpirun") is None:
        pytest.skip("needs mpirun (Debian package: openmpi-bin)")
    job = Job(cluster, tmp_path, "print(rank, sys.argv[1:])\n", f"--launcher={launcher}", hosts=3, args=["a b"])
    code, out, err = job.finish(30)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["0 ['a b']", "[rank 1] 1 ['a b']", "[rank 2] 2 ['a b']"]
    assert_nothing_left(cluster, 2)


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(cluster: Cluster, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command on each of three hosts."""
    (tmp_path / "train.py").write_text(
        PRELUDE + "meet()\nif rank == 3 and 'fail' in sys.argv: sys.exit(9)\n"
        "if 'fail' in sys.argv: time.sleep(100)\nprint(rank, world, socket.gethostname())\n"
    )
    jobs: list[subprocess.Popen[str]] = []
    yield jobs
    for job in jobs:
        if job.poll() is None:
            job.kill()
        job.communicate()


def type_on(cluster: Cluster, folder: Path, index: int, *words: str) -> subprocess.Popen[str]:
    common = [*ZERORUN, "--nnodes=3", "--nproc-per-node=2", f"--master-addr={cluster[0].address}", "--master-port=29400"]
    command = ["env", "ZERORUN_JOB_SECRET=known to these hosts", *common, f"--node-rank={index}", "train.py", *words]
    command = cluster[index].command(command, folder)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_hosts_join_by_hand(cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]) -> None:
    typed += [type_on(cluster, tmp_path, index) for index in (2, 0, 1)]
    results = [job.communicate(timeout=30 * patience()) for job in typed]
    assert [job.returncode for job in typed] == [0, 0, 0], results
    lines = sorted(line.rpartition("] ")[2] for line in results[1][0].splitlines())
    assert lines == [f"{rank} 6 node{rank // 2}" for rank in range(6)]
    assert "connected to node 0: the job starts when all hosts have joined" in results[0][1]
    assert "joined; all output appears where node 0 is" in results[0][1]


def test_hosts_that_start_at_once_find_the_secret_in_a_file(
    cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]
) -> None:
    """As srun would start them: nobody copies anything, and the folder is shared."""
    command = [*ZERORUN, "--nnodes=3", "--nproc-per-node=2", f"--master-addr={cluster[0].address}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for index in (2, 1, 0):
        words = cluster[index].command([*command, "--secret-file=job.secret", f"--node-rank={index}", "train.py"], tmp_path)
        typed.append(subprocess.Popen(words, **pipes))  # type: ignore[call-overload]
    results = [job.communicate(timeout=60 * patience()) for job in typed]
    assert [job.returncode for job in typed] == [0, 0, 0], results
    assert len(results[2][0].splitlines()) == 6 and (tmp_path / "job.secret").stat().st_mode & 0o777 == 0o600
    assert not any((tmp_path / "job.secret").read_text().strip() in text for result in results for text in result)


def test_hosts_of_a_hostfile_join_without_ssh(cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]) -> None:
    """As accelerate starts DeepSpeed with the launcher "nossh". The first host chosen is node 0."""
    lines = [f"{cluster[index].address} slots={count}\n" for index, count in enumerate((2, 1, 3))]
    (tmp_path / "hosts").write_text("".join(lines))
    for number, index in enumerate((1, 2)):
        chosen = ["--hostfile=hosts", f"--exclude={cluster[0].address}", f"--node_rank={number}", "--no_ssh"]
        command = ["env", "ZERORUN_JOB_SECRET=known to these hosts", *ZERORUN, *chosen, "--master_port=29400", "train.py"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        typed.append(subprocess.Popen(cluster[index].command(command, tmp_path), **pipes))  # type: ignore[call-overload]
    results = [job.communicate(timeout=30 * patience()) for job in typed]
    assert [job.returncode for job in typed] == [0, 0], results
    lines = sorted(line.rpartition("] ")[2] for line in results[0][0].splitlines())
    assert lines == ["0 4 node1", "1 4 node2", "2 4 node2", "3 4 node2"]


def test_a_stranger_on_the_network_gets_nothing(
    cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]
) -> None:
    """He answers as a host of this version would, faster than the real one, and tries to end the job."""
    typed += [type_on(cluster, tmp_path, 0)]
    hello = {"is": "hello", "version": zerorun.__version__, "machine": "m", "hostname": "h", "cores": [0], "slots": 2,
             "node_rank": 1, "job_id": "none"}  # fmt: skip
    attack = (
        "import json, socket, sys, time\n"
        "while True:\n"
        f"    try: peer = socket.create_connection(({cluster[0].address!r}, 29400)); break\n"
        "    except OSError: time.sleep(0.02)\n"
        f"for message in ({hello!r}, {{'is': 'ready'}}, {{'is': 'signal', 'number': 15}}):\n"
        "    peer.sendall(json.dumps(message).encode() + b'\\n')\n"
        "peer.settimeout(5)\n"
        "end = time.monotonic() + 5\n"
        "while time.monotonic() < end and (chunk := peer.recv(65536)): sys.stdout.write(chunk.decode())\n"
    )
    stranger = cluster[3].command([sys.executable, "-c", attack])
    heard = subprocess.run(stranger, capture_output=True, text=True, timeout=30 * patience(), check=False).stdout
    typed += [type_on(cluster, tmp_path, 1), type_on(cluster, tmp_path, 2)]
    out, err = typed[0].communicate(timeout=30 * patience())
    assert typed[0].returncode == 0 and len(out.splitlines()) == 6, err
    assert [json.loads(line)["do"] for line in heard.splitlines()] == ["challenge"]


@pytest.mark.nightly  # by day: e2e/test_listening.py
def test_one_host_with_a_network_listens_on_loopback_only(cluster: Cluster, tmp_path: Path) -> None:
    """Its name leads to an address that others reach, where gloo would listen by itself."""
    (tmp_path / "train.py").write_text(
        "import zerorun, torch, torch.distributed as dist\n"
        "zerorun.init_distributed()\n"
        "dist.all_reduce(torch.ones(1), group=dist.new_group())\n"
        "lines = [line.split() for name in ('tcp', 'tcp6') for line in open(f'/proc/net/{name}').readlines()[1:]]\n"
        "print(*(words[1] for words in lines if words[3] == '0A' and not words[1].endswith(':0016')), flush=True)\n"
        "dist.barrier()\n"
    )
    command = [*ZERORUN, "--nproc=2", "train.py"]
    done = subprocess.run(
        cluster[0].command(command, tmp_path), capture_output=True, text=True, timeout=60 * patience(), check=False
    )
    found = [address for address in done.stdout.split() if ":" in address]
    assert len(found) >= 4 and all(address.startswith("0100007F:") for address in found), (done.stdout, done.stderr)


def test_failure_reaches_all_that_joined(cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]) -> None:
    typed += [type_on(cluster, tmp_path, index, "fail") for index in range(3)]
    results = [job.communicate(timeout=30 * patience()) for job in typed]
    assert [job.returncode for job in typed] == [9, 9, 9], results
    assert "rank 3 on node 1 failed first" in results[0][1]
    assert_nothing_left(cluster, 1)


def test_host_that_joined_is_lost(cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]) -> None:
    (tmp_path / "train.py").write_text(PRELUDE + "meet()\ntime.sleep(100)\n")
    typed += [type_on(cluster, tmp_path, index) for index in range(3)]
    wait_for(lambda: len(list(tmp_path.glob("here.0.*"))) == 6, 20, "all ranks run")
    cluster[2].crash()
    _, err = typed[0].communicate(timeout=15 * patience())
    assert typed[0].returncode == 69 and "host node 2 failed first" in err
    assert_nothing_left(cluster, 1)


def test_strangers_at_the_port(cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]) -> None:
    """Whatever connects and says something else, or nothing, changes nothing; one host is typed twice."""
    script = PRELUDE + "print(rank)\nwhile not os.path.exists(f'{here}/refused'): time.sleep(0.01)\n"
    (tmp_path / "train.py").write_text(script)
    typed += [type_on(cluster, tmp_path, 0)]
    port = f"/dev/tcp/{cluster[0].address}/29400"
    says = ['{"is": "output"}', '{"is": "hello"}', "[" * 5000, "GET / HTTP/1.0", '{"is": "pong"}']
    talk = "\n".join(f"(exec 3<>{port}; echo '{words}' >&3; sleep 8) &" for words in says)
    wait_for(lambda: cluster[1].shell(f"exec 3<>{port}", check=False).returncode == 0, 10, "node 0 listens")
    stranger = subprocess.Popen(cluster[1].command(["bash", "-c", talk.replace('\\"', '"')]))
    typed += [type_on(cluster, tmp_path, index) for index in (1, 2, 2)]
    wait_for(lambda: any(job.poll() is not None for job in typed[2:]), 20, "the one that came second is refused")
    (refused,) = [job.returncode for job in typed[2:] if job.returncode is not None]
    assert refused != 0
    (tmp_path / "refused").touch()
    out, err = typed[0].communicate(timeout=30 * patience())
    assert typed[0].returncode == 0 and len(out.splitlines()) == 6, err
    stranger.wait(20)


def test_signals_to_any_launcher_reach_all(cluster: Cluster, tmp_path: Path, typed: list[subprocess.Popen[str]]) -> None:
    (tmp_path / "train.py").write_text(
        PRELUDE + "caught = []\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM):\n    signal.signal(number, lambda n, frame: caught.append(n))\n"
        "meet()\nwhile len(caught) < 2: time.sleep(0.01)\ntime.sleep(0.3)\nprint('caught', *map(int, caught))\n"
    )
    typed += [type_on(cluster, tmp_path, index) for index in range(3)]
    wait_for(lambda: len(list(tmp_path.glob("here.0.*"))) == 6, 20, "all ranks run")
    launcher = int(Path(f"/proc/{typed[2].pid}/task/{typed[2].pid}/children").read_text().split()[0])
    os.kill(launcher, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(launcher, signal.SIGTERM)
    out, err = typed[0].communicate(timeout=15 * patience())
    assert [line.rpartition("] ")[2] for line in out.splitlines()] == ["caught 10 15"] * 6, err


# -- training ----------------------------------------------------------------------------------------------------------


def losses(folder: Path) -> list[tuple[str, ...]]:
    with open(next(folder.rglob("loss.csv"))) as file:
        return [tuple(row) for row in csv.reader(file)]


@pytest.mark.parametrize("over", ["ssh", pytest.param("slurm", marks=pytest.mark.nightly)])
def test_training_is_the_same_as_on_one_host(cluster: Cluster, tmp_path: Path, over: str) -> None:
    import slurmbed

    config = json.loads((ROOT / "examples/configs/zero3.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps({**config, "train_batch_size": 18}))
    example = [str(ROOT / "examples/train_gpt.py"), "--config", str(tmp_path / "ds.json")]
    example += ["--layers", "2", "--width", "48", "--heads", "2", "--context", "32"]
    example += ["--steps", "4", "--data", str(ROOT / "zerorun/distributed/transport/communicator.py")]
    (tmp_path / "hostfile").write_text("node0 slots=1\nnode1 slots=1\n")
    # Between hosts the sums travel over gloo; on one host the same is asked for, so that the bits can be compared.
    here = ["env", "ZERORUN_PEER_MEMORY=0", "OMP_NUM_THREADS=1"]
    fork_program(2, *example, "--out", str(tmp_path / "one"), folder=tmp_path, ZERORUN_PEER_MEMORY="0")
    ways = {"ssh": [*ZERORUN, "--hostfile", str(tmp_path / "hostfile")]}
    slurm = None
    if over == "slurm":
        if (reason := slurmbed.missing()) is not None:
            pytest.skip(reason)
        slurm = slurmbed.Slurm(cluster, 2)
        slurm.up()
        ways = {"slurm": ["salloc", "-N2", "--quiet", *ZERORUN]}
    for way, command in ways.items():
        folder = tmp_path / way
        folder.mkdir()
        full = cluster[0].command([*here, *command, *example, "--out", str(folder)], folder)
        done = subprocess.run(full, capture_output=True, text=True, timeout=200 * patience(), check=False)
        assert done.returncode == 0, (way, done.stderr)
    if slurm is not None:
        slurm.down()
    assert all(losses(tmp_path / way) == losses(tmp_path / "one") for way in ways)
