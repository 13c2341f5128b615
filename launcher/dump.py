"""``zerorun --dump``: what all ranks of running jobs are doing, whoever has started them. ``zerorun --trace``: a trace.

    python -m zerorun.launcher.dump                     prints what is found on this host as a line of JSON
    python -m zerorun.launcher.dump JOB STEPS FILE      asks the job for a trace, and prints its rank 0 if that is here

Nothing is asked of a job's launcher, which may be gone, or be torchrun. The boards of the ranks are found among the open
files of this user's processes, and their stacks are asked for by a signal, as a supervisor does. A trace is asked for on
the board of rank 0, which lets the other ranks know by the sum that all of them make before an update.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from zerorun.errors import LaunchError
from zerorun.log import counted, ranks_in_words
from zerorun.watch.launch_environment import launched
from zerorun.watch.verdict import Hang, in_words, judge

from .agent_commands import carrier_environment
from .agent_line import UNHEARD_OF
from .terminal_escapes import plain
from .worker_boards import Boards, Seen, is_stopped, open_board, training_first

_WRITE_SECONDS = 0.5  # for a rank to write its stacks
_HOST_SECONDS = 30.0  # to reach a host, and for its answer
_FAN_OUT = 64  # hosts that are asked at a time
_NAMED = 4  # ranks of a group whose hosts and processes are told
_THREAD = re.compile(r"(?m)^(Current thread|Thread) 0x[0-9a-f]+")


@dataclass(frozen=True)
class RankState:
    """A rank, and what was seen of it. ``names``: by which its job may be asked for. ``moves``: its board changes."""

    host: str
    job: str
    names: tuple[str, ...]
    program: str
    world_size: int
    seen: Seen
    moves: bool
    stacks: str

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> RankState:
        """Return it from its ``asdict``. Raises one of line.UNHEARD_OF for anything else."""
        texts = {name: str(message[name]) for name in ("host", "job", "program", "stacks")}
        names = tuple(map(str, message["names"]))
        seen = Seen.of(message["seen"])
        return cls(names=names, world_size=int(message["world_size"]), seen=seen, moves=bool(message["moves"]), **texts)


# -- this host -------------------------------------------------------------------------------------------------------


def on_this_host(*, stacks: bool = True) -> list[RankState]:
    """The ranks that run here and may be looked at, with the ``stacks`` of their threads. Takes half a second."""
    entries = os.listdir("/proc") if os.path.isdir("/proc") else []
    looks = []
    for process in sorted(int(entry) for entry in entries if entry.isdecimal()):
        with contextlib.suppress(OSError, ValueError):
            looks.append(_Look(process, stacks=stacks))
    if looks:
        time.sleep(_WRITE_SECONDS)
    return [state for look in looks if (state := look.end()) is not None]


def trace_on_this_host(job: str, steps: int, file: str) -> list[RankState]:
    """Ask ``job`` for a trace of its next ``steps`` steps, and return its rank 0; nothing if that is not here."""
    for state in on_this_host(stacks=False):
        if (state.job, state.seen.sight.rank) == (job, 0):
            boards, process = Boards(), state.seen.sight.pid
            with contextlib.suppress(OSError, ValueError):
                boards.ask_trace(boards.adopt(process, *open_board(process), time.monotonic()), steps, file)
                boards.close()
                return [state]
    return []


class _Look:
    """A look at one rank, from its first half to its end."""

    def __init__(self, process: int, *, stacks: bool) -> None:
        """Raises OSError or ValueError for a process that is no rank, or another user's."""
        self._process, self._stacks, self._boards = process, stacks, Boards()
        self._rank = self._boards.adopt(process, *open_board(process), time.monotonic())
        self._first = self._boards.sight(self._rank)
        if stacks:
            self._boards.ask_stacks(self._rank)

    def end(self) -> RankState | None:
        """Return what was seen; None if the rank has ended in the meantime."""
        sight = self._boards.sight(self._rank)
        text = self._boards.stacks(self._rank) if self._stacks else ""
        self._boards.close()
        if sight is None or self._first is None or not os.path.exists(f"/proc/{self._process}"):
            return None
        moves = sight.events != self._first.events
        quiet = 0.0 if moves else sight.phase_s if sight.wait_s is None else sight.wait_s
        return _state_of(self._process, Seen(sight, quiet, is_stopped(self._process)), moves, text)


