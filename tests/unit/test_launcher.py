"""The launcher's plan, command line and report. No process is started here."""

from __future__ import annotations

import ast
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import zerorun
from zerorun.errors import LaunchError
from zerorun.launcher import chosen_hosts, cli, failures, foreign_options, node, this_host, worker_output
from zerorun.launcher.hosts import Host
from zerorun.launcher.job_plan import (
    JobPlan,
    LaunchRequest,
    ProgramKind,
    Rendezvous,
    WorkerCommand,
    build_plan,
    exported,
    full_environment,
    render_text,
)
from zerorun.launcher.options import build_parser, parse_args
from zerorun.launcher.run_outcome import Round

CONFIGURATION = str(Path(__file__).parents[2] / "examples/configs/zero3.json")
HOSTILE = ["a b", "it's", 'say "x"', "$HOME", "`id`", "two\nlines", "", "*", "\\", "--", "-m", "--nproc", "ключ"]


def request_for(**changes: object) -> LaunchRequest:
    values: dict[str, object] = {
        "target": "train.py",
        "target_args": (),
        "kind": ProgramKind.SCRIPT,
        "hosts": (Host("localhost", (0, 1)),),
        "python": "/usr/bin/python3",
        "omp_threads": "3",
        **changes,
    }
    return LaunchRequest(**values)  # type: ignore[arg-type]


def plan_for(**changes: object) -> JobPlan:
    return build_plan(request_for(**changes), Rendezvous("127.0.0.1", 1234))


def parse(*argv: str) -> object:
    return parse_args(build_parser(), argv)


def test_verify_is_a_module_of_ours_unless_there_is_such_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--nproc=2", "verify", "task:make", "--config", "ds.json")
    args: Any = parse(*words)
    assert (args.module, args.target, args.target_args) == (True, "zerorun.verify", ["task:make", "--config", "ds.json"])
    for option in ("-m", "--no-python"):  # a module or program of the user's
        args = parse(option, *words)
        assert (args.module, args.no_python, args.target) == (option == "-m", option != "-m", "verify")
    (tmp_path / "verify").touch()
    args = parse(*words)
    assert (args.module, args.target) == (False, "verify")


@pytest.mark.parametrize(
    ("words", "code", "lines"), [("verify", 1, 0), ("verify", 2, 0), ("verify", 3, 1), ("train.py", 1, 1)]
)
def test_a_verdict_is_no_crash(words: str, code: int, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    args: Any = parse("--nproc=1", words, "task:make")
    plan = build_plan(cli.make_request(args, "local", [Host("localhost", (0,))], {}), Rendezvous("127.0.0.1", 1234))
    ended = failures.WorkerEnd(0, code, 1.0, ("zerorun verify: NOT EQUAL",), asked_to_stop=False)
    status, told = Round(plan, 0.0, {0: ended}, [0]).conclude({})
    assert (status, len(told)) == (code, lines)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").write_text("raise SystemExit('never run')\n")
    return "train.py"


# The plan


def test_workers_get_torch_and_deepspeed_variables() -> None:
    plan = plan_for()
    assert [worker.rank for worker in plan.workers] == [0, 1]
    assert plan.workers[1].env == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
    }


@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({}, ("/usr/bin/python3", "-u", "train.py")),
        ({"kind": ProgramKind.MODULE, "target": "pkg.train"}, ("/usr/bin/python3", "-u", "-m", "pkg.train")),
        ({"kind": ProgramKind.PROGRAM, "target": "./run.sh"}, ("./run.sh",)),
    ],
)
def test_arguments_reach_exec_unchanged(changes: dict[str, object], head: tuple[str, ...]) -> None:
    plan = plan_for(target_args=tuple(HOSTILE), **changes)
    assert all(worker.argv == (*head, *HOSTILE) for worker in plan.workers)


def test_local_rank_argument_comes_first() -> None:
    plan = plan_for(target_args=("sub", "--x"), pass_local_rank=True)
    assert plan.workers[1].argv[2:] == ("train.py", "--local_rank=1", "sub", "--x")


def test_a_torchrun_around_us_leaves_nothing_behind() -> None:
    worker = plan_for().workers[0]
    base = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7", "HOME": "/h", "PYTHONPATH": "/mine"}
    environment = full_environment(worker, base)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
    assert (environment["RANK"], environment["HOME"], environment["PYTHONPATH"]) == ("0", "/h", "/mine")


