"""The supervisor of a remote host: carries out the launcher's orders, and ends everything when the line to it is cut.

    python -m zerorun.launcher.agent      started by the launcher through ssh, srun, ...; stdin and stdout are the line

An order of the launcher has the key ``do``, a message of the agent the key ``is``:

| do        | with                             | the agent then                                                       |
|-----------|----------------------------------|----------------------------------------------------------------------|
| job       | cwd, env, script, log_dir, grace | changes folder, checks it and the script, answers ``ready``          |
| reserve   | port or null, listen             | holds a port of this host, listens for probes, answers ``reserved``  |
| probe     | address, port                    | connects there, answers ``probed`` with the interface                |
| start     | workers                          | starts them; sends ``output``, ``end`` and at last ``empty``         |
| interrupt, terminate, kill, pass | signal, grace | see node.py                                                      |
| pause     | on                               | stops or goes on reading the workers' output                         |
| stacks    | rank                             | sends ``stacks``, what the threads of a worker are doing             |
| slow      | rank, thousandths                | tells rank 0 that this rank is slow, for the monitors                |
| warm      | workers                          | keeps a process in reserve for each of them                          |
| ping      | t                                | answers ``pong`` with t and its own clock                            |
| leave     | status                           | ends what still runs, and exits with that status                     |
| refuse    | text                             | prints the text and exits with status 2                              |

Unasked it sends ``seen`` of workers that do not move, ``windows``: what all were busy in some steps, and
``progress``: how far its first worker is. A failure before the workers run is reported as ``trouble``, with a text. A
launcher from which nothing has been heard for SILENT_SECONDS is taken for dead: if its host has gone down, the kernel would
notice only after many minutes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerorun.errors import LaunchError
from zerorun.watch.board import RankProgress
from zerorun.watch.launch_environment import without_choices
from zerorun.watch.slow_ranks import Sparing, Window

from .agent_line import UNHEARD_OF, Line, Message, encode
from .event_loop import Turns, dispatch
from .job_plan import WorkerCommand, python_folder_first
from .node import LocalNode, make_log_dir
from .terminal_escapes import plain
from .this_host import bound_socket, describe_host, probe
from .worker_boards import Seen

PING_SECONDS = 1.0
SILENT_SECONDS = 6.0
_CONGESTED = 1 << 18  # bytes that the launcher has not taken yet; beyond this, the workers' output is not read
HURRY_SECONDS = 0.005  # between two attempts to write what the other end has not taken yet
LOST_STATUS = 70  # the line to the launcher was cut


class _BoardsOnLine:
    """Tells the launcher what boards say."""

    def __init__(self, line: Line) -> None:
        self._line, self._sparing = line, Sparing()

    def on_seen(self, rank: int, seen: Seen | None) -> None:
        self._line.send({"is": "seen", "rank": rank, "seen": None if seen is None else asdict(seen)})

    def on_windows(self, windows: list[Window]) -> None:
        told = self._sparing.of(windows, time.monotonic())
        if told:
            self._line.send({"is": "windows", "of": told})

    def on_progress(self, rank: int, progress: RankProgress) -> None:
        self._line.send({"is": "progress", "rank": rank, "of": asdict(progress)})

    def on_stacks(self, rank: int, text: str) -> None:
        self._line.send({"is": "stacks", "rank": rank, "text": text})


class Agent:
    """Serves one launcher. ``run`` returns the exit status."""

    def __init__(self, line: Line) -> None:
        self._line, self.hangs = line, _BoardsOnLine(line)
        self._selector = selectors.DefaultSelector()
        self._selector.register(line.reader, selectors.EVENT_READ, self._read)
        self._node: LocalNode | None = None
        self._holder: socket.socket | None = None
        self._heard, self._turns = time.monotonic(), Turns()
        self._status: int | None = None  # the exit status, once it is known
        self._paused = False
        self._grace = 5.0
        self._lost = False
        self._hello: dict[str, Any] = {}  # more fields of the hello message

    def run(self) -> int:
        self._line.send({"is": "hello", **describe_host(os.environ), **self._hello})
        while True:
            node = self._node
            if (self._status is not None or self._lost) and (node is None or not node.busy):
                if node is not None:
                    node.end_now()
                self._hang_up()
                return LOST_STATUS if self._status is None else self._status
            patience = node.patience() if node is not None else 1.0
            dispatch(self._selector, HURRY_SECONDS if self._line.waiting else patience)
            self._line.flush()
            now = time.monotonic()
            self._heard = min(now, self._heard + self._turns.held_up_s(now))
            if not self._lost and (self._line.ended or now - self._heard > SILENT_SECONDS):
                self._lose()
            if node is not None:
                node.tick(now)
                node.pause(self._paused or self._line.waiting > _CONGESTED)

    def _lose(self) -> None:
        self._lost = True
        self._selector.unregister(self._line.reader)
        if self._node is not None and self._node.busy:
            self._node.terminate(self._grace)

    def _hang_up(self) -> None:
        deadline = time.monotonic() + 1.0
        while self._line.waiting and time.monotonic() < deadline:
            self._line.flush()
            time.sleep(0.01)
        self._line.close()

    def _read(self) -> None:
        for message in self._line.receive():
            self._heard = time.monotonic()
            try:
                self._obey(message)
            except LaunchError as error:
                self._line.send({"is": "trouble", "text": str(error)})
            except UNHEARD_OF:
                self._lose()
                return

    # -- what the launcher says --------------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        match message["do"]:
            case "job":
                self._prepare(message)
            case "reserve":
                self._reserve(message["port"], listen=message["listen"])
            case "probe":
                self._line.send({"is": "probed", "interface": probe(message["address"], message["port"])})
            case "start":
                self._start(message["workers"])
            case "warm" if self._node is not None:
                self._node.warm_workers.keep([self._command(worker) for worker in message["workers"]])
            case "pause":
                self._paused = message["on"]
            case "ping":
                self._line.send({"is": "pong", "t": message["t"], "now": time.monotonic()})
            case "leave":
                self._status = message["status"]
                if self._node is not None:
                    self._node.terminate(self._grace)
            case "refuse":
                print(f"zerorun: error: {plain(message['text'])}", file=sys.stderr)
                self._status = 2
            case order if self._node is not None:
                self._signal(self._node, order, message)

    def _signal(self, node: LocalNode, order: str, message: Message) -> None:
        match order:
            case "interrupt":
                node.interrupt(message["signal"], message["grace"])
            case "terminate":
                node.terminate(message["grace"])
            case "kill":
                node.kill()
            case "pass":
                node.pass_on(message["signal"])
            case "stacks":
                node.ask_stacks(message["rank"])
            case "slow":
                node.show_slow(message["rank"], message["thousandths"])

    def _prepare(self, message: Message) -> None:
        try:
            os.chdir(message["cwd"])
        except OSError as error:
            raise LaunchError(
                f"cannot change to {message['cwd']!r}: {error.strerror}. Remedy: start in a folder that is on all hosts."
            ) from None
        script = message["script"]
        if script is not None and not os.path.exists(script):
            raise LaunchError(f"script not found: {script!r} in {message['cwd']!r}. Remedy: put it on all hosts.")
        base = python_folder_first({**without_choices(os.environ), **message["env"]}, sys.executable)
        self._grace = message["grace"]
        log_dir = None if message["log_dir"] is None else Path(message["log_dir"])
        make_log_dir(log_dir)
        self._node = LocalNode(self._selector, self, base=base, grace=self._grace, log_dir=log_dir)
        self._line.send({"is": "ready"})

    def _reserve(self, port: int | None, *, listen: bool) -> None:
        self._release()
        self._holder = bound_socket(port)
        if listen:
            self._holder.listen(1024)
        self._line.send({"is": "reserved", "port": self._holder.getsockname()[1]})

    def _release(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def _start(self, workers: list[dict[str, Any]]) -> None:
        assert self._node is not None
        if self._holder is not None:
            with contextlib.suppress(OSError):  # in a job of one host it does not listen
                self._holder.shutdown(socket.SHUT_RDWR)  # no longer listens, but keeps the port
        self.hangs = _BoardsOnLine(self._line)  # windows are counted anew
        self._node.start([self._command(worker) for worker in workers])

    def _command(self, worker: dict[str, Any]) -> WorkerCommand:
        return WorkerCommand(**{**worker, "argv": tuple(worker["argv"]), "cores": tuple(worker["cores"])})

    # -- what the workers do -----------------------------------------------------------------------------------------

    def on_output(self, rank: int, stream: str, chunk: bytes) -> None:
        self._line.send({"is": "output", "rank": rank, "stream": stream, "data": encode(chunk)}, later=True)

    def on_end(self, rank: int, returncode: int, at: float, asked: bool) -> None:
        self._line.send({"is": "end", "rank": rank, "code": returncode, "at": at, "asked": asked})

    def on_empty(self, unkillable: list[int], oom_kills: int, held: list[int]) -> None:
        self._release()
        self._line.send({"is": "empty", "unkillable": unkillable, "oom_kills": oom_kills, "held": held}, later=True)

    def on_note(self, text: str) -> None:
        self._line.send({"is": "note", "text": text})

    def on_signal(self, number: int) -> None:
        """Report the signal to the launcher, which passes it on to all nodes. Without one, interrupt these workers."""
        if not self._line.ended:
            self._line.send({"is": "signal", "number": number})
        elif self._node is not None:
            self._node.interrupt(number, self._grace)


def main() -> int:
    """Serve the launcher on copies of stdin and stdout, so that workers and libraries cannot disturb the line."""
    os.environ.pop("PYTHONSAFEPATH", None)  # it was for this program only
    reader, writer = os.dup(0), os.dup(1)
    os.write(writer, b"\n")  # a login shell may have printed an unfinished line
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    # The launcher's signals come over the line. Those that a scheduler sends to every process are for the workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, lambda *_: None)
    return Agent(Line(reader, writer)).run()


if __name__ == "__main__":
    sys.exit(main())
