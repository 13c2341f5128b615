"""The launcher for many hosts, as far as it needs none: command line to plan, the line, batch scripts, local restarts."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import patience

import zerorun
from zerorun.deepspeed.name_table import target_of
from zerorun.errors import LaunchError
from zerorun.launcher import chosen_hosts, cli, dump
from zerorun.launcher.agent import Agent
from zerorun.launcher.agent_commands import CARRIERS, CarrierOptions, carrier_environment
from zerorun.launcher.agent_line import Line, decode, encode
from zerorun.launcher.event_loop import Turns
from zerorun.launcher.hosts import Host
from zerorun.launcher.job import Job, _unfit
from zerorun.launcher.job_plan import (
    JobOptions,
    JobPlan,
    LaunchRequest,
    NodePlan,
    ProgramKind,
    Rendezvous,
    build_plan,
    exported,
    is_secret,
    render_json,
    render_text,
    shown,
    split_cores,
)
from zerorun.launcher.options import build_parser, parse_args
from zerorun.launcher.remote import RemoteNode
from zerorun.launcher.sbatch import batch_script
from zerorun.launcher.this_host import describe_host, interface_of, parse_cores, probe
from zerorun.watch.launch_environment import choose_interface

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMP_", "CUDA_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("n1 slots=4\nn2 slots=4\nn3 slots=2\n")
    return tmp_path


def plan(*argv: str, environment: dict[str, str] | None = None) -> JobPlan:
    """The plan for a command line, with a made-up rendezvous."""
    variables = environment or {}
    args = parse_args(build_parser(), [*argv, "train.py"])
    launcher, hosts = chosen_hosts.choose_hosts(args, variables)
    request = cli.make_request(args, launcher, hosts, variables)
    return build_plan(request, Rendezvous("10.0.0.1", 29500, {"n1": "eth0", "n2": "ib0"}))


# -- hosts and ranks ---------------------------------------------------------------------------------------------------


def test_a_hostfile_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "hosts").write_bytes(b"\xef\xbb\xbfn1 slots=2\r\n")
    assert [node.host for node in plan("-H", "hosts").nodes] == ["n1"]


def test_ranks_follow_the_hostfile(folder: Path) -> None:
    found = plan("--hostfile", "hosts", "--include", "n3@n2:1,3")
    assert {node.host: [worker.rank for worker in node.workers] for node in found.nodes} == {"n2": [0, 1], "n3": [2, 3]}
    env = found.workers[3].env
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
                "GROUP_WORLD_SIZE": "2", "NODE_RANK": "1", "CROSS_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}  # fmt: skip
    assert {name: env[name] for name in expected} == expected


def test_chosen_slots_are_chosen_devices(folder: Path) -> None:
    workers = plan("-H", "hosts", "-i", "n1:1,3@n2").workers
    assert [worker.env.get("CUDA_VISIBLE_DEVICES") for worker in workers] == ["1,3"] * 2 + [None] * 4


def test_devices_of_this_machine_keep_their_names(folder: Path) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,MIG-c"}
    assert plan("--include", "localhost:0,2", environment=visible).workers[1].env["CUDA_VISIBLE_DEVICES"] == "GPU-a,MIG-c"


def test_a_reserve_without_restarts_is_spoken_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "equal").write_text("n[1-3] slots=1\n")
    told = []
    for options in ([], ["--max-restarts=1"]):
        assert cli.main(["-H", "equal", "--spares=1", *options, "--dry-run", "train.py"]) == 0
        told.append("--spares 1 without --max-restarts" in capsys.readouterr().err)
    assert told == [True, False]


def test_slots_count_the_devices_that_the_user_has_chosen(folder: Path) -> None:
    def devices(*argv: str, told: str = "4,5,6,7") -> list[str | None]:
        found = plan(*argv, environment={"CUDA_VISIBLE_DEVICES": told})
        return [worker.env.get("CUDA_VISIBLE_DEVICES") for worker in found.workers]

    (folder / "own").write_text("localhost slots=4\n")
    assert devices("-H", "own", "-i", "localhost:1,2") == ["5,6"] * 2
    assert devices("-H", "own", "-i", "localhost:1", "--export=CUDA_VISIBLE_DEVICES=0,1,2,3") == ["1"]
    assert devices("-H", "hosts", "-i", "n1:1", "--export=CUDA_VISIBLE_DEVICES=6,7") == ["7"]
    assert devices("-H", "own", "-i", "localhost:1", told="") == [None]
    with pytest.raises(LaunchError, match=r"localhost: slot 2 has no device, as .*=4,5 .* slots 0 to 1\. R"):
        devices("-H", "own", "-i", "localhost:1,2", told="4,5")


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_slots_are_no_devices_where_workers_train_on_the_cpu(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_VISIBLE_DEVICES says nothing then, whoever has set it, and is left as it is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    (folder / "own").write_text("localhost slots=4\n")
    here, one = {"ZERORUN_DEVICE": device}, {"CUDA_VISIBLE_DEVICES": "0"}
    for argv, environment in (
        (["-H", "own", "-i", "localhost:1,2"], {**here, **one}),
        (["-H", "own", "-i", "localhost:1,2", "--export=CUDA_VISIBLE_DEVICES=0"], here),
        (["-H", "own", "-i", "localhost:1,2", f"--export=ZERORUN_DEVICE={device}"], one),
        (["-H", "hosts", "-i", "n1:1,2", "--export=CUDA_VISIBLE_DEVICES=0"], here),
        (["--nproc-per-node=2", "-i", "localhost:1,2"], {**here, **one}),
        (["--nproc-per-node=2", "-i", "localhost:3,4"], {**here, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}),
        (["-i", "localhost:1,2"], {**here, **one}),
        (["--nproc-per-node=2", "-i", "localhost:1,2", f"--export=ZERORUN_DEVICE={device}"], one),
        (["--nproc-per-node=cpu", "-i", "localhost:1,2", "--export=CUDA_VISIBLE_DEVICES=0"], {}),
    ):
        workers = plan(*argv, environment=environment).workers
        assert [worker.env.get("CUDA_VISIBLE_DEVICES") for worker in workers] == [None] * 2
    with pytest.raises(LaunchError, match="slot 2 has no device"):
        plan("-H", "own", "-i", "localhost:1,2", environment={"ZERORUN_DEVICE": "cuda", **one})


def test_sockets_use_the_interface_that_reaches_the_first_host(folder: Path) -> None:
    workers = plan("-H", "hosts", "--num-gpus=1").workers
    assert [worker.env.get("GLOO_SOCKET_IFNAME") for worker in workers] == ["eth0", "ib0", None]
    chosen = plan("-H", "hosts", "--num-gpus=1", environment={"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO"})
    assert "GLOO_SOCKET_IFNAME" not in chosen.workers[0].env and chosen.exports["GLOO_SOCKET_IFNAME"] == "lo"
    assert chosen.workers[0].env["NCCL_SOCKET_IFNAME"] == "eth0"


def test_interfaces_of_a_run_around_are_not_those_of_the_user(folder: Path) -> None:
    inside = dict(plan("--nproc-per-node=1").workers[0].env)
    choose_interface(inside, "lo")  # as init_distributed() does without a launcher
    assert inside["GLOO_SOCKET_IFNAME"] == inside["NCCL_SOCKET_IFNAME"] == "lo"
    for environment, kept in ((inside, {}), ({**inside, "NCCL_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0"})):
        found = plan("-H", "hosts", "--num-gpus=1", environment=environment)
        exported = {name: value for name, value in found.exports.items() if "INTERFACE" in name or "IFNAME" in name}
        assert exported == kept
        assert found.workers[0].env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert found.workers[0].env.get("NCCL_SOCKET_IFNAME", "ib0") == ("ib0" if kept else "eth0")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hostfile", "gone"], "--hostfile gone: No such file"),
        (["--launcher", "ssh"], "no hosts are given"),
        (["--nnodes", "2"], "--num-nodes 2: no hosts are given"),
        (["-H", "hosts", "--nnodes", "4"], "there are only 3 hosts"),
        (["-H", "hosts", "--num-gpus", "3"], "host 'n3' has only 2 slots"),
        (["-H", "hosts", "--launcher", "local"], "reaches no host"),
        (["-H", "hosts", "--nproc-per-node", "gpu"], "--nproc-per-node gpu: how many .* Remedy: --nproc-per-node N"),
        (["-H", "hosts", "--nproc-per-node", "cpu"], "--nproc-per-node cpu: how many .* Remedy: --nproc-per-node N"),
        (["--min-nodes", "3"], "--min-nodes 3: the job has 1 host. Remedy: a smaller number, or more hosts"),
        (["--nnodes=2", "--node-rank=0", "--min-nodes=3"], "--min-nodes 3: the job has 2 hosts"),
        (["-H", "hosts", "--min-nodes", "4"], "--min-nodes 4: the job has 3 hosts"),
        (["-H", "hosts", "--nnodes", "2", "--min-nodes", "3"], "--min-nodes 3: the job has 2 hosts"),
        (
            ["-H", "hosts", "-e", "n3", "--spares=1", "--min-nodes=2"],
            "--min-nodes 2: the job has 1 host besides 1 in reserve",
        ),
        (["-H", "hosts", "--export", "NOT_THERE"], "--export NOT_THERE: there is no such variable"),
        (["--launcher", "slurm"], "this is no SLURM allocation"),
    ],
)
def test_refusals(folder: Path, argv: list[str], words: str) -> None:
    with pytest.raises(LaunchError, match=words.replace("?", r"\?")):
        plan(*argv)


def test_slurm_s_nodes_are_found(folder: Path) -> None:
    assert [len(node.workers) for node in plan(environment=SLURM).nodes] == [2, 2, 2]
    assert [len(node.workers) for node in plan("--nproc-per-node=3", environment=SLURM).nodes] == [3, 3, 3]
    gpus = {**SLURM, "SLURM_GPUS_ON_NODE": "4"}
    assert [len(node.workers) for node in plan("--exclude=n2", environment=gpus).nodes] == [4, 4]


def test_a_task_of_srun_has_its_part_already(folder: Path) -> None:
    task = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    assert [node.host for node in plan(environment=task).nodes] == ["localhost"]
    assert [node.host for node in plan("--launcher=local", environment=SLURM).nodes] == ["localhost"]


def test_standalone_is_this_machine_also_in_an_allocation(folder: Path) -> None:
    assert [node.host for node in plan("--standalone", environment=SLURM).nodes] == ["localhost"]


def test_workers_for_each_gpu_or_core_are_not_another_number(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {**SLURM, "SLURM_GPUS_ON_NODE": "4"}
    assert [len(node.workers) for node in plan("--nproc-per-node=gpu", environment=gpus).nodes] == [4, 4, 4]
    for word, environment in (("gpu", SLURM), ("cpu", gpus)):
        with pytest.raises(LaunchError, match=f"--nproc-per-node {word}: how many "):
            plan(f"--nproc-per-node={word}", environment=environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert len(plan("--nproc-per-node=cpu", "-e", "localhost:0", environment={"CUDA_VISIBLE_DEVICES": "0"}).workers) == 2
    assert cli.main(["--sbatch", "--dry-run", "--nproc-per-node=cpu", "train.py"]) == 2  # before it waits in the queue
    assert cli.main(["--sbatch", "--dry-run", "--nproc-per-node=gpu", "train.py"]) == 0


# -- environment -------------------------------------------------------------------------------------------------------


def test_what_goes_to_other_hosts() -> None:
    environment = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "PYTHONPATH": "/p", "PATH": "/bin", "HOME": "/h",
                   "AWS_KEY": "s", "CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "x",
                   "LD_LIBRARY_PATH": "/l"}  # fmt: skip
    assert sorted(exported(environment)) == ["LD_LIBRARY_PATH", "NCCL_DEBUG", "PYTHONPATH", "WANDB_API_KEY"]


def test_an_agent_in_slurm_has_all_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun takes what the job was asked for, such as one GPU for each of eight tasks, for options of the agent's step."""
    of_tasks = {"SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE"}
    for name in of_tasks:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with carrier_environment(CARRIERS["slurm"](Host("n1"), CarrierOptions("python"))) as environment:
        assert environment is not None and environment["SLURM_JOB_ID"] == "7"
        assert not of_tasks.intersection(environment)


