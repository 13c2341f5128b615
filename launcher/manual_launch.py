"""Hosts that join by themselves: the same command is typed on each of them, with ``--node-rank``, and no ssh is needed.

Node 0 leads: it listens on the master port, and is the launcher. The others connect to it, prove that they know the job's
secret and check that node 0 does (see secret.py), and then serve as agents do, with two differences. They run the command
that was typed on them, in their own folder and environment, and take from the leader only the variables that a worker needs
to find its place: a connection must not be enough to run programs on another host. And the leader tells them nothing else.

A stranger can only connect. It has GREETING_SECONDS to prove itself, and if many hosts are waiting to do so, the one that
has waited longest is sent away.
"""

from __future__ import annotations

import errno
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from zerorun.errors import LaunchError
from zerorun.watch.launch_environment import without_choices

from .agent import SILENT_SECONDS, Agent
from .agent_line import Line, Message
from .event_loop import signals_as_bytes
from .hosts import Host
from .job import Job
from .job_plan import THREADS_NAME, JobOptions, LaunchRequest, Rendezvous, WorkerCommand, build_plan
from .node import Listener, LocalNode, make_log_dir
from .remote import LONGEST_MESSAGE, Node, RemoteNode
from .secret import (
    GUEST,
    GUEST_WRITES,
    LEADER,
    LEADER_WRITES,
    SILENT_WAIT_SECONDS,
    Seal,
    is_nonce,
    new_nonce,
    proof,
    proves,
)
from .spare_hosts import HostPlaces
from .terminal_escapes import plain
from .this_host import bound_socket

JOIN_SECONDS = 300.0  # long, because the commands are typed one after the other
RETURN_SECONDS = 30.0  # for a host to join again before a restart
_RETRY_SECONDS = 0.5
_MOST_SLOTS = 4096
GREETING_SECONDS = 10.0  # for a host that has connected to prove itself and say what it is
MOST_PENDING = 32  # connected hosts that have not done so yet
_LONGEST_PROOF = 4096  # bytes
_LONGEST_ORDER = 1 << 24  # bytes of what the leader may say at a time
_MOST_WARNINGS = 8  # about hosts with another secret


class Challenger(Listener, Protocol):
    """Who has asked hosts to join."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def warn_of_stranger(self, address: str) -> None:
        """A host has come that does not know the secret."""


class GuestNode(RemoteNode):
    """A host that has connected by itself. Nothing is taken from it until it has proved that it knows the secret."""

    def __init__(
        self, address: str, connection: socket.socket, secret: str, selector: selectors.BaseSelector, job: Challenger
    ) -> None:
        super().__init__(f"guest {address}", selector, job, job.say)
        self.address = address
        self._secret, self._job = secret, job
        self._nonce = new_nonce()
        self._proved = False
        self._greet_until = time.monotonic() + GREETING_SECONDS
        self.attach(Line(connection.detach()))
        assert self.line is not None
        self.line.longest = _LONGEST_PROOF
        self.send("challenge", nonce=self._nonce)

    @property
    def pending(self) -> bool:
        return not self.facts and self.lost is None

    def tick(self, now: float) -> None:
        super().tick(now)
        if self.pending and now > self._greet_until:
            self.lose(f"did not say who it is within {GREETING_SECONDS:.0f} s")

    def _read(self) -> None:
        if self._proved or self.line is None:
            super()._read()
            return
        messages = self.line.receive()
        if len(messages) == 1 and not self.line.ended:
            self._prove(messages[0])
        elif messages or self.line.stray or self.line.ended:
            self.lose("it does not speak zerorun's protocol")

    def _prove(self, message: Message) -> None:
        assert self.line is not None
        theirs = message.get("nonce")
        if not is_nonce(theirs) or not proves(message.get("proof"), self._proof(GUEST, str(theirs))):
            self.send("refuse", text="this host has another secret than node 0. Remedy: give both the same.")
            self.lose("it does not know the job's secret")
            self._job.warn_of_stranger(self.address)
            return
        self.send("welcome", proof=self._proof(LEADER, str(theirs)))
        marks = (Seal(self._proof(role, str(theirs))).mark for role in (LEADER_WRITES, GUEST_WRITES))
        self.line.seal(*marks)
        self._proved = True
        self.line.longest = LONGEST_MESSAGE

    def _proof(self, role: str, theirs: str) -> str:
        return proof(self._secret, role, self._nonce, theirs)

    def pause(self, paused: bool) -> None:
        if self.facts:  # before its hello, no order may come between the challenge and its answer
            super().pause(paused)

    def _told(self, worker: WorkerCommand) -> Message:
        """Leave out the leader's command: a guest runs its own."""
        return {**asdict(worker), "argv": []}