def _state_of(process: int, seen: Seen, moves: bool, stacks: str) -> RankState:
    told = variables(process)
    job = job_of(told)
    names = [job, *(told[name] for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID") if told.get(name, "none") != "none")]
    count = launched(told).get("WORLD_SIZE", "")
    world_size = int(count) if count.isdecimal() else 1
    program = shlex.join(_words(process, "cmdline"))
    return RankState(socket.gethostname(), job, tuple(names), program, world_size, seen, moves, stacks)


def variables(process: int) -> dict[str, str]:
    """Return the environment with which a process has begun; empty if it cannot be read."""
    return dict(word.partition("=")[::2] for word in _words(process, "environ"))


def job_of(told: Mapping[str, str]) -> str:
    """Return the name of the job of a rank that was started with the variables ``told``."""
    if "MASTER_PORT" not in told and "SLURM_STEP_ID" in told:  # srun has started it
        return f"{told.get('SLURM_JOB_ID')}.{told['SLURM_STEP_ID']}"
    return f"{told.get('MASTER_ADDR', '?')}:{told.get('MASTER_PORT', '?')}"


def _words(process: int, name: str) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/{process}/{name}", "rb") as file:
        return [word.decode(errors="replace") for word in file.read().split(b"\0") if word]
    return []


# -- other hosts -----------------------------------------------------------------------------------------------------


def nodes_of(job: str) -> str:
    """Return SLURM's list of the nodes of a running job. Raises LaunchError."""
    command = ["squeue", "--noheader", "--states=RUNNING", f"--jobs={job}", "--format=%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_HOST_SECONDS, check=False)
        said, nodes = done.stderr.strip(), done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        said, nodes = str(error), ""
    if not nodes:
        reason = said or "it has no node"
        raise LaunchError(f"--dump {job}: SLURM knows no such running job ({reason}). Remedy: see squeue.")
    return nodes


def gather(
    carriers: Mapping[str, Sequence[str]], here: Callable[[], list[RankState]] | None
) -> tuple[list[RankState], dict[str, str]]:
    """Return (the ranks of all hosts, what is wrong with hosts that have not answered).

    ``carriers``: the commands that run this module on other hosts, by the hosts' names. ``here``: the same on this host.
    """
    found, silent = [], {}
    with ThreadPoolExecutor(_FAN_OUT) as pool:
        answers = {name: pool.submit(_ask, command) for name, command in carriers.items()}
        if here is not None:
            found += here()
        for name, answer in answers.items():
            ranks, trouble = answer.result()
            found += ranks
            if trouble:
                silent[name] = trouble
    return found, silent


def _ask(command: Sequence[str]) -> tuple[list[RankState], str]:
    try:
        with carrier_environment(command) as environment:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_HOST_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return [], f"no answer within {_HOST_SECONDS:.0f} s"
    except OSError as error:
        return [], f"cannot run {command[0]!r}: {error.strerror}"
    try:  # a login shell may have printed something in front
        return [RankState.of(message) for message in plain(json.loads(done.stdout.splitlines()[-1]))], ""
    except (*UNHEARD_OF, IndexError):
        said = plain(done.stderr.decode(errors="replace")).strip().splitlines()
        return [], said[-1] if said else f"{command[0]} ended with status {done.returncode} and said nothing"


# -- the page --------------------------------------------------------------------------------------------------------


def chosen(found: Sequence[RankState], silent: Mapping[str, str], job: str, *, asked: Sequence[str]) -> list[RankState]:
    """Return the ranks of the job with the name ``job``; empty: of all jobs. ``asked``: the hosts.

    Raises LaunchError if there is none.
    """
    meant = [rank for rank in found if not job or job in rank.names]
    if not meant:
        troubles = "".join(f"\n  {name}: {trouble}" for name, trouble in silent.items())
        there = ", ".join(sorted({name for rank in found for name in rank.names}))
        which = f"job {job} " if job else "no job "
        known = f"Jobs that do: {there}." if there else "Ranks are seen if zerorun runs in them and you have started them."
        raise LaunchError(
            f"{which}{'does not run' if job else 'runs'} on {', '.join(asked)}. {known} "
            f"Remedy: give --hostfile, or --launcher slurm and the job's number, for jobs on other hosts.{troubles}"
        )
    return meant


def one_job(found: Sequence[RankState]) -> RankState:
    """Return the rank 0 of the job to which all of ``found`` belong. Raises LaunchError if it is not clear."""
    jobs = by_job(found)
    if len(jobs) > 1:
        told = "; ".join(headline(ranks) for ranks in jobs)
        raise LaunchError(f"--trace: more than one job runs here. Remedy: give the name of one. {told}")
    first = jobs[0][0]
    if first.seen.sight.rank:
        raise LaunchError(
            f"--trace: rank 0 of job {first.job} was not among the {counted(len(jobs[0]), 'rank')} that were seen. Remedy: "
            "try again, in case it had only begun; of a job on several hosts, give the hostfile."
        )
    return first


def page(found: Sequence[RankState], silent: Mapping[str, str], job: str, *, asked: Sequence[str]) -> Iterator[str]:
    """The page, line by line. The arguments, and what is raised: as of ``chosen``."""
    meant = chosen(found, silent, job, asked=asked)
    for ranks in by_job(meant):
        yield from _job(ranks)
    for name, trouble in silent.items():
        yield f"{name} does not answer: {trouble}"


def by_job(found: Sequence[RankState]) -> list[list[RankState]]:
    """The ranks of each job, ascending."""
    jobs: dict[str, list[RankState]] = defaultdict(list)
    for rank in sorted(found, key=lambda rank: rank.seen.sight.rank):
        jobs[rank.job].append(rank)
    return list(jobs.values())


def headline(ranks: Sequence[RankState]) -> str:
    """What a job is and how far it has come: one line about all its ``ranks`` that were seen."""
    first, hosts = ranks[0], {rank.host for rank in ranks}
    steps = sorted({rank.seen.sight.step for rank in ranks})
    far = counted(steps[0], "step") if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"
    moving = sum(rank.moves for rank in ranks)
    there = f"{len(ranks)} of {counted(first.world_size, 'rank')} on {counted(len(hosts), 'host')}"
    return f"job {', '.join(first.names)}: {there}, {far}, {moving or 'none'} of them moving"


def verdict_of(ranks: Sequence[RankState]) -> Hang | None:
    """The verdict on a job that stands still."""
    several = len({rank.host for rank in ranks}) > 1
    standing = {}
    for rank in ranks:
        number = rank.seen.sight.rank
        if not rank.moves:
            standing[number] = rank.seen.standing(number, rank.host if several else None)
    return judge(standing, {}, ranks[0].world_size)


def _job(ranks: Sequence[RankState]) -> Iterator[str]:
    yield headline(ranks)
    yield f"  {ranks[0].program}"
    missing = set(range(ranks[0].world_size)) - {rank.seen.sight.rank for rank in ranks}
    if missing:
        yield f"  {ranks_in_words(sorted(missing))} not seen: ended, on another host, or not yet at zerorun.initialize()"
    verdict = verdict_of(ranks)
    if verdict is not None:
        yield f"  {verdict.text}"
    for group in _grouped(ranks, lambda rank: _training_thread(rank.stacks)):
        yield ""
        for alike in _grouped(group, _state):
            yield _told(alike)
        yield from (f"    {line}" for line in training_first(group[0].stacks).splitlines())
    yield ""


def _grouped(ranks: Sequence[RankState], key: Any) -> list[list[RankState]]:
    """``ranks`` with equal keys together, the smallest group first: the odd one out is what is looked for."""
    groups: dict[Any, list[RankState]] = defaultdict(list)
    for rank in ranks:
        groups[key(rank)].append(rank)
    return sorted(groups.values(), key=len)


def _state(rank: RankState) -> tuple[Any, ...]:
    sight = rank.seen.sight
    return sight.step, sight.batches, in_words(sight), sight.number, rank.moves, rank.seen.stopped


def _told(alike: Sequence[RankState]) -> str:
    """One line for ranks in the same state."""
    sight, first = alike[0].seen.sight, alike[0]
    longest = max(rank.seen.quiet_s for rank in alike)
    since = "moves" if first.moves else f"for {longest:.0f} s"
    where = "; ".join(f"process {rank.seen.sight.pid} on {rank.host}" for rank in alike[:_NAMED])
    more = "; ..." if len(alike) > _NAMED else ""
    stopped = "stopped, " if first.seen.stopped else ""
    ranks = ranks_in_words([rank.seen.sight.rank for rank in alike])
    doing = f"{stopped}{in_words(sight)}, {since}"
    return f"  {ranks}: {counted(sight.step, 'step')}, micro-batch {sight.batches}; {doing} ({where}{more})"


def _training_thread(stacks: str) -> str:
    return _THREAD.sub("", training_first(stacks).partition("\n\n")[0])


if __name__ == "__main__":
    order = sys.argv[1:]
    ranks = trace_on_this_host(order[0], int(order[1]), order[2]) if order else on_this_host()
    print(json.dumps([asdict(rank) for rank in ranks]))
    sys.exit(0)