def test_env_files_and_exports(folder: Path) -> None:
    (folder / "home").mkdir()
    (folder / "home" / ".deepspeed_env").write_text("ONE=1\nTWO=2\n")
    (folder / ".deepspeed_env").write_text("# comment\n\nTWO=\"a 'b'\"\n")
    (folder / ".zerorun_env").write_text("export THREE=3=3\n")
    found = cli.read_exports([("FOUR", None), ("ONE", "over")], {"FOUR": "4"}, files=True)
    assert found == {"ONE": "over", "TWO": "a 'b'", "THREE": "3=3", "FOUR": "4"}
    (folder / ".zerorun_env").write_bytes(b"\xef\xbb\xbfTHREE=3\n")  # as some editors on Windows begin files
    assert cli.read_exports([], {}, files=True)["THREE"] == "3"
    (folder / ".zerorun_env").write_bytes(b"NAME=caf\xe9\n")
    with pytest.raises(LaunchError, match=r"\.zerorun_env: it is not UTF-8 text\. Remedy: "):
        cli.read_exports([], {}, files=True)
    (folder / ".zerorun_env").write_text("OK=1\nno equals sign\n")
    with pytest.raises(LaunchError, match=r"\.zerorun_env, line 2: expected NAME=VALUE"):
        cli.read_exports([], {}, files=True)