class LeadingJob(Job):
    """The job of node 0. ``secret`` keeps strangers out, ``job_id`` the user's own hosts that belong to another job.

    ``invitation`` tells the user how the other hosts get the secret.
    """

    _may_share_machines = True  # a user may try it out with several nodes on one machine
    _can_reconnect = False  # a lost host must join again

    def __init__(
        self,
        request: LaunchRequest,
        options: JobOptions,
        node_count: int,
        port: int,
        *,
        job_id: str,
        secret: str,
        invitation: str,
    ) -> None:
        super().__init__(request, replace(options, master_port=None))
        self._names = [request.hosts[0].name, *(f"node {index}" for index in range(1, node_count))]
        self._job_id, self._secret, self._invitation = job_id, secret, invitation
        self._strangers: set[str] = set()
        self._listener = bound_socket(port)
        self._listener.setblocking(False)
        self._listener.listen(1024)
        self._port = port

    @property
    def _several(self) -> bool:
        return len(self._names) > 1

    def _connect(self, hosts: Sequence[Host]) -> None:
        missing = [Host(name) for name in self._names[1:]]
        if missing:
            more = f"{len(missing)} more {'host' if len(missing) == 1 else 'hosts'}"
            self.say(f"[zerorun] port {self._port} is open: waiting for {more} to join, {self._invitation}")
        super()._connect([*hosts, *missing])
        guests = [node for node in self._nodes if isinstance(node, RemoteNode)]
        joined = [Host(guest.name, tuple(range(guest.facts["slots"]))) for guest in guests]
        self._request = replace(self._request, hosts=(*hosts, *joined))
        self._places = HostPlaces([host.name for host in self._request.hosts], 0)

    def _open(self, hosts: Sequence[Host], seconds: float = JOIN_SECONDS) -> list[Node]:
        """Return the leader's own node and a guest for each other host. Any other host that connects is sent away."""
        own = [self._own_node(host.name) for host in hosts if host.name == self._names[0]]
        wanted = [host.name for host in hosts if host.name != self._names[0]]
        kept = list(self._nodes)
        seconds = RETURN_SECONDS if kept else seconds

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
        self._nodes = [node for node in self._nodes if node.lost is None or node.name in self._names]
        pending = [node for node in self._nodes if isinstance(node, GuestNode) and node.pending]
        if len(pending) >= MOST_PENDING:
            pending.pop(0).lose("too many hosts are waiting to join")
        try:
            connection, address = self._listener.accept()
        except OSError as error:  # the host has hung up again, or there are no file descriptors left
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                if pending:
                    pending[0].lose("too many have connected")
                else:
                    time.sleep(_RETRY_SECONDS)
            return
        guest = GuestNode(str(address[0]).removeprefix("::ffff:"), connection, self._secret, self._selector, self)
        self._nodes.append(guest)  # so that the loop ticks it

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

    def warn_of_stranger(self, address: str) -> None:
        """Tell the user about a host with a wrong secret: it may be one that belongs to the job."""
        if address not in self._strangers and len(self._strangers) < _MOST_WARNINGS:
            self._strangers.add(address)
            self.say(f"[zerorun] {address} does not know this job's secret and was sent away")

    def _place(self) -> dict[str, Any]:
        """Return no folder and no variables: a guest has its own, and must not learn those of the leader."""
        return {"grace": self._options.grace}

    def _close(self, status: int) -> int:
        self._listener.close()
        return super()._close(status)


class Guest(Agent):
    """The agent of a host that has joined by itself."""

    def __init__(self, line: Line, request: LaunchRequest, log_dir: Path | None, hello: dict[str, Any]) -> None:
        super().__init__(line)
        self._request, self._log_dir, self._hello = request, log_dir, hello
        # The leader may set only the variables that a plan sets, and not the threads that were asked for here.
        plan = build_plan(replace(request, omp_threads="1"), Rendezvous("", "", {request.hosts[0].name: ""}))
        self._allowed = set(plan.workers[0].env) - ({THREADS_NAME} if request.omp_threads else set())

    def _prepare(self, message: Message) -> None:
        self._grace = float(message["grace"])
        make_log_dir(self._log_dir)
        base = {**without_choices(os.environ), **self._request.exports}
        self._node = LocalNode(self._selector, self, base=base, grace=self._grace, log_dir=self._log_dir)
        _say("joined; all output appears where node 0 is")
        self._line.send({"is": "ready"})

    def _lose(self) -> None:
        _say("node 0 is gone, or has no place for this host")
        super()._lose()

    def hear(self, wakeup: int) -> None:
        """Report the signals that arrive at ``wakeup`` to the leader: a signal to this command is for the whole job."""

        def read() -> None:
            for number in os.read(wakeup, 64):
                self.on_signal(number)

        self._selector.register(wakeup, selectors.EVENT_READ, read)

    def _command(self, worker: dict[str, Any]) -> WorkerCommand:
        own = build_plan(self._request, Rendezvous("", "")).workers[worker["local_rank"]]
        env = {name: value for name, value in worker["env"].items() if name in self._allowed}
        return replace(super()._command(worker), argv=own.argv, env={**own.env, **env})


