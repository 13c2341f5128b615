"""zerorun-report as a process, on this machine: two ranks, each fault planted, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from covering import by_day
from harness import patience

COMMAND = (sys.executable, "-m", "zerorun.report.cli")
BIN = Path(__file__).parents[2] / "bin" / "zerorun-report"


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "ZERORUN_"))}
    return {**kept, "ZERORUN_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", **variables}


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], env=environment(**variables), capture_output=True, text=True, timeout=120 * patience()
    )


def as_json(*args: str, **variables: str) -> tuple[int, dict[str, Any]]:
    done = run("--json", *args, **variables)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def words(report: dict[str, Any], severity: str) -> str:
    return "\n".join(finding["what"] for finding in report["findings"] if finding["severity"] == severity)


@pytest.mark.nightly  # by day as JSON, below, and its lines in unit/test_report_findings.py
def test_two_ranks_of_this_machine() -> None:
    done = run()
    # A machine on which others compute may earn a warning; an error would be ours.
    assert done.returncode in (0, 1), done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("CAN TRAIN")
    assert max(map(len, lines)) <= 80
    assert "2 ranks on 1 host, gloo on cpu; finished" in done.stdout
    assert all(word in done.stdout for word in ("torch", "peer memory", "/dev/shm", "16 MiB", "bus GB/s", "all_reduce"))
    assert not done.stderr


@pytest.fixture(scope="module")
def with_a_host_that_is_not_there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of two ranks here and two on a host without an address."""
    hosts = tmp_path_factory.mktemp("hosts") / "hosts"
    hosts.write_text("localhost slots=2\nno-such-host.invalid slots=2\n")
    status, report = as_json("--quick", "--hostfile", str(hosts))
    assert status == report["verdict"]["status"] == 2
    return report