def test_threads_of_a_file_of_variables_stay(folder: Path) -> None:
    (folder / ".zerorun_env").write_text("OMP_NUM_THREADS=7\n")
    for environment in ({}, {"OMP_NUM_THREADS": "5"}):
        found = plan("-H", "hosts", "--bind-core-list=0-7", environment=environment)
        assert {worker.env["OMP_NUM_THREADS"] for worker in found.workers} == {found.exports["OMP_NUM_THREADS"]} == {"7"}


def test_the_plan_shows_no_secret(folder: Path) -> None:
    found = plan("-H", "hosts", environment={"WANDB_API_KEY": "abc123", "HF_TOKEN": "xyz789", "NCCL_DEBUG": "INFO"})
    text = render_text(found, {"n1": ["ssh", "n1"]})
    assert "abc123" not in text and "xyz789" not in text and "NCCL_DEBUG=INFO" in text
    assert is_secret("my_password") and not is_secret("NCCL_DEBUG")


@pytest.mark.parametrize("name", ("SLACK_AUTH", "DB_PASS", "MY_CREDS", "GIT_COOKIE", "SENTRY_DSN", "PG_PWD", "AZURE_SIG"))
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name) and shown("value", name) == "(hidden)"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("postgres://ann:hunter2@db:5432/runs", "postgres://(hidden)@db:5432/runs"),
        ("https://ghp_token@host/x?a=1", "https://(hidden)@host/x?a=1"),
        ("redis://:p@ss@host,redis://b:c@host2", "redis://(hidden)@host,redis://(hidden)@host2"),
        ("https://s3/x?X-Signature=abc&part=2&token=t#top", "https://s3/x?X-Signature=(hidden)&part=2&token=(hidden)#top"),
        ("https://host/path@2/x", "https://host/path@2/x"),
        ("ann@host", "ann@host"),
        ("eth0", "eth0"),
    ],
)
def test_urls_are_shown_without_passwords(text: str, printed: str) -> None:
    assert shown(text, "DB_URL") == printed


