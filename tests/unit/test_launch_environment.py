"""Where a rank is, by the variables of whatever has started it. Real mpirun and srun are tried by night."""

from __future__ import annotations

import os

import pytest

from zerorun.watch.launch_environment import is_on_one_host, launched, local_rank, rank_in, ranks_here, world_size_in

MEETING = {"MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "3"}
# As srun of SLURM 22.05 sets them: tasks 0, 1 on n07, 2, 3 on n08, 4 on n10.
STEP = {
    **JOB,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[07-08,10]-ib,login",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
TASK = {**STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALONE: tuple[str | None, ...] = (None,) * 6


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ALONE),
        (OPEN_MPI, ("5", "8", "1", "4", None, None)),
        ({**OPEN_MPI, **MEETING}, ("5", "8", "1", "4", "n0", "29500")),
        ({name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}, ("5", "8", "1", "4", None, None)),
        (MPICH, ("5", "8", "1", "4", None, None)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ALONE),
        (TASK, ("3", "5", "1", "2", "n07-ib", str(20000 + 77 + 93))),
        ({**TASK, **MEETING}, ("3", "5", "1", "2", "n0", "29500")),
        ({**TASK, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}, ("4", "5", "0", "1", "n07-ib", "20170")),
        ({**TASK, "SLURM_STEP_NUM_NODES": "1"}, ("3", "5", "1", "5", "127.0.0.1", "20170")),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "?"}, ("3", "5", "1", None, "n07-ib", "20170")),
        (JOB, ALONE),  # a batch script, or salloc's shell
        ({**JOB, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, ALONE),  # salloc's shell as a step
        ({**TASK, "PMI_RANK": "3", "PMI_SIZE": "5"}, ("3", "5", "1", "2", "n07-ib", "20170")),  # srun --mpi=pmi2
        ({**TASK, **OPEN_MPI, **MEETING}, ("5", "8", "1", "4", "n0", "29500")),  # srun has started mpirun's daemons
        # Workers of zerorun, whose agent mpirun or srun has started, and ranks of torchrun in a task of several.
        (
            {**TASK, **OPEN_MPI, **MEETING, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            ("1", "2", "1", "2", "n0", "29500"),
        ),
        ({**TASK, **MEETING, "RANK": "0", "WORLD_SIZE": "1"}, ("0", "1", None, None, "n0", "29500")),
        # A wrapper such as RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python train.py; and half of it.
        ({**TASK, **MEETING, "RANK": "3", "WORLD_SIZE": "5"}, ("3", "5", "1", "2", "n0", "29500")),
        ({**TASK, **MEETING, "WORLD_SIZE": "5"}, ("3", "5", "1", "2", "n0", "29500")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("1", "2", None, None, None, None)),
    ],
)
def test_where_a_rank_is(environment: dict[str, str], place: tuple[str | None, ...]) -> None:
    told = launched(environment)
    expected = {name: value for name, value in zip(PLACE, place, strict=True) if value is not None}
    if place is ALONE:
        told = {name: value for name, value in told.items() if name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    assert told == expected
    assert rank_in(environment) == int(place[0] or 0) and world_size_in(environment) == int(place[1] or 1)
    assert is_on_one_host(environment) == (place[1] is not None and place[1] == place[3])


def be(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI")) or name in PLACE:
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_how_many_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, TASK)
    assert (ranks_here(5), local_rank()) == (2, 1)
    assert ranks_here(4) == 4  # of a group that the task has made with processes of its own
    be(monkeypatch, {})
    assert (ranks_here(3), local_rank()) == (3, 0)
    be(monkeypatch, {"LOCAL_WORLD_SIZE": "2"})
    assert ranks_here(4) == 2