def join(
    request: LaunchRequest,
    log_dir: Path | None,
    address: str,
    port: int,
    node_rank: int | None,
    *,
    job_id: str,
    secret: str,
) -> int:
    """Serve the leader at ``address``, and return the exit status that it gives. Raises LaunchError."""
    line = enter(address, port, secret, say=_say)
    _say("connected to node 0: the job starts when all hosts have joined")
    slots = len(request.hosts[0].slots or ())
    hello = {"node_rank": node_rank, "job_id": job_id, "slots": slots}
    with signals_as_bytes(may_sleep=True) as wakeup:
        guest = Guest(line, request, log_dir, hello)
        guest.hear(wakeup)
        return guest.run()


def _say(text: str) -> None:
    print(f"[zerorun] {text}", file=sys.stderr, flush=True)


def enter(address: str, port: int, secret: str, *, say: Callable[[str], None] = lambda text: None) -> Line:
    """Return a sealed line to the leader. Tries for JOIN_SECONDS, as the leader may start last. Raises LaunchError.

    ``say``: is told once if that takes longer than SILENT_WAIT_SECONDS.
    """
    begun, was_there, told = time.monotonic(), False, False
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5.0)
            was_there = True
            line = Line(connection.detach())
            line.longest = _LONGEST_ORDER
            _shake_hands(line, secret, f"{address} port {port}")
            return line
        except OSError as error:
            if was_there and isinstance(error, ConnectionRefusedError):
                raise LaunchError(f"the job at {address} port {port} ended before this host could join.") from None
            waited = time.monotonic() - begun
            if waited > JOIN_SECONDS:
                raise LaunchError(
                    f"no leader at {address} port {port}: {error}. Remedy: start the command with --node-rank 0 there."
                ) from None
            if waited > SILENT_WAIT_SECONDS and not told:
                told = True
                say(
                    f"no leader at {address} port {port} yet ({error}); trying for {JOIN_SECONDS - waited:.0f} s more. Is "
                    "the command running there, with --node-rank 0?"
                )
        time.sleep(_RETRY_SECONDS)


def _shake_hands(line: Line, secret: str, place: str) -> None:
    """Prove that this host knows the secret, check that the leader does, and seal ``line``.

    Raises LaunchError, ConnectionError.
    """
    theirs, own = _hear(line, "challenge", place).get("nonce"), new_nonce()
    if not is_nonce(theirs):
        raise LaunchError(f"{place}: it is no leader of this version. Remedy: install the same zerorun everywhere.")

    def proof_of(role: str) -> str:
        return proof(secret, role, str(theirs), own)

    line.send({"is": "proof", "nonce": own, "proof": proof_of(GUEST)})
    if not proves(_hear(line, "welcome", place).get("proof"), proof_of(LEADER)):
        line.close()
        raise LaunchError(f"{place}: it does not know this job's secret, so it is not node 0. Remedy: see --master-addr.")
    line.seal(Seal(proof_of(GUEST_WRITES)).mark, Seal(proof_of(LEADER_WRITES)).mark)


def _hear(line: Line, order: str, place: str) -> Message:
    """Wait for the message ``order``, and return it. Raises LaunchError, ConnectionError."""
    deadline = time.monotonic() + SILENT_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        line.flush()
        if not select.select([line.reader], [], [], left)[0]:
            break
        for message in line.receive():
            if message.get("do") == order:
                return message
            if message.get("do") == "refuse":
                raise LaunchError(f"{place}: {plain(str(message.get('text')))}")
        if line.ended:
            line.close()
            raise ConnectionResetError("it has hung up")
    raise LaunchError(f"{place}: no answer within {SILENT_SECONDS:.0f} s. Remedy: see whether its job runs already.")