def test_no_plan_shows_the_password_of_a_url(folder: Path) -> None:
    url = "postgres://ann:hunter2@db/runs"
    found = plan("-H", "hosts", "--export", f"DB_URL={url}")
    worker = dataclasses.replace(found.workers[0], argv=("train.py", "--db", url))
    request = JobPlan("n1", 1, (NodePlan("n1", 0, (worker,)),), found.exports)
    for text in (render_text(request, {"n1": ["ssh", "n1"]}), render_json(request, {"n1": ["ssh", "n1"]})):
        assert "hunter2" not in text and text.count("postgres://(hidden)@db/runs") == 2


# -- cores -------------------------------------------------------------------------------------------------------------


def test_cores_are_split_in_neighbours(folder: Path) -> None:
    assert split_cores([0, 2, 4, 1, 3], 2) == [(0, 2), (4, 1)]
    assert split_cores([0], 2) == [(), ()]
    assert parse_cores("0-3,8") == [0, 1, 2, 3, 8]
    args = parse_args(build_parser(), ["--nproc=2", "--bind-cores", "train.py"])
    request = cli.make_request(args, "local", [Host("localhost", (0, 1))], {})
    bound = build_plan(request, Rendezvous("127.0.0.1", 1), cores={"localhost": [0, 1, 2, 3]})
    assert [(worker.cores, worker.env["OMP_NUM_THREADS"]) for worker in bound.workers] == [((0, 1), "2"), ((2, 3), "2")]
    chosen = plan("-H", "hosts", "-i", "n3", "--bind_core_list", "4-7")
    assert [worker.cores for worker in chosen.workers] == [(4, 5), (6, 7)]


def test_more_workers_than_cores_to_bind_to_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    said = "localhost: --bind-cores: 3 workers, and only 2 cores to bind them to. Remedy: "
    for more in ((), ("--dry-run",)):
        assert cli.main(["--nproc=3", "--bind-cores", *more, "train.py"]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["-H", "hosts", "--bind-core-list=0-2", "--dry-run", "train.py"]) == 2
    assert "n1: --bind-cores: 4 workers, and only 3 cores" in capsys.readouterr().err
    guest = Remembered("node 1", facts={"version": zerorun.__version__, "cores": [0], "slots": 2})
    request = cli.make_request(parse_args(build_parser(), ["--bind-cores", "train.py"]), "local", [Host("a", (0,))], {})
    assert [problem[:29] for problem in _unfit([guest], request)] == ["node 1: --bind-cores: 2 worke"]  # type: ignore[list-item]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_are_bound(folder: Path) -> None:
    (folder / "train.py").write_text("import os; print(os.environ['RANK'], len(os.sched_getaffinity(0)))\n")
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc=2", "--bind-cores", "train.py"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30 * patience()).stdout
    share = len(os.sched_getaffinity(0)) // 2
    assert sorted(line.split()[-1] for line in out.splitlines()) == [str(share)] * 2


# -- carriers and the line ---------------------------------------------------------------------------------------------


def test_host_names_and_paths_stay_words() -> None:
    options = CarrierOptions("/opt/my env/bin/python", pythonpath="/a b:$HOME", extra=("-o", "X=y z"))
    command = list(CARRIERS["ssh"](Host("n1", user="alice", port=2222), options))
    assert command[-3:-1] == ["--", "alice@n1"] and command[command.index("-p") + 1] == "2222"
    agent = "'PYTHONPATH=/a b:$HOME' '/opt/my env/bin/python' -m zerorun.launcher.agent"
    assert command[-1] == f"exec env PYTHONSAFEPATH=1 {agent}"