def test_a_job_that_a_rank_starts_does_not_take_the_copies_of_the_rank() -> None:
    assert "ZERORUN_KEEPER" not in full_environment(plan_for().workers[0], {"ZERORUN_KEEPER": "/dev/shm/outer"})
    assert exported({"ZERORUN_KEEPER": "/dev/shm/outer", "ZERORUN_DEVICE": "cpu"}) == {"ZERORUN_DEVICE": "cpu"}


def test_terminal_is_made_known_only_when_there_is_one() -> None:
    assert "ZERORUN_TTY" not in plan_for().workers[0].env
    variables = plan_for(terminal_columns=99).workers[0].env
    assert (variables["ZERORUN_TTY"], variables["COLUMNS"]) == ("1", "99")


def test_printed_command_means_the_same_to_a_shell() -> None:
    plan = plan_for(target_args=tuple(HOSTILE), hosts=(Host("localhost", (0,)),))
    text = render_text(plan)
    command = text[text.index("  /usr/bin/python3") :]
    assert shlex.split(command) == list(plan.workers[0].argv)


# The command line


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node", "--nproc", "--num-gpus", "--num_gpus"])
@pytest.mark.parametrize("joined", [True, False])
def test_spellings_of_the_worker_count(script: str, spelling: str, joined: bool) -> None:
    option = [f"{spelling}=4"] if joined else [spelling, "4"]
    args = parse(*option, script, "--nproc", "9")
    assert args.nproc_per_node == 4  # type: ignore[attr-defined]
    assert args.target_args == ["--nproc", "9"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("before", [[], ["--nproc", "2"], ["--"], ["--master_port", "1", "--"]])
def test_script_arguments_are_not_read_by_us(script: str, before: list[str]) -> None:
    args = parse(*before, script, *HOSTILE, "--help", "--version", "--hostfile", "x")
    assert args.target == script  # type: ignore[attr-defined]
    assert args.target_args == [*HOSTILE, "--help", "--version", "--hostfile", "x"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no script given"),
        (["--autotune=run", "train.py"], "unknown option --autotune=run. Options of the script belong after the script."),
        (["--max-restart=1", "train.py"], 'unknown option --max-restart=1. Did you mean "max-restarts"? Options of the'),
        (["--log_dirs", "train.py"], 'Did you mean "log-dir"? Options of the'),
        (["--autotuning=run", "train.py"], "--autotuning: zerorun has no such option. Remedy: zerorun-plan"),
        (["-r", "3", "train.py"], "--redirects: output that is not shown would be lost. Remedy: --log-dir DIR"),
        (["-r", "0:3", "train.py"], "'0:3' is not 0, 1, 2 or 3"),
        (["--tee", "0:4", "train.py"], "'4' is not 0, 1, 2 or 3"),
        (
            ["--nnodes=2", "--node-rank=0", "-H", "hosts", "train.py"],
            "--node-rank 0: hosts join by themselves, but --hostfile",
        ),
        (["--node-rank=0", "--launcher=slurm", "train.py"], "but --launcher slurm names others. Remedy: leave"),
        (["--elastic_training", "train.py"], "--elastic_training: zerorun has no such option. Remedy: --nnodes MIN:MAX"),
        (["--launcher=IMPI", "train.py"], "'IMPI': hosts are reached by ssh, slurm or openmpi"),
        (["--no_ssh", "train.py"], "--no-ssh: which host is this? Remedy: on each, --node-rank K"),
        (["--nnodes=2:1", "train.py"], "the first number is larger than the second"),
        (["--standalone", "-H", "hosts", "train.py"], "--standalone: this machine only, but --hostfile hosts names others"),
        (["--standalone", "--nnodes=1:2", "train.py"], "but --num-nodes 2 names others. Remedy: leave one of the two out"),
        (["--standalone", "--launcher=slurm", "train.py"], "but --launcher slurm names others"),
        (["--export", "a-b=1", "train.py"], "'a-b' is not the name of a variable"),
        (["missing.py"], "script not found: missing.py"),
        ([CONFIGURATION], f"{CONFIGURATION} is no script. Remedy: zerorun SCRIPT.py --config"),
        (["-m", "--no-python", "x"], "exclude each other"),
        (["--nproc", "0", "train.py"], "'0' is not a positive number"),
        (["--nproc", "many", "train.py"], "'many' is not a positive number"),
        (["--master-port", "65536", "train.py"], "not a port number"),
        (["--grace", "-1", "train.py"], "not a number of seconds"),
        (["--grace", "nan", "train.py"], "not a number of seconds"),
    ],
)
def test_refusals(script: str, capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


DEEPSPEED = """-H --hostfile -i --include -e --exclude --num_nodes --min_elastic_nodes --max_elastic_nodes --num_gpus
--num_accelerators --master_port --master_addr --node_rank --launcher --launcher_args --module --no_python --no_local_rank
--no_ssh --no_ssh_check --force_multi --save_pid --enable_each_rank_log --autotuning --elastic_training --bind_cores_to_rank
--bind_core_list --ssh_port --venv_script --log_level -q --quiet --enable_elastic_training"""


def test_options_of_torchrun_and_deepspeed_are_known() -> None:
    """Each has a meaning here, changes nothing, or is refused with what to do instead."""
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert len(theirs) > 50 and theirs | {*DEEPSPEED.split()} <= build_parser()._option_string_actions.keys()


def test_options_that_change_nothing(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    torchrun = [
        "--rdzv_conf",
        "timeout=9",
        "--monitor-interval=1",
        "--start-method",
        "fork",
        "--run-path",
        "--local-addr",
        "h",
    ]
    deepspeed = ["--no_ssh_check", "--log_level", "error", "-q", "--signals-to-handle=SIGTERM"]
    for words in ([], torchrun, deepspeed):
        assert cli.main(["--nproc=2", "--master-port=29511", "--dry-run=json", *words, script, "-q"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] == plans[2]
    assert parse("--shutdown-timeout", "9", script).grace == 9.0  # type: ignore[attr-defined]


def test_launchers_may_be_written_in_capitals(script: str) -> None:
    assert [parse("--launcher", name, script).launcher for name in ("PDSH", "OpenMPI")] == ["pdsh", "openmpi"]  # type: ignore[attr-defined]


def test_names_of_the_job_reach_its_workers(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--rdzv-id=night", "--role", "trainer", "--dry-run=json", script]) == 0
    env = json.loads(capsys.readouterr().out)["nodes"][0]["workers"][0]["env"]
    assert (env["TORCHELASTIC_RUN_ID"], env["ROLE_NAME"], env["ROLE_WORLD_SIZE"]) == ("night", "trainer", "1")


@pytest.mark.parametrize("starter", ["OMPI_COMM_WORLD", "SLURM"])
def test_several_launchers_say_that_each_has_a_job_of_its_own(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, starter: str
) -> None:
    def said(rank: str, *options: str) -> str:
        monkeypatch.setenv("SLURM_PROCID" if starter == "SLURM" else "OMPI_COMM_WORLD_RANK", rank)
        assert cli.main(["--dry-run", "--nproc-per-node=1", *options, script]) == 0
        return capsys.readouterr().err

    told = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "1"}
    for name, value in (told if starter == "SLURM" else {"OMPI_COMM_WORLD_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    assert "has started 3 launchers, and each starts a job of its own" in said("0")
    assert "launchers" not in said("1")  # once is enough
    assert "launchers" not in said("0", "--nnodes=3", "--node-rank=0", "--master-addr=127.0.0.1")


# Defaults of torchrun's options in the environment

_HERE = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "23456"}
# Of the second of two pods, as Kubeflow's training operator sets them.
KUBEFLOW = {**_HERE, "PET_NPROC_PER_NODE": "4", "MASTER_ADDR": "pod-0", "WORLD_SIZE": "2", "RANK": "1"}
ELASTIC = {"PET_RDZV_ENDPOINT": "pod-0:29400", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:3", "PET_MAX_RESTARTS": "5"}


def taken(environment: dict[str, str], *argv: str) -> dict[str, Any]:
    """What variables and the options ``argv`` come to, as far as it is not what it is without both."""
    found = vars(parse_args(build_parser(), [*argv, "train.py"], environment))
    plain: dict[str, Any] = vars(parse("train.py"))
    return {name: value for name, value in found.items() if value != plain[name] and name not in ("words", "command")}


@pytest.mark.parametrize(
    ("environment", "argv", "expected"),
    [
        (KUBEFLOW, (), {"num_nodes": 2, "node_rank": 1, "master_addr": "pod-0", "master_port": 23456, "nproc_per_node": 4}),
        (
            {**KUBEFLOW, "PET_NPROC_PER_NODE": "auto", "PET_LOG_DIR": "logs", "PET_REDIRECTS": "0", "PET_TEE": "3"},
            ("--nproc=3", "--node_rank", "0", "-t", "1", "--master-port=0"),
            {"num_nodes": 2, "node_rank": 0, "master_addr": "pod-0", "nproc_per_node": 3, "log_dir": Path("logs"),
             "tee": frozenset({"stdout"})},
        ),
        (ELASTIC, (), {"num_nodes": 3, "min_nodes": 1, "rdzv_endpoint": "pod-0:29400", "rdzv_backend": "c10d",
                       "max_restarts": 5}),
        # Of two addresses, that of the command line; else torchrun takes the rendezvous.
        ({**ELASTIC, "PET_MASTER_ADDR": "a", "PET_NNODES": "1"}, ("--max-restarts=0",),
         {"num_nodes": 1, "rdzv_endpoint": "pod-0:29400", "rdzv_backend": "c10d"}),
        ({"PET_RDZV_ENDPOINT": "a:1"}, ("--master-addr=b",), {"master_addr": "b"}),
        ({"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}, ("--rdzv-endpoint=b:2",), {"rdzv_endpoint": "b:2"}),
        # Who says where to start means that alone.
        ({**KUBEFLOW, "PET_ROLE": "r"}, ("-H", "hosts"), {"hostfile": "hosts", "nproc_per_node": 4, "role": "r"}),
        (KUBEFLOW, ("--standalone",), {"standalone": True, "nproc_per_node": 4}),
        ({**KUBEFLOW, "PET_STANDALONE": "1"}, ("--launcher=slurm",), {"launcher": "slurm", "nproc_per_node": 4}),
        # Empty, 0 for a flag, what changes nothing here, and what belongs to others.
        ({"PET_NNODES": "", "PET_STANDALONE": "0", "PET_RDZV_CONF": "a=1", "PET_HOSTFILE": "x", "PET_STEPS": "9"}, (), {}),
        ({"PET_STANDALONE": "1", "PET_SHUTDOWN_TIMEOUT": "30"}, (), {"standalone": True, "grace": 30.0}),
        ({"PET_MODULE": "1", "PET_EXPORT": "A=1"}, ("--export=B=2",), {"module": True, "export": [("B", "2")]}),
    ],
)  # fmt: skip
def test_defaults_of_torchrun_in_the_environment(
    script: str, environment: dict[str, str], argv: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert taken(environment, *argv) == expected


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PET_NNODES", "many", "PET_NNODES=many: 'many' is not a positive number. Remedy: "),
        ("PET_RDZV_BACKEND", "etcd", "PET_RDZV_BACKEND=etcd: invalid choice: 'etcd'"),
        ("PET_VIRTUAL_LOCAL_RANK", "1", "PET_VIRTUAL_LOCAL_RANK=1: zerorun has no such option. Remedy: leave"),
    ],
)
def test_a_default_that_cannot_be_is_named(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main([script])
    assert words in capsys.readouterr().err


def test_all_defaults_of_torchrun_are_known() -> None:
    theirs = {action.dest for action in get_args_parser()._actions if type(action).__name__ in ("env", "check_env")}
    ignored = {option[2:].replace("-", "_") for option in (*foreign_options._FLAGS, *foreign_options._VALUES)}
    later = {"shutdown_timeout", "log_line_prefix_template"}  # than torch 2.11
    assert len(theirs) > 20 and (theirs - ignored) | later == set(foreign_options.TORCHRUN)
    assert foreign_options.without_torchrun_defaults({**KUBEFLOW, "PET_SCANS": "x"}) == {
        **{name: KUBEFLOW[name] for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK")},
        "PET_SCANS": "x",
    }


def test_what_the_environment_said_is_told_once(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["--nproc=1", "--dry-run", script]) == 0
    said = "PET_NNODES=2, PET_NODE_RANK=1, PET_MASTER_ADDR=pod-0, PET_MASTER_PORT=23456\n"
    assert capsys.readouterr().err == f"[zerorun] options by variables that torchrun reads: {said}"


def test_an_outer_launcher_is_noticed_by_its_number_of_ranks(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(rank: str | None, *options: str) -> str:
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        assert cli.main(["--dry-run", "--nproc-per-node=1", *options, script]) == 0
        return capsys.readouterr().err

    monkeypatch.setenv("WORLD_SIZE", "4")
    words = "WORLD_SIZE=4 is set, as if something else, such as Kubernetes, had started 4 launchers, and each starts a job"
    for rank in ("0", None):
        assert words in said(rank)
    assert said("1") == said("0", "--standalone") == ""  # once is enough; and this one is meant
    assert said("0", "--nnodes=4", "--node-rank=0", "--master-addr=127.0.0.1") == ""
    for value in ("1", "x", ""):
        monkeypatch.setenv("WORLD_SIZE", value)
        assert said("0") == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit) as stop:
            cli.main([option])
        assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"zerorun {zerorun.__version__}\n")
    assert "--nproc-per-node" in shown and "--nproc_per_node" not in shown


def test_launcher_imports_neither_torch_nor_slow_modules_at_the_top() -> None:
    allowed = {"errors", "log", "config", "watch"}
    for path in Path(cli.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not {name for name in names if name.split(".")[0] in ("torch", "numpy", "pydantic")}, path
        assert {name.split(".")[1] for name in names if name.startswith("zerorun.")} <= allowed, path
    for path in (Path(cli.__file__).with_name(name) for name in ("cli.py", "options.py", "foreign_options.py")):
        top = {node.module for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)}
        assert top <= {
            "__future__",
            "collections.abc",
            "dataclasses",
            "functools",
            "pathlib",
            "typing",
            "zerorun.errors",
            "options",
            "foreign_options",
        }


@pytest.mark.parametrize(
    ("devices", "count"),
    [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-8f2a-1,MIG-77", 2), (" 0 , 3 ", 2)],
)
def test_visible_devices(devices: str, count: int) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": devices}
    assert this_host.visible_gpus(environment) == count
    assert chosen_hosts.count_workers("auto", environment) == max(1, count)
    if count == 0:
        with pytest.raises(LaunchError, match="no GPU is visible"):
            chosen_hosts.count_workers("gpu", environment)


def test_devices_are_counted_from_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_host.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert chosen_hosts.count_workers("gpu", {}) == 2


def test_omp_threads(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(environment: dict[str, str], *options: str) -> str:
        args = parse("--nproc", "3", *options, script)
        launcher, hosts = chosen_hosts.choose_hosts(args, environment)  # type: ignore[arg-type]
        request = cli.make_request(args, launcher, hosts, environment)  # type: ignore[arg-type]
        plan = build_plan(request, Rendezvous("127.0.0.1", 1), cores={"localhost": range(8)})
        return plan.workers[0].env["OMP_NUM_THREADS"]

    assert threads({}) == "2"
    assert threads({"OMP_NUM_THREADS": "5"}) == "5"
    assert threads({"OMP_NUM_THREADS": "5"}, "--omp_threads", "7") == "7"
    for told in ("7", "4,2"):  # OpenMP's list is for each level
        assert threads({"OMP_NUM_THREADS": told}) == told
        assert threads({"OMP_NUM_THREADS": "5"}, f"--export=OMP_NUM_THREADS={told}") == told
    assert threads({"OMP_NUM_THREADS": ""}) == "2"


def test_variables_of_the_user_replace_those_that_the_launcher_only_proposes() -> None:
    for name in ("PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "COLUMNS", "GLOO_SOCKET_IFNAME"):
        worker = plan_for(exports={name: "own"}, terminal_columns=99).workers[0]
        assert name not in worker.env and worker.env["RANK"] == "0"
    assert plan_for(exports={"RANK": "7"}).workers[0].env["RANK"] == "0"


def test_dry_run(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--nproc", "2", "--dry-run", script, "a b"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 workers on this machine") and "'a b'" in text
    assert text.count("  WORLD_SIZE=2\n") == 1
    assert text.splitlines()[-2:] == [f"rank {rank}: RANK={rank} LOCAL_RANK={rank} ROLE_RANK={rank}" for rank in range(2)]


def test_dry_run_json(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--nproc=2", "--dry_run=json", "--local-rank-arg", script, *HOSTILE]) == 0
    plan = json.loads(capsys.readouterr().out)
    workers = plan["nodes"][0]["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert workers[1]["argv"] == [sys.executable, "-u", script, "--local_rank=1", *HOSTILE]
    assert workers[0]["env"]["MASTER_PORT"] == str(plan["master_port"])


# The check of the configuration


@pytest.mark.parametrize(
    ("args", "path"),
    [
        (["--config", "a.json"], ("--config", "a.json")),
        (["--lr", "1", "--deepspeed_config=b.json"], ("--deepspeed_config", "b.json")),
        (["--deepspeed_config", "b.json", "--x"], ("--deepspeed_config", "b.json")),
        (["--config", "a.yaml"], None),
        (["--config"], None),
        (["--config="], None),
        (["a.json"], None),
    ],
)
def test_config_argument(args: list[str], path: tuple[str, str] | None) -> None:
    assert cli.config_argument(args) == path


@pytest.mark.parametrize("option", ["--config", "--deepspeed_config"])
def test_bad_config_starts_nothing(script: str, capsys: pytest.CaptureFixture[str], option: str) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 7}}')
    for mode in ((), ("--as-deepspeed",)):
        assert cli.main(["--dry-run", *mode, script, option, "ds.json"]) == 2
        shown = capsys.readouterr()
        assert "ds.json: 1 problem" in shown.err and "zero_optimization.stage = 7" in shown.err and shown.out == ""
        assert "or --no-config-check" in shown.err
    assert cli.main(["--dry-run", "--no-config-check", script, option, "ds.json"]) == 0


IGNORED = '{"train_batch_size": 2, "my_key": 1, "fp16": {"enabled": 0}}'


@pytest.mark.parametrize(
    ("text", "arguments", "status"),
    [
        (IGNORED, ("--as-deepspeed", "train.py", "--deepspeed_config"), 0),
        (IGNORED, ("--as-deepspeed", "train.py", "--config"), 0),
        (IGNORED, ("train.py", "--deepspeed_config"), 2),
        ('{"hidden_size": 64, "num_layers": 2}', ("train.py", "--config"), 0),  # of the script's model
        ('{"hidden_size": 64, "num_layers": 2}', ("train.py", "--deepspeed_config"), 2),
        ('{"hidden_size": 64, "train_batch_size": 2}', ("train.py", "--config"), 2),
        (
            '{"train_batch_size": 2, "optimizer": {"type": "MyOwn"}, "scheduler": {"type": "Mine"}}',
            ("train.py", "--config"),
            0,
        ),
        ('{"train_batch_size": 2, "optimizer": 3}', ("train.py", "--config"), 2),
    ],
)
def test_what_initialize_takes_is_not_refused(
    script: str, capsys: pytest.CaptureFixture[str], text: str, arguments: tuple[str, ...], status: int
) -> None:
    Path("ds.json").write_text(text)
    assert cli.main(["--dry-run", *arguments, "ds.json"]) == status, capsys.readouterr().err


def test_missing_config_starts_nothing(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--dry-run", script, "--config=gone.json"]) == 2
    assert "configuration file not found: gone.json" in capsys.readouterr().err


# The report

TRACE = ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "    f()", "ValueError: bad"]


def end(rank: int, code: int = 1, tail: list[str] | None = None, stopped: bool = False) -> failures.WorkerEnd:
    return failures.WorkerEnd(rank, code, 2.34, TRACE if tail is None else tail, stopped)


def test_report_counts_those_who_failed_alike() -> None:
    text = failures.failure_report(
        end(3), [end(0), end(1), end(2, -15, [], True), end(4), end(5, 1, ["KeyError: 'x'"]), end(6, 0, [])]
    )
    assert "rank 3 failed first, 2.3 s after the start\n  exit code 1\n" in text
    assert text.count("ValueError: bad") == 1
    assert "3 others alike: ranks 0-1, 4\n" in text
    assert "later, rank 5: exit code 1: KeyError: 'x'\n" in text
    assert "stopped by zerorun because of this: rank 2\n" in text


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:7582"


def test_how_many_batches_a_rank_that_ended_with_0_had() -> None:
    others = [replace(end(1, code=0), batches=998)]
    lines = failures.failure_report(replace(end(0, tail=[GLOO]), batches=1000), others).splitlines()
    assert lines[1].endswith(" s after the start, after 998 micro-batches; others were waiting for it")
    assert lines[4].startswith("rank 0 failed first because of it, ") and lines[4].endswith(", after 1,000 micro-batches")


def test_what_boards_say_was_wrong_comes_first() -> None:
    text = failures.failure_report(end(2, -6, ["what(): length"]), [end(0, tail=[GLOO])], cause="ranks disagree")
    assert text.splitlines()[1:5] == [
        "zerorun: ranks disagree",
        "",
        "rank 2 failed first because of it, 2.3 s after the start",
        f"  {failures.describe_end(-6)}",
    ]
    assert "what(): length" in text and "later, rank 0: exit code 1: RuntimeError" in text


def test_a_rank_that_ended_with_0_is_named_as_the_cause() -> None:
    text = failures.failure_report(end(0, tail=[GLOO]), [end(1, code=0), end(2, tail=[GLOO]), end(3, stopped=True)])
    lines = text.splitlines()
    assert lines[1] == "zerorun: rank 1 ended with exit code 0, 2.3 s after the start; others were waiting for it"
    assert "Remedy: give all ranks the same number of batches" in lines[2]
    assert "rank 0 failed first because of it, 2.3 s after the start" in text and "1 other alike: rank 2" in text


@pytest.mark.parametrize(
    "others",
    [
        [end(1, code=0, stopped=True)],  # it did as it was told
        [end(1, code=0), end(2, tail=["ValueError: bad data"])],  # there is another cause
        [end(1, code=3, tail=[GLOO])],
    ],
)
def test_no_rank_is_blamed_without_need(others: list[failures.WorkerEnd]) -> None:
    assert "rank 0 failed first" in failures.failure_report(end(0, tail=[GLOO]), others)
    assert "rank 0 failed first" in failures.failure_report(end(0, tail=["ValueError: disk full"]), [end(1, code=0)])


def test_the_last_four_lines_are_four() -> None:
    text = failures.failure_report(end(0, tail=["", "a", "", "b", " ", "c", "d", ""]), [])
    assert "the last 4 lines of its stderr:\n  a\n  b\n  c\n  d\n" in text


def test_last_traceback_skips_the_progress_bar_in_front() -> None:
    lines = ["old", *TRACE, "", "During handling of ...", "", " 10%|#   | 1/10" + TRACE[0], *TRACE[1:3], "KeyError: 1"]
    assert failures.last_traceback(lines) == [*TRACE[:3], "KeyError: 1"]
    assert failures.last_traceback(["nothing", "here"]) == []


def test_exception_group_keeps_its_header() -> None:
    lines = ["  + Exception Group Traceback (most recent call last):", '  |   File "t.py", line 3']
    assert failures.last_traceback(lines) == lines


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        (3, "exit code 3", 3),
        (128, "exit code 128", 128),
        (129, "exit code 129 (in a shell, SIGHUP)", 129),
        (192, "exit code 192 (in a shell, SIGRTMAX)", 192),
        (193, "exit code 193", 193),
        (137, "exit code 137 (in a shell, SIGKILL)", 137),
        (-9, "killed by SIGKILL (signal 9): probably out of host memory", 137),
        (-11, "killed by SIGSEGV (signal 11): segmentation fault", 139),
        (-40, "killed by signal 40", 168),
    ],
)
def test_ends_in_words(code: int, words: str, status: int) -> None:
    assert failures.describe_end(code).startswith(words)
    assert code < 0 or failures.describe_end(code) == words
    assert failures.exit_status(code) == status


def test_killed_after_the_grace_is_not_taken_for_out_of_memory() -> None:
    assert "--grace" in failures.describe_end(-9, asked=True)
    assert "--grace" not in failures.describe_end(-9)


def test_tail_shows_what_a_terminal_would() -> None:
    tail = worker_output.Tail()
    for chunk in (b"10%\r20", b"%\r30%\r", b"\nline\r\n", b"caf\xc3", b"\xa9\n", b"\xff open"):
        tail.feed(chunk)
    assert tail.lines() == ["30%", "line", "café", "\ufffd open"]
    tail.feed(b"\n" + b"".join(b"%d\n" % n for n in range(500)))
    assert tail.lines() == [str(n) for n in range(500 - worker_output.TAIL_LINES, 500)]


def tail_of(text: str) -> list[str]:
    """What is kept of a stderr, which comes in two chunks."""
    tail = worker_output.Tail()
    tail.feed(text[:1000].encode())
    tail.feed(text[1000:].encode())
    return tail.lines()


def deep(frames: int, last: str = "ValueError: bad") -> str:
    """A traceback, as it is written."""
    lines = [line for frame in range(frames) for line in (f'  File "t.py", line {frame}, in f', "    f()")]
    return "\n".join([TRACE[0], *lines, last, ""])


RETRY = "wandb: sync: retry after time out\n"


@pytest.mark.parametrize("behind", ("", "\n" + "\tone more\n" * 100, "\n" + RETRY * 58))
@pytest.mark.parametrize("frames", (1, 28, 29, 30, 31, 40, 5000))
def test_the_exception_at_the_end_of_a_long_traceback_is_the_failure(frames: int, behind: str) -> None:
    """Of which the first and the last lines are kept, whatever comes behind it."""
    lines = tail_of("loading\n" * 100 + deep(frames, "ValueError: bad" + behind) + RETRY)
    failed = end(0, tail=lines)
    assert failures.failure_line(failed) == "ValueError: bad" and not failures.because_of_a_peer(failed)
    traceback = failures.last_traceback(lines)
    assert traceback[:3] == [TRACE[0], '  File "t.py", line 0, in f', "    f()"] and traceback[-1] == RETRY.rstrip()
    at = traceback.index("ValueError: bad")
    assert traceback[at - 2 : at] == [f'  File "t.py", line {frames - 1}, in f', "    f()"]
    assert ("  ... 9" in "".join(traceback)) == (frames == 5000) and sum(map(len, lines)) < 40000
    assert failures.last_traceback(tail_of(deep(frames) + deep(1, "KeyError: 1"))) == deep(1, "KeyError: 1").splitlines()


def test_a_traceback_that_the_script_has_survived_is_forgotten() -> None:
    assert tail_of(deep(5000) + "step\n" * 500) == ["step"] * worker_output.TAIL_LINES


@pytest.mark.parametrize(
    ("code", "tail", "blamed"),
    [
        (1, ["RuntimeError: Connection closed by peer"], True),
        (1, [*TRACE, RETRY], False),
        (1, [*TRACE[:3], "RuntimeError: Connection reset", "bye"], True),
        (3, [RETRY], False),
        (3, ["step 7", "Broken pipe"], False),
        (-6, ["what():  [Rank 1] Watchdog caught collective operation timeout", "Fatal Python error: Aborted"], True),
        (-6, [RETRY, "what():  length_error"], False),
    ],
)
def test_only_an_exception_puts_the_blame_on_another_rank(code: int, tail: list[str], blamed: bool) -> None:
    failed = end(0, code, tail)
    assert (failures.ended_early(failed, [end(1, 0)]) is not None) == blamed
    assert failures.because_of_a_peer(failed) == (blamed and code > 0)


def test_failures_are_alike_although_torch_names_the_rank_on_each_line() -> None:
    ends = []
    for rank in range(2):
        tail = worker_output.Tail()
        tail.feed("".join(f"[rank{rank}]: {line}\n" for line in TRACE).encode())
        ends.append(end(rank, 1, tail.lines()))
    text = failures.failure_report(ends[0], ends[1:])
    assert "\n".join(TRACE) in text
    assert "1 other alike: rank 1\n" in text


class FakeScreen:
    def __init__(self) -> None:
        self.said = b""

    def put(self, rank: int, data: bytes) -> None:
        self.said += data


def forward(rank: int, raw: bool, *chunks: bytes) -> list[bytes]:
    """What has reached the screen after each chunk, and after the end."""
    shown = FakeScreen()
    forwarder = worker_output.Forwarder(rank, shown, raw=raw, tail=None)  # type: ignore[arg-type]
    states = []
    for chunk in chunks:
        forwarder.feed(chunk)
        states.append(shown.said)
    forwarder.close()
    return [*states, shown.said]


def test_forwarding() -> None:
    assert forward(0, True, b"a", b"b\rc") == [b"a", b"ab\rc", b"ab\rc"]
    assert forward(0, False, b"a", b"b\rc\r", b"\nd") == [b"", b"ab\r", b"ab\rc\r\n", b"ab\rc\r\nd"]
    assert forward(2, False, b"a", b"b\rc\r", b"\nd") == [b"", b"", b"[rank 2] c\n", b"[rank 2] c\n[rank 2] d\n"]


def test_a_line_that_is_open_is_closed_before_another_rank_speaks() -> None:
    reader, writer = os.pipe()
    shown = worker_output.Screen(writer)
    for rank, data in ((0, b"\r10%"), (0, b"\r20%"), (1, b"[rank 1] hello\n"), (0, b"\r30%")):
        shown.put(rank, data)
    shown.say("end")
    assert os.read(reader, 1000) == b"\r10%\r20%\n[rank 1] hello\n\r30%\nend\n"
    os.close(reader)
    os.close(writer)


def test_an_open_line_of_a_stream_that_does_not_end_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """As of a host that is lost."""
    outputs = worker_output.Outputs({}, None)
    outputs.expect([WorkerCommand(rank, rank, ("python",), {}) for rank in range(2)])
    for stream in ("stdout", "stderr"):
        outputs.take(1, stream, f"half a line of {stream}".encode())
    assert outputs.end() == {1: ["half a line of stderr"]}
    assert capfd.readouterr() == ("[rank 1] half a line of stdout\n", "[rank 1] half a line of stderr\n")


def test_out_of_memory_kills_are_those_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have come from a control group in which others were killed before, and go to another one."""
    own = tmp_path / "own"
    monkeypatch.setattr(node, "OWN_CGROUP", own)
    monkeypatch.setattr(node, "CGROUPS", tmp_path)

    def killed(group: str, count: int) -> None:
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "memory.events").write_text(f"oom 9\noom_kill {count}\n")
        own.write_text(f"0::/{group}\n")

    assert node.oom_kills().total() == 0  # there are no control groups
    killed("login", 1)
    before = node.oom_kills()
    assert (node.oom_kills() - before).total() == 0
    killed("login", 3)
    assert (node.oom_kills() - before).total() == 2
    killed("job", 1)
    assert (node.oom_kills() - before).total() == 1
