"""How processes start and end: exit codes, imports, what is written where."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_scripts import RunningScript
from harness import patience, start_ranks, start_script

from zerorun.distributed.transport import process_group
from zerorun.errors import TopologyError
from zerorun.launcher.this_host import reserve_port

SCRIPT = """
import sys, torch, zerorun
from torch import nn
torch.set_num_threads(1)
stage, ending = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
                                    "optimizer": {"type": "AdamW"}})
for _ in range(3):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
if ending == "raise" and torch.distributed.get_rank() == 1:
    raise ValueError("planted")
if ending == "exit":
    sys.exit(0)
sys.stdout.write(f"finished {engine.global_steps}\\n")  # one write: torchrun's ranks share a pipe
"""
NO_COMPILER = """
if "torch._dynamo" in sys.modules:
    sys.exit("the compiler was imported: about a second, where nothing is compiled")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def start(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        command,
        env={**kept, "ZERORUN_DEVICE": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120 * patience(),
    )


def launch(script: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return start([sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", "2", str(script), *args])


@pytest.mark.nightly  # by day by torchrun, below, and by zerorun in test_listening.py
@pytest.mark.parametrize("stage", range(4))
def test_a_run_ends_with_exit_code_0(script: Path, stage: int) -> None:
    script.write_text(SCRIPT + NO_COMPILER)
    done = launch(script, str(stage), "fall off the end")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished 3") == 2


def test_exit_in_the_script(script: Path) -> None:
    with start_ranks(2, script.read_text(), "1", "exit") as scripts:
        assert [rank.finish(120 * patience())[0] for rank in scripts] == [0, 0]


@pytest.mark.nightly  # by day what the rank does, below, and what the launcher does in cluster/test_failures.py
@pytest.mark.parametrize("stage", [3, 1])
def test_one_rank_raises(script: Path, stage: int) -> None:
    done = launch(script, str(stage), "raise")
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert "ValueError: planted" in done.stderr


IN_FLIGHT = """
import time, torch, zerorun
import torch.distributed as dist
zerorun.init_distributed("cpu")
if dist.get_rank() == 0:
    time.sleep(3600)
dist.all_reduce(torch.ones(4), async_op=True)
raise ValueError("planted")
"""


def test_a_rank_that_raises_ends_though_a_collective_of_the_script_waits_for_another() -> None:
    with start_ranks(2, IN_FLIGHT) as scripts:
        code, _, errors = scripts[1].finish(120 * patience())
        assert (code, "ValueError: planted" in errors) == (1, True), errors


@pytest.mark.nightly  # by day without the launcher, above
def test_the_launcher_ends_the_others_of_a_rank_with_a_collective_in_flight(tmp_path: Path) -> None:
    script = tmp_path / "in_flight.py"
    script.write_text(IN_FLIGHT)
    done = launch(script)
    assert done.returncode == 1, done.stderr
    assert "rank 1 failed first" in done.stderr
    assert "ValueError: planted" in done.stderr


MPIRUN = """
import torch, zerorun
import torch.distributed as dist
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
engine = zerorun.initialize(model, {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                                    "zero_optimization": {"stage": 3}, "gradient_clipping": 0})
data = torch.randn(4, 8)
for _ in range(3):
    engine.backward(engine(data.chunk(dist.get_world_size())[dist.get_rank()]).square().mean())
    engine.step()
weights = engine.state_dict()
if dist.get_rank() == 0:
    print([dist.get_world_size(), *(float(value.sum()) for value in weights.values())])
"""


def _weights_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    data, optimizer = torch.randn(4, 8), torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return [float(value.sum()) for value in model.state_dict().values()]


def _ranks_of_mpirun(**variables: str) -> list[RunningScript]:
    told = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **variables}
    places = [{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in "01"]
    return [start_script(MPIRUN, **told, **place) for place in places]


def test_ranks_of_mpirun_train_one_model() -> None:
    with reserve_port(None) as port:
        (code, said, errors), *_ = [
            script.finish(120 * patience()) for script in _ranks_of_mpirun(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        ]
    assert code == 0, errors
    assert json.loads(said) == pytest.approx([2, *_weights_of_one_process()], rel=1e-5)


def test_ranks_of_mpirun_that_do_not_know_where_to_meet_are_told() -> None:
    """And train no model each."""
    for script in _ranks_of_mpirun():
        code, _, errors = script.finish(120 * patience())
        assert code == 1 and "lacks MASTER_ADDR and MASTER_PORT" in errors and "mpirun -x MASTER_ADDR" in errors


@pytest.mark.nightly  # by day with its variables, above
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Open MPI)")
def test_mpirun_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MPIRUN)
    with reserve_port(None) as port:
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
        told = ["-x", "PYTHONPATH", "-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={port}"]
        done = start([*command, *told, sys.executable, str(tmp_path / "train.py")], PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx([2, *_weights_of_one_process()], rel=1e-5)


TORCHS_OWN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(dist.is_torchelastic_launched(), float(total), os.environ["ROLE_RANK"] == os.environ["RANK"])
"""


@pytest.mark.nightly
def test_a_script_of_torchs_own_meets_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCHS_OWN)
    done = launch(tmp_path / "train.py")
    assert done.returncode == 0 and done.stdout.count("True 2.0 True") == 2, done.stderr


OWN_GROUP = """
import sys, torch, zerorun
import torch.distributed as dist
dist.init_process_group("cuda:gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
with zerorun.zero.Init():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
                                    "zero_optimization": {"stage": 3, "shard_degree": 2}})
for _ in range(3):
    loss = engine(torch.ones(1, 8) * (dist.get_rank() + 1)).square().mean()
    engine.backward(loss)
    engine.step()
total = engine.comm.control.sum(loss.detach().clone())
if dist.get_rank() == 0:
    print(f"loss {float(total)}")
"""


def test_a_process_group_that_a_script_has_made_for_gpus_alone_is_enough() -> None:
    """As by ``init_process_group("nccl")``: there is no backend for what ranks tell each other in host memory."""
    with start_ranks(4, OWN_GROUP) as scripts:
        (code, said, errors), *_ = [script.finish(120 * patience()) for script in scripts]
    assert code == 0, errors
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for _ in range(3):
        losses = torch.stack([model(torch.ones(1, 8) * (rank + 1)).square().mean() for rank in range(4)])
        optimizer.zero_grad()
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert float(said.split("loss ")[1]) == pytest.approx(float(losses.sum().detach()), rel=1e-5)


def test_torchrun_and_plain_python(script: Path) -> None:
    script.write_text(SCRIPT + NO_COMPILER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    assert start([*torchrun, "3", "fall off the end"]).stdout.count("finished 3") == 2
    assert start_script(SCRIPT, "3", "fall off the end").finish(120 * patience())[1] == "finished 3\n"


RESTARTED = """
import sys, time
import torch
import zerorun
time.sleep(float(sys.argv[1]))
zerorun.init_distributed("cpu", timeout_s=20)
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(int(total))
"""


def test_ranks_of_a_restart_do_not_meet_those_before() -> None:
    """torchrun's store has the addresses of the ranks that ended: who comes first must not take them for its peers'."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "LOCAL_WORLD_SIZE": "2"}
    told["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for delay in (0.0, 1.0):
        of_ranks = {"0": "0", "1": str(delay)}
        ranks = [start_script(RESTARTED, of_ranks[rank], **told, RANK=rank, LOCAL_RANK=rank) for rank in of_ranks]
        for rank in ranks:
            code, said, errors = rank.finish(120 * patience())
            assert (code, said) == (0, "2\n"), errors


def test_a_program_that_a_rank_has_started_is_told_what_it_has_from_it() -> None:
    """It is rank 0, too, by its environment, and cannot have the port of the first one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TopologyError, match=rf"at {address}, and another process has .*env -u RANK -u WORLD_SIZE"):
            process_group._meet(0, address, timedelta(seconds=9))


LATE = """
import os, sys, time
import zerorun
from zerorun.distributed.waits import watch
rank, late, folder, limit, after = os.environ["RANK"], *sys.argv[1:]
watch.tell_after(float(after))
if rank == late:
    time.sleep(3600)
open(os.path.join(folder, rank), "w").close()
while len(os.listdir(folder)) < 2:
    time.sleep(0.01)
zerorun.init_distributed("cpu", timeout_s=float(limit) * (2 if (rank, late) == ("1", "2") else 1))
"""


@pytest.mark.parametrize("late", (0, 2))
def test_ranks_that_have_not_come_are_named(tmp_path: Path, late: int) -> None:
    """In a line after half a minute, here at once, and in the error when the time is over, if only that of rank 0."""
    others, after, limit = [rank for rank in range(3) if rank != late], 0.3 * patience(), f"{2 * patience():.0f}"
    with start_ranks(3, LATE, str(late), str(tmp_path), limit, str(after)) as scripts:
        ended = [scripts[rank].finish(60 * patience()) for rank in others]
    for rank, (code, _, errors) in zip(others, ended, strict=True):
        assert code == 1
        line, *_, error = [line for line in errors.splitlines() if "the rendezvous of 3 ranks" in line]
        assert line.endswith(f". Rank {late} has not come.") and "has been waiting for" in line
        what = f"after {limit} s"
        if (rank, late) == (1, 2):
            what = "the process that keeps the store of all, rank 0 or torchrun, has ended;"
        assert "zerorun.errors.TopologyError" in error and f": {what} rank {late} had not come (" in error


LATE_IN_INITIALIZE = """
import os, sys, time, torch
import zerorun
from zerorun.distributed import waits
rank, folder, say = os.environ["RANK"], sys.argv[1], waits._say

def tell(*given):
    say(*given)
    open(os.path.join(folder, rank), "w").close()

waits.watch.tell_after(float(sys.argv[2]))
waits._say = tell
for start in range(2):
    while start and rank == "1" and not all(os.path.exists(os.path.join(folder, other)) for other in "02"):
        time.sleep(0.02)
    engine = zerorun.initialize(torch.nn.Linear(2, 2), {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})
    print("made", flush=True)
"""


def test_a_rank_that_does_not_come_to_initialize_is_named(tmp_path: Path) -> None:
    with start_ranks(3, LATE_IN_INITIALIZE, str(tmp_path), str(0.3 * patience())) as scripts:
        ended = [script.finish(120 * patience()) for script in scripts]
    for rank, (code, said, errors) in enumerate(ended):
        assert (code, said) == (0, "made\nmade\n"), errors
        assert ("initialize(): whether all ranks agree. Rank 1 has not come." in errors) == (rank != 1), errors


def test_srun_variables_are_understood(script: Path) -> None:
    """One process for each task, as srun starts them, without srun."""
    port = str(29500 + os.getpid() % 2000)
    common = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "MASTER_PORT": port}
    arguments = (script.read_text(), "3", "fall off the end")
    tasks = [start_script(*arguments, **common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    for task in tasks:
        code, said, errors = task.finish(120 * patience())
        assert (code, said) == (0, "finished 3\n"), errors


def test_half_an_environment_is_an_error(script: Path) -> None:
    code, _, errors = start_script(script.read_text(), "0", "x", RANK="0", WORLD_SIZE="2").finish(120 * patience())
    assert code == 1
    assert "MASTER_ADDR, MASTER_PORT" in errors


def test_malformed_config_stops_before_anything_starts(script: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 8,\n "zero_optimization": {"stage": }}')
    done = launch(script, "0", "x", "--config", str(config))
    assert done.returncode == 2
    assert "line 2" in done.stderr
    assert "column" in done.stderr
    assert "finished" not in done.stdout


def test_importing_is_light() -> None:
    """Imports what it needs, when it is needed: no torch for the configuration."""
    code = "import sys, zerorun, zerorun.config; print('torch' in sys.modules)"
    assert start([sys.executable, "-c", code]).stdout == "False\n"
    # dataclasses imports inspect and compiles each class: a quarter of the time of `zerorun --help`
    code = (
        "import sys; before = {*sys.modules}; import zerorun.launcher.cli; print({'dataclasses'} & {*sys.modules} - before)"
    )
    assert start([sys.executable, "-c", code]).stdout == "set()\n"


def test_training_imports_no_compiler() -> None:
    """It takes longer than PyTorch itself. (An optimizer of torch.optim imports it when it is made.)"""
    code = """
        import sys, torch, zerorun, zerorun.engine.initialize
        heavy = ("torch._dynamo", "sympy", "triton", "zerorun.tensor_parallel.layers", "zerorun.pipeline.executor")
        print([module for module in heavy if module in sys.modules])
        print("imported", file=sys.stderr)
        from zerorun.ops.single_pass import Adam
        weight = torch.ones(3, requires_grad=True)
        weight.grad = torch.ones(3)
        Adam([weight]).step()
        if "torch._dynamo" in sys.modules:
            sys.exit("a step of the optimizer alone has imported it")
        for kind, stage in [("AdamW", 0), ("AdamW", 3), ("Muon", 3), ("Lamb", 2), ("Adafactor", 3)]:
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
            config = {"train_batch_size": 1, "zero_optimization": zero, "optimizer": {"type": kind}}
            engine = zerorun.initialize(model=model, config=config)
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 2)).sum())
                engine.step()
            engine.destroy()
            if "torch._dynamo" in sys.modules:
                sys.exit(f"{kind} at stage {stage} has imported it")
    """
    done = start([sys.executable, "-c", textwrap.dedent(code)])
    assert (done.returncode, done.stdout, done.stderr.startswith("imported\n")) == (0, "[]\n", True), done.stderr


def test_config_command(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 64, "zero_optimisation": {"stage": 3}}))
    done = start([sys.executable, "-m", "zerorun.config", str(config), "--world-size", "64"])
    assert done.returncode == 2
    assert "zero_optimization" in done.stdout + done.stderr


FORKING = """
import os, sys, time, torch, zerorun
engine = zerorun.initialize(torch.nn.Linear(4, 4), {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}})
def train():
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
train()
child = os.fork()
if not child:
    sys.exit(3)
for _ in range(300):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status))
train()
"""


def test_a_process_that_the_script_forks_ends_by_itself() -> None:
    """It has the groups of its parent, but not their threads: whoever leaves a group waits for these."""
    with start_ranks(2, FORKING) as scripts:
        for code, out, errors in [script.finish(60 * patience()) for script in scripts]:
            assert (code, out) == (0, "3\n"), errors


@pytest.mark.parametrize(
    "module",
    [
        ("zerorun.pipeline.cli", "--stages=4", "--micro-batches=8"),
        ("zerorun.config", "--keys"),
        *(("zerorun", "--help"), ("zerorun.planner.cli", "--help")),
    ],
)
@pytest.mark.parametrize("closed", ["stdout is closed", "nobody reads"])
def test_a_command_that_nobody_reads_ends_in_no_traceback(module: tuple[str, ...], closed: str) -> None:
    after = ">&-" if closed == "stdout is closed" else "| true"
    command = f"{shlex.join([sys.executable, '-m', *module])} {after}"
    done = subprocess.run(command, shell=True, text=True, capture_output=True, check=False, timeout=60 * patience())
    assert (done.returncode, done.stderr) == (0, "")