def test_each_mpirun_has_temporary_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI makes a folder there that is named after host and user: the second of two that make it at once fails."""
    told = tmp_path / "told"
    program = tmp_path / "mpirun"
    program.write_text(f'#!/bin/sh\necho "$TMPDIR" >> {told}\nmkdir "$TMPDIR/ompi.here.0" && exec cat\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    selector = selectors.DefaultSelector()
    nodes = [RemoteNode(name, selector, None, lambda _: None) for name in ("a", "b")]  # type: ignore[arg-type]
    for node in nodes:
        node.open(["mpirun"])
    _, silent = dump.gather({"a": ["mpirun"], "b": ["mpirun"]}, None)
    assert silent == dict.fromkeys("ab", "mpirun ended with status 0 and said nothing")
    deadline = time.monotonic() + 10 * patience()
    while not told.exists() or len(told.read_text().splitlines()) < 4:
        assert time.monotonic() < deadline
    folders = [Path(line) for line in told.read_text().splitlines()]
    assert len(set(folders)) == 4 and tmp_path not in folders and sum(folder.exists() for folder in folders) == 2
    for node in nodes:
        node.close()
    assert not any(folder.exists() for folder in folders)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        nodes[0].open(["mpirun"])
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_line_carries_anything_and_skips_what_is_no_message() -> None:
    (r1, w1), (r2, w2) = os.pipe(), os.pipe()
    ours, theirs = Line(r1, w2), Line(r2, w1)
    theirs.send({"is": "nothing"})
    os.write(w1, b"Welcome!\n{broken\n[1]\n")
    data = bytes(range(256)) * 1000
    theirs.send({"is": "output", "data": encode(data)})
    received: list[dict[str, object]] = []
    while len(received) < 2:
        theirs.flush()
        received += ours.receive()
    assert decode(str(received[1]["data"])) == data
    assert ours.stray == ["Welcome!", "{broken", "[1]"]
    theirs.close()
    ours.receive()
    assert ours.ended
    ours.send({"do": "ping"})  # to nobody, without an error
    ours.close()


def test_news_overtakes_output() -> None:
    (r1, w1), (r2, w2) = os.pipe(), os.pipe()
    ours, theirs = Line(r1, w2), Line(r2, w1)
    for index in range(50):
        theirs.send({"output": index, "data": "x" * 10_000}, later=True)
    theirs.send({"is": "end"})
    received: list[dict[str, object]] = []
    while theirs.waiting or len(received) < 51:
        received += ours.receive()
        theirs.flush()
    assert received.index({"is": "end"}) < 20
    assert [message["output"] for message in received if "output" in message] == list(range(50))
    ours.close()
    theirs.close()


def test_a_host_tells_what_it_is() -> None:
    facts = json.loads(json.dumps(describe_host({"SSH_CONNECTION": "10.0.0.9 5000 10.0.0.5 22"})))
    assert facts["address"] == "10.0.0.5" and facts["launcher_address"] == "10.0.0.9"
    assert sorted(facts["cores"]) == sorted(os.sched_getaffinity(0))
    assert interface_of("127.0.0.1") is None
    with pytest.raises(LaunchError, match=r"cannot reach the first host at 127\.0\.0\.1 port 1: Connection refused"):
        probe("127.0.0.1", 1)


def test_a_host_that_cannot_do_what_it_is_told_says_why(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    host = Agent(Line(ours.detach()))
    job: dict[str, object] = {"do": "job", "cwd": str(tmp_path / "nowhere"), "env": {}, "grace": 1.0}
    job |= {"script": None, "log_dir": None}
    theirs.sendall(json.dumps(job).encode() + b"\n")
    host._read()
    theirs.settimeout(10)
    answer = json.loads(theirs.recv(1 << 16))
    assert answer["is"] == "trouble"
    assert f"cannot change to {job['cwd']!r}: No such file or directory. Remedy: " in answer["text"]
    host._line.close()
    theirs.close()


def test_what_has_frozen_with_this_process_is_not_silent() -> None:
    """As while a whole job is stopped, and goes on. Turns that all take long are turns, too."""
    turns = Turns()
    assert [turns.held_up_s(now) for now in (5.0, 6.0, 8.0, 3600.0, 3603.0)] == [0.0, 0.0, 0.0, 3590.0, 1.0]
    ours, theirs = socket.socketpair()
    node = RemoteNode("a", selectors.DefaultSelector(), None, lambda _: None)  # type: ignore[arg-type]
    node.attach(Line(ours.detach()))
    node.facts, begun = {"hostname": "a"}, time.monotonic()
    for later in (0.0, 1.0, 3600.0, 3604.0):
        node.tick(begun + later)
        assert node.lost is None
    node.tick(begun + 3606.0)
    node.tick(begun + 3607.5)
    assert node.lost is not None and "nothing was heard from it for 6 s" in node.lost
    theirs.close()


# -- batch jobs and restarts -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Remembered:
    """A host as far as another round has to know it."""

    name: str
    lost: str | None = None
    trouble: str | None = None
    facts: dict[str, object] = dataclasses.field(default_factory=lambda: {"version": zerorun.__version__, "cores": [0]})


@pytest.mark.parametrize(("lost", "back"), [("n1", ["n1"]), ("n2", ["n2"]), ("n1", []), ("n3", ["n3"])])
def test_hosts_keep_their_order_over_a_restart(lost: str, back: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that which comes back: ranks, and the host where they meet, follow the hostfile."""
    hosts = tuple(Host(name, (0,)) for name in ("n1", "n2", "n3"))
    request = LaunchRequest("train.py", (), ProgramKind.SCRIPT, hosts, sys.executable)
    job = Job(request, JobOptions(max_restarts=1, min_nodes=2))
    said: list[str] = []
    monkeypatch.setattr(job, "say", said.append)
    came = {host.name: Remembered(host.name, None if host.name in back else "gone") for host in hosts}
    monkeypatch.setattr(job, "_open", lambda missing, seconds: [came[host.name] for host in missing])
    job._nodes = [Remembered(host.name, "gone" if host.name == lost else None) for host in hosts]  # type: ignore[misc]
    monkeypatch.setattr(job._meeting, "arrange", list)
    assert job._regroup(1) == job._nodes
    assert [node.name for node in job._nodes] == [host.name for host in hosts if host.name != lost or back]
    assert said == ["[zerorun] restart 1 of 1"]


