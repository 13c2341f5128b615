"""Hosts that join by themselves: the same command is typed on each of them, with ``--node-rank``, and no ssh is needed.

Node 0 leads: it listens on the master port, and is the launcher. The others connect to it and serve as agents do, with two
differences. They run the command that was typed there, in their own folder and environment, and take from the leader only
the variables that a worker needs to find its place: whoever can connect to a port must not be able to run programs.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerorun.errors import LaunchError

from .agent import Agent
from .facts import bound_socket
from .hosts import Host
from .job import Job, JobOptions, Node
from .line import Line, Message
from .loop import signals_as_bytes
from .node import LocalNode, make_log_dir
from .plan import LaunchRequest, Rendezvous, WorkerCommand, build_plan
from .remote import RemoteNode

JOIN_SECONDS = 300.0  # the commands are typed one after the other
RETURN_SECONDS = 30.0  # for a host to join again before a restart
_RETRY_SECONDS = 0.5
_MOST_SLOTS = 4096


class LeadingJob(Job):
    """The job of node 0. ``job_id`` keeps hosts of another job out."""

    _may_share_machines = True  # somebody tries it out

    def __init__(self, request: LaunchRequest, options: JobOptions, node_count: int, port: int, job_id: str) -> None:
        super().__init__(request, replace(options, master_port=None))
        self._names = [request.hosts[0].name, *(f"node {index}" for index in range(1, node_count))]
        self._job_id = job_id
        self._listener = bound_socket(port)
        self._listener.listen(1024)
        self._port = port

    @property
    def _several(self) -> bool:
        return len(self._names) > 1

    def _connect(self, hosts: Sequence[Host]) -> None:
        missing = [Host(name) for name in self._names[1:]]
        if missing:
            self.say(f"[zerorun] port {self._port} is open: waiting for {len(missing)} more hosts to join")
        super()._connect([*hosts, *missing])
        guests = [node for node in self._nodes if isinstance(node, RemoteNode)]
        joined = [Host(guest.name, tuple(range(guest.facts["slots"]))) for guest in guests]
        self._request = replace(self._request, hosts=(*hosts, *joined))

    def _open(self, hosts: Sequence[Host]) -> list[Node]:
        """The own node, and a guest for each other host. Whoever else connects is sent away."""
        own = [self._own_node(host.name) for host in hosts if host.name == self._names[0]]
        wanted = [host.name for host in hosts if host.name != self._names[0]]
        kept = list(self._nodes)
        seconds = RETURN_SECONDS if kept else JOIN_SECONDS

        def joined() -> dict[str, RemoteNode]:
            there = [node for node in self._nodes if isinstance(node, RemoteNode) and node.lost is None]
            return {node.name: node for node in there if node.name in wanted}

        self._selector.register(self._listener, selectors.EVENT_READ, lambda: self._accept(wanted, joined))
        self._until(lambda: len(joined()) == len(wanted), seconds)
        self._selector.unregister(self._listener)
        found = joined()
        for node in self._nodes:
            if node not in kept and node not in found.values():
                node.close()
        self._nodes = kept
        return [*own, *(found[name] if name in found else self._absent(name, seconds) for name in wanted)]

    def _absent(self, name: str, seconds: float) -> RemoteNode:
        node = RemoteNode(name, self._selector, self, self.say)
        node.lose(f"did not join within {seconds:.0f} s")
        return node

    def _accept(self, wanted: Sequence[str], joined: Callable[[], Mapping[str, Node]]) -> None:
        connection, address = self._listener.accept()
        guest = RemoteNode(f"guest {address[0]}", self._selector, self, self.say)
        self._nodes.append(guest)  # so that it is looked after

        def greeted() -> None:
            rank, job_id = guest.facts.get("node_rank"), guest.facts.get("job_id")
            free = [name for name in wanted if name not in joined()]
            name = f"node {rank}" if rank is not None else next(iter(free), "")
            slots = guest.facts.get("slots")
            if job_id != self._job_id or name not in free or not isinstance(slots, int) or not 0 < slots < _MOST_SLOTS:
                guest.send("refuse", text=f"there is no place for node {rank} of job {job_id!r} here")
                guest.lose("it has no place in this job")
                return
            guest.name = name

        guest.on_hello = greeted
        guest.attach(Line(connection.detach()))

    def _close(self, status: int) -> None:
        self._listener.close()
        super()._close(status)


class Guest(Agent):
    """The agent of a host that has joined by itself."""

    def __init__(self, line: Line, request: LaunchRequest, log_dir: Path | None, hello: dict[str, Any]) -> None:
        super().__init__(line)
        self._request, self._log_dir, self._hello = request, log_dir, hello
        # What the leader may set: the variables that a plan sets.
        plan = build_plan(replace(request, omp_threads=1), Rendezvous("", "", {request.hosts[0].name: ""}))
        self._allowed = set(plan.workers[0].env)

    def _prepare(self, message: Message) -> None:
        self._grace = float(message["grace"])
        make_log_dir(self._log_dir)
        base = {**os.environ, **self._request.exports}
        self._node = LocalNode(self._selector, self, base=base, grace=self._grace, log_dir=self._log_dir)
        print("[zerorun] joined; all output appears where node 0 is", file=sys.stderr)
        self._line.send({"is": "ready"})

    def _lose(self) -> None:
        print("[zerorun] node 0 is gone, or has no place for this host", file=sys.stderr)
        super()._lose()

    def hear(self, wakeup: int) -> None:
        """Signals that come to this host's launcher are for the whole job."""

        def read() -> None:
            for number in os.read(wakeup, 64):
                self.on_signal(number)

        self._selector.register(wakeup, selectors.EVENT_READ, read)

    def _command(self, worker: dict[str, Any]) -> WorkerCommand:
        own = build_plan(self._request, Rendezvous("", "")).workers[worker["local_rank"]]
        env = {name: value for name, value in worker["env"].items() if name in self._allowed}
        return replace(super()._command(worker), argv=own.argv, env={**own.env, **env})


def join(
    request: LaunchRequest, log_dir: Path | None, address: str, port: int, node_rank: int | None, job_id: str
) -> int:
    """Serve the leader at ``address``, and return the exit status that it gives. Raises LaunchError."""
    connection = _connect(address, port)
    slots = len(request.hosts[0].slots or ())
    hello = {"node_rank": node_rank, "job_id": job_id, "slots": slots}
    with signals_as_bytes(may_sleep=True) as wakeup:
        guest = Guest(Line(connection.detach()), request, log_dir, hello)
        guest.hear(wakeup)
        return guest.run()


def _connect(address: str, port: int) -> socket.socket:
    """The leader may be started later than the others."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no leader at {address} port {port}: {error}. Remedy: start the command with --node-rank 0 there."
                ) from None
        time.sleep(_RETRY_SECONDS)