def test_json_has_everything(with_a_host_that_is_not_there: dict[str, Any]) -> None:
    report = with_a_host_that_is_not_there
    live = report["live"]
    assert (live["ended"], live["world_size"], live["wrong"], live["errors"]) == ("finished", 2, [], [])
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send and receive"):
        for dtype in ("float32", "float64", "bfloat16", "float16", "int64", "uint8"):
            assert f"{collective} {dtype}" in live["checked"]
    assert {"barrier", "gather_values", "zerorun reduce_scatter bfloat16 by gloo, 2 ranks"} <= set(live["checked"])
    assert [entry["rank"] for entry in live["ranks"]] == [0, 1]
    assert {entry["name"] for entry in live["sizes"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    facts = report["hosts"][0]["facts"]
    assert {"torch", "python", "zerorun", "gloo"} <= set(facts["versions"])
    native = {"native optimizer", "native file access"}
    assert {op["name"] for op in facts["native_ops"]} == {"peer memory"} | native


@pytest.mark.nightly
def test_one_rank() -> None:
    status, report = as_json("--nproc-per-node", "1", "--quick")
    assert status in (0, 1)
    assert report["live"]["ended"] == "finished"


@pytest.mark.nightly  # by day: what is made of it, in unit/test_report_findings.py
@pytest.mark.parametrize("fault", ["hang:zerorun all_gather bfloat16:1", "hang:all_reduce"])
def test_a_collective_that_never_returns_is_a_finding(fault: str) -> None:
    begun = time.monotonic()
    status, report = as_json("--quick", ZERORUN_REPORT_FAULT=fault)
    assert time.monotonic() - begun < 15 * patience()
    assert (status, report["live"]["ended"]) == (2, "hang")
    assert f"hang: {fault.split(':')[1]}" in words(report, "error")
    hang = next(finding for finding in report["findings"] if "hang" in finding["what"])
    assert "Try " in hang["remedy"]


@pytest.mark.nightly
def test_a_rank_that_computes_slowly_is_named() -> None:
    status, report = as_json("--quick", ZERORUN_REPORT_FAULT="slow:1:2")
    assert status == 1
    assert "rank 1 is slow" in words(report, "warning")
    assert "rank 0" not in words(report, "warning")


@pytest.mark.nightly  # by day: how results are compared and told of, in unit/test_report_findings.py
def test_a_wrong_result_and_peer_memory_that_is_switched_off() -> None:
    """The result is named with its dtype, collective and rank; memory with who switched it off."""
    fault = "wrong:reduce_scatter bfloat16:1"
    status, report = as_json("--quick", ZERORUN_REPORT_FAULT=fault, ZERORUN_PEER_MEMORY="0")
    assert status == 2
    assert "wrong result of reduce_scatter in bfloat16 on rank 1" in words(report, "error")
    assert "peer memory is not in force: ZERORUN_PEER_MEMORY=0" in words(report, "note")
    assert set(report["live"]["transport"].values()) == {"gloo"}


@pytest.mark.nightly  # by day: what is said of it, in unit/test_report_findings.py
def test_a_rank_that_fails() -> None:
    status, report = as_json("--quick", ZERORUN_REPORT_FAULT="raise:barrier:0")
    assert status == 2
    assert "barrier failed on rank 0: RuntimeError: planted" in words(report, "error")


@pytest.mark.nightly  # by day a hang that is found, above
def test_a_time_limit_that_is_too_short() -> None:
    status, report = as_json("--time-limit", "0.2")
    assert status in (1, 2)
    assert report["live"]["ended"] in ("time limit", "hang")
    assert report["live"]["seconds"] < 10


def test_a_host_that_is_not_there_and_this_one(with_a_host_that_is_not_there: dict[str, Any]) -> None:
    report = with_a_host_that_is_not_there
    assert [f["host"] for f in report["findings"] if f["severity"] == "error"] == ["no-such-host.invalid"]
    assert (report["live"]["hosts"], report["live"]["ended"]) == (["localhost"], "finished")


@pytest.mark.nightly  # by day: unit/test_report_findings.py
def test_facts_alone_on_a_machine_without_programs() -> None:
    """PATH is empty and the environment full of nonsense."""
    nonsense = {"RANK": "x", "WORLD_SIZE": "", "MASTER_PORT": "-1", "OMP_NUM_THREADS": "many", "SLURM_JOB_ID": "?"}
    status, report = as_json("--no-live", PATH="", **nonsense)
    assert status in (0, 1)
    assert report["live"] is None
    assert report["hosts"][0]["facts"]["problems"] == []


@pytest.mark.nightly
def test_the_live_check_does_not_mind_a_strange_environment() -> None:
    nonsense = {"RANK": "x", "WORLD_SIZE": "", "MASTER_PORT": "-1", "MASTER_ADDR": "nowhere.invalid"}
    nonsense |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "x", "PET_MAX_RESTARTS": "?"}
    status, report = as_json("--quick", PATH="", **nonsense)
    assert status in (0, 1), report["findings"]


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    status, report = as_json(PYTHONPATH=str(tmp_path))
    assert status == 2
    assert "torch cannot be used: OSError: libcudart.so.13" in words(report, "error")
    assert report["live"] is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the current folder")
def test_files_of_the_current_folder_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that torch had to be installed."""
    for name in ("queue.py", "select.py", "random.py"):
        (tmp_path / name).write_text("raise ImportError('planted')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", (sys.executable, str(BIN)))
    status, report = as_json("--quick", "--nproc-per-node=1")
    assert status in (0, 1), report["findings"]
    assert report["live"]["ended"] == "finished"


@pytest.mark.parametrize(
    "args", [["--hostfile", "/no/such/file"], ["--launcher", "ssh"], ["--nproc-per-node", "0"], ["--frobnicate"]]
)
def test_a_command_that_cannot_be_meant(args: list[str]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_the_shim_and_help() -> None:
    done = subprocess.run(
        [sys.executable, str(BIN), "--help"], env=environment(), capture_output=True, text=True, timeout=60 * patience()
    )
    assert done.returncode == 0
    assert "exit status: 0 can train" in done.stdout


@pytest.mark.parametrize("number", by_day((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), signal.SIGTERM))
# The live check's ranks end with their launcher: unit/test_launcher_processes.py.
@pytest.mark.parametrize(
    "during", by_day(("zerorun.report.software", "zerorun.report.live_worker"), "zerorun.report.software")
)
def test_nothing_is_left_when_it_is_ended(tmp_path: Path, number: int, during: str) -> None:
    marker = f"report-test-{os.getpid()}-{number}-{during}"
    process = subprocess.Popen(
        COMMAND,
        env=environment(ZERORUN_REPORT_FAULT="hang:barrier", ZERORUN_MARKER=marker, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: any(during in line for line in carrying(marker)), 30)
    time.sleep(0.3)
    process.send_signal(number)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=30 * patience())
    assert time.monotonic() - begun < 8 * patience()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert b"Traceback" not in errors
    wait_until(lambda: not carrying(marker), 10)
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())


def carrying(marker: str) -> list[str]:
    """Command lines of the processes that have ``marker`` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("ZERORUN_MARKER") == marker:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds * patience()
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