def job_of_three(monkeypatch: pytest.MonkeyPatch, said: list[str], *back: Remembered) -> Job:
    """A job of which n3 is lost, and ``back`` are there again when they are looked for."""
    hosts = tuple(Host(name, (0,)) for name in ("n1", "n2", "n3"))
    request = LaunchRequest("train.py", (), ProgramKind.SCRIPT, hosts, sys.executable)
    job = Job(request, JobOptions(max_restarts=1, min_nodes=1))
    monkeypatch.setattr(job, "say", said.append)
    found = {node.name: node for node in back}
    gone = [found.get(name, Remembered(name, "gone")) for name in ("n1", "n2", "n3")]
    monkeypatch.setattr(
        job, "_open", lambda missing, seconds: [node for node in gone if node.name in [host.name for host in missing]]
    )
    job._nodes = [Remembered("n1"), Remembered("n2"), Remembered("n3", "gone")]  # type: ignore[list-item]
    return job


def test_a_host_that_is_back_and_cannot_take_part_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    job = job_of_three(monkeypatch, said, Remembered("n3", facts={"version": "0.0", "cores": [0]}))
    monkeypatch.setattr(job._meeting, "arrange", list)
    assert job._regroup(1) == job._nodes and [node.name for node in job._nodes] == ["n1", "n2"]
    assert said[0].startswith("[zerorun] hosts that are back, and cannot take part:\n  n3: has zerorun 0.0, this launcher")
    assert said[1:] == ["[zerorun] restart 1 of 1"]


def test_a_host_that_is_lost_while_others_meet_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    job = job_of_three(monkeypatch, said)

    def arrange(nodes: list[Remembered]) -> list[Remembered]:
        if len(nodes) == 2:
            nodes[1].lost = "nothing was heard from it"
            raise LaunchError("n2: nothing was heard from it")
        return list(nodes)

    monkeypatch.setattr(job._meeting, "arrange", arrange)
    assert job._regroup(1) == job._nodes and [node.name for node in job._nodes] == ["n1"]
    assert said == ["[zerorun] restart 1 of 1"]
    job = job_of_three(monkeypatch, said)
    monkeypatch.setattr(job._meeting, "arrange", refuse)
    with pytest.raises(LaunchError, match="no way"):
        job._regroup(1)


def refuse(nodes: list[Remembered]) -> None:
    raise LaunchError("there is no way between the hosts")


def test_batch_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--sbatch", "--nnodes", "4", "--sbatch-args", "--time=1:00 -p gpu", "--dry-run", "train.py", "a b", "--sbatch"]
    assert cli.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=4" in lines and "#SBATCH --time=1:00 -p gpu" in lines
    assert lines[-1].startswith(f"exec {sys.executable} -m zerorun.launcher.cli ")
    assert lines[-1].endswith(" --nnodes=4 train.py 'a b' --sbatch")
    assert cli.main(["--sbatch", "--nnodes=4", "--spares=2", "--max-restarts=1", "--dry-run", "train.py"]) == 0
    assert "#SBATCH --nodes=6" in capsys.readouterr().out  # as many as this job takes from its allocation
    assert batch_script(["x", "$HOME"], name="n", nodes=1, options=[]).endswith("exec x '$HOME'\n")


@pytest.fixture
def sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM that keeps what it is given in this folder."""
    kept = folder / "slurm"
    kept.mkdir()
    program = kept / "sbatch"
    program.write_text(f'#!/bin/sh\ncat "$@" > {kept}/script\nenv > {kept}/env\necho "$@" > {kept}/args\necho Submitted\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kept}:{os.environ['PATH']}")
    monkeypatch.setenv("API_KEY", "k3y")
    return kept


def test_values_of_variables_are_in_no_batch_script(folder: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sbatch", "--export", "HF_TOKEN=s3cret=1", "--export=API_KEY"]
    assert cli.main([*options, "train.py"]) == 0
    written = folder / "train.sbatch"
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    for text in (written.read_text(), (sbatch / "script").read_text()):
        assert "s3cret" not in text and "k3y" not in text and "--export=HF_TOKEN --export=API_KEY train.py" in text
    assert "HF_TOKEN=s3cret=1\n" in (sbatch / "env").read_text() and "s3cret" not in (sbatch / "args").read_text()
    assert cli.main([*options, "--dry-run", "train.py"]) == 0
    assert "s3cret" not in capsys.readouterr().out


def test_a_script_of_the_user_is_not_overwritten(folder: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, thesis = folder / "train.sbatch", folder / "thesis.txt"
    assert [cli.main(["--sbatch", "train.py"]), cli.main(["--sbatch", "train.py", "again"])] == [0, 0]
    assert "train.py again" in written.read_text()  # its own it replaces
    written.write_text("#!/bin/bash\n# mine\n")
    assert cli.main(["--sbatch", "train.py"]) == 2
    assert written.read_text() == "#!/bin/bash\n# mine\n"
    written.unlink()
    thesis.write_text("chapter 1")
    written.symlink_to(thesis)
    assert cli.main(["--sbatch", "train.py"]) == 2 and thesis.read_text() == "chapter 1" and written.is_symlink()
    assert capsys.readouterr().err.count("train.sbatch exists and was not written by zerorun. Remedy") == 2


def test_a_name_adds_no_command_to_a_batch_script(folder: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\ntouch injected\n#$(id).py"
    (folder / name).write_text("")
    assert cli.main(["--sbatch", name]) == 0
    lines = (sbatch / "script").read_text().splitlines()
    assert "touch injected" not in lines[: [line.startswith("exec ") for line in lines].index(True)]
    assert "#SBATCH --job-name=a_touch_injected____id_" in lines
    assert cli.main(["--sbatch", "--sbatch-args", "--comment='a\ntouch injected'", "train.py"]) == 2
    assert "--sbatch-args: a line feed or another control character" in capsys.readouterr().err


def test_restart_on_one_host(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import os, sys\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(5 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
    )
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=3", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30 * patience())
    assert (done.returncode, done.stdout) == (0, "0\n1\n")
    assert "exit code 5" in done.stderr and "[zerorun] restart 1 of 3\n" in done.stderr


def test_workers_that_ask_for_another_run(folder: Path) -> None:
    (folder / "train.py").write_text("import os, sys, time\ntime.sleep(0.3 * int(os.environ['RANK']))\nsys.exit(75)\n")
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc=2", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30 * patience())
    assert done.returncode == 75
    assert done.stderr == "[zerorun] the workers ask to be started again (exit code 75)\n"


def test_a_batch_job_on_its_first_node_alone_goes_back_into_the_queue_too(folder: Path) -> None:
    (folder / "train.py").write_text("raise SystemExit(75)\n")
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {folder}/told\n')
    (folder / "scontrol").chmod(0o755)
    environment = {**os.environ, **SLURM, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--standalone", "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30 * patience())
    assert done.returncode == 75, done.stderr
    assert (folder / "told").read_text() == "requeue 7\n"


@pytest.mark.parametrize("batch", (True, False))
def test_a_batch_job_goes_back_into_the_queue_instead_of_a_restart(folder: Path, batch: bool) -> None:
    """In a shell of salloc, for which there is no queue to go back to, there is a restart."""
    programs = folder / "programs"
    programs.mkdir()
    for name, does in (("srun", 'while [ "$1" != env ]; do shift; done; exec "$@"'), ("scontrol", 'echo "$@" > asked')):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(
        "import os, sys\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(75 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "1"}
    environment = {**os.environ, **job, "PATH": f"{programs}:{os.environ['PATH']}"}
    if batch:
        environment["SLURMD_NODENAME"] = "localhost"
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=3", "train.py"]
    how = {"capture_output": True, "text": True, "check": False, "timeout": 60 * patience()}
    done = subprocess.run(command, env=environment, **how)
    if batch:
        assert (done.returncode, done.stdout) == (75, "0\n"), done.stderr
        assert "no restart: this batch job goes back into the queue" in done.stderr
        assert (folder / "asked").read_text() == "requeue 7\n"
    else:
        assert (done.returncode, done.stdout) == (0, "0\n1\n"), done.stderr
        assert not (folder / "asked").exists()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--tee=0",), ("out 0\n", "err\n")),
        (("--tee=1",), ("out 0\n", "err\n")),
        (("--redirects=3",), ("", "")),
        (("-r", "3", "-t", "0:0,1:1"), ("out 0\n", "")),
        (("-r1",), ("", "err\n")),
    ],
)
def test_what_is_shown(folder: Path, options: tuple[str, ...], shown: tuple[str, str]) -> None:
    """As torchrun: what --redirects names goes to files only, unless --tee names it, too."""
    (folder / "train.py").write_text("import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    files = ["--local-ranks-filter=0", "--log-dir=logs"]
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc=2", *files, *options, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30 * patience())
    assert (done.stdout, done.stderr) == shown
    assert (folder / "logs" / "rank1.stdout.log").read_text() == "out 1\n"


@pytest.mark.parametrize("options", [("--nnodes=1", "--node-rank=0"), ("--node-rank=0", "--spares=0")])
def test_one_node_is_this_machine(folder: Path, options: tuple[str, ...]) -> None:
    (folder / "train.py").write_text("import os; print(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))\n")
    command = [sys.executable, "-m", "zerorun.launcher.cli", *options, "train.py"]
    environment = {**os.environ, **SLURM}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30 * patience())
    assert (done.returncode, done.stdout) == (0, "0 1 127.0.0.1\n"), done.stderr


@pytest.mark.parametrize(
    ("options", "slots", "count", "address"),
    [
        (["--node_rank=1"], (0, 1, 2, 3), 3, "n1"),
        (["--node_rank=1", "--num_gpus=2"], (0, 1), 3, "n1"),
        (["--node_rank=1", "--include=n2:1,3@n3"], (0, 1), 2, "n2"),
        (["--node_rank=0", "--include=n2:1,3@n3"], (1, 3), 2, "n2"),
        (["--node_rank=1", "--exclude=n1", "--master_addr=10.0.0.9"], (0, 1), 2, "10.0.0.9"),
        (["--node_rank=0", "--num_nodes=2", "--launcher=pdsh"], (0, 1, 2, 3), 2, "n1"),
    ],
)
def test_a_hostfile_tells_hosts_that_join_by_themselves(
    folder: Path, options: list[str], slots: tuple[int, ...], count: int, address: str
) -> None:
    """As accelerate starts DeepSpeed with the launcher "nossh": its hosts are not reached, but they have numbers."""
    args = chosen_hosts.by_hand_with_hostfile(
        parse_args(build_parser(), ["--hostfile=hosts", "--no_ssh", *options, "train.py"])
    )
    assert (args.num_nodes, args.master_addr) == (count, address) and chosen_hosts.by_hand(args)
    assert chosen_hosts.choose_hosts(args, {**os.environ, **SLURM}) == ("local", [Host("localhost", slots)])


def test_a_host_that_the_hostfile_lacks_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--hostfile=hosts", "--no-ssh", "--node-rank=3", "train.py"]) == 2
    assert "--node-rank 3: --hostfile hosts gives 3 hosts, counted from 0. Remedy: the number" in capsys.readouterr().err


def test_a_hostfile_need_not_say_how_many_slots(folder: Path) -> None:
    (folder / "hosts").write_text("n1\nn2 slots=3\n")
    args = chosen_hosts.by_hand_with_hostfile(
        parse_args(build_parser(), ["--hostfile=hosts", "--no_ssh", "--node-rank=0", "--nproc=5", "train.py"])
    )
    assert chosen_hosts.choose_hosts(args, os.environ)[1] == [Host("localhost", (0, 1, 2, 3, 4))]


def test_the_deepspeed_mode_reaches_all_workers(folder: Path) -> None:
    """As a variable that is exported, together with others."""
    chosen = plan("-H", "hosts", "--as-deepspeed", "--export=LAKE=deep")
    assert chosen.exports["ZERORUN_AS_DEEPSPEED"] == "1" and chosen.exports["LAKE"] == "deep"
    assert "ZERORUN_AS_DEEPSPEED" not in plan("-H", "hosts").exports


OWN_OPTION = "parser.add_argument('--local_rank', type=int, default=-1)"


@pytest.mark.parametrize(
    ("text", "options", "variables", "given"),
    [
        (OWN_OPTION, ("--as-deepspeed",), {}, True),
        (OWN_OPTION, (), {"ZERORUN_AS_DEEPSPEED": "1"}, True),
        (OWN_OPTION, (), {"ZERORUN_AS_DEEPSPEED": "0"}, False),
        (OWN_OPTION, (), {"ZERORUN_AS_DEEPSPEED": "False"}, False),
        (OWN_OPTION, (), {}, False),
        (OWN_OPTION, ("--as-deepspeed", "--no_local_rank"), {}, False),
        ("print(args.local_rank, '--local_ranks')", ("--as-deepspeed",), {}, False),  # it would not know the option
        ("", ("--as-deepspeed", "--local-rank-arg"), {}, True),
        ("", ("--local_rank_arg",), {}, True),
    ],
)
def test_who_is_given_the_local_rank(
    folder: Path, text: str, options: tuple[str, ...], variables: dict[str, str], given: bool
) -> None:
    (folder / "train.py").write_text(text)
    argv = plan("--nproc=2", *options, environment=variables).workers[1].argv
    assert argv[2:] == (("train.py", "--local_rank=1") if given else ("train.py",))


@pytest.mark.parametrize(("options", "given"), [((), ["--local_rank=0"]), (("--no_local_rank",), [])])
def test_the_deepspeed_command_gives_the_local_rank_to_all(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], given: list[str]
) -> None:
    main = target_of("deepspeed.launcher.runner", "main")
    main(["--num_gpus=1", "--dry-run=json", *options, "train.py", "7"])
    worker = json.loads(capsys.readouterr().out)["nodes"][0]["workers"][0]
    assert worker["argv"][2:] == ["train.py", *given, "7"]


def test_this_host_is_reached_as_others_are_if_that_is_wanted(folder: Path) -> None:
    hosts = [Host(socket.gethostname(), (0, 1))]
    for options, local in (((), (hosts[0].name,)), (("--force-multi",), ())):
        args = parse_args(build_parser(), [*options, "train.py"])
        assert cli.make_request(args, "ssh", hosts, {}).local_names == local
