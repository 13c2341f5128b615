"""Has the launcher run the live check, reads what the ranks say, and ends it when nothing more comes.

A hang is a result like others: whoever calls :func:`run_live` gets what was measured until then, and which check was
running.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerorun.launcher.bootstrap import die_with_parent
from zerorun.launcher.foreign_options import without_torchrun_defaults
from zerorun.launcher.hosts import Host

from .reporter import FIRST, JOINING, OWN_MODULES, PAIR, unmark

TIME_LIMIT_SECONDS = 60.0
STALL_SECONDS = 6.0  # without a word from any rank: every check says when it begins, and takes a second or less
NCCL_STALL_SECONDS = 10.0  # it connects at first use, again for each group
JOIN_SECONDS = 20.0  # to find each other
START_SECONDS = 40.0  # until the last rank has been started
_END_SECONDS = 3.0  # for the launcher to end the workers, before it is killed
_GRACE_SECONDS = 1.0  # that the launcher gives the workers
_MOST_WORDS = 40  # lines of what launcher and workers write besides


@dataclass
class Live:
    """What a live check has brought so far. ``ended``: finished, failed, refused, hang or "time limit"."""

    hosts: Sequence[str]  # names by node number
    world_size: int
    ended: str = "finished"
    seconds: float = 0.0
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)  # names, in the order of the first rank that said so
    wrong: list[dict[str, Any]] = field(default_factory=list)  # rank, check, text
    errors: list[dict[str, Any]] = field(default_factory=list)  # rank, check, text
    pairs: list[dict[str, Any]] = field(default_factory=list)  # hosts (names), latency_us, gb_per_s, sure
    sizes: list[dict[str, Any]] = field(default_factory=list)  # name, bytes, us, bus_gb_per_s
    transport: dict[int, str] = field(default_factory=dict)  # by rank, among the ranks of its host
    began: dict[int, list[str]] = field(default_factory=dict)  # by rank: each check, in order
    done: set[int] = field(default_factory=set)  # ranks
    words: list[str] = field(default_factory=list)  # whatever else was written

    def take(self, line: str) -> bool:
        """Take in one line of output. True if a rank said something."""
        message = unmark(line)
        if message is None:
            if line.strip():
                self.words = [*self.words, line.rstrip()][-_MOST_WORDS:]
            return False
        self._take(int(message["rank"]), message)
        return True

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        match message:
            case {"begin": name}:
                self.began.setdefault(rank, []).append(name)
            case {"joined": found}:
                self.ranks[rank] = {**found, "host": self.hosts[found["node"]]}
            case {"compute": found}:
                self.ranks[rank] = {**self.ranks.get(rank, {}), **found}
            case {"checked": name, "wrong": text}:
                if name not in self.checked:
                    self.checked.append(name)
                if text is not None:
                    self.wrong.append({"rank": rank, "check": name, "text": text})
            case {"pair": found}:
                first, second = (self.hosts[node] for node in found.pop("hosts"))
                self.pairs.append({"hosts": [first, second], **found})
            case {"size": found}:
                self.sizes.append(found)
            case {"transport": name}:
                self.transport[rank] = name
            case {"error": text, "check": name}:
                self.errors.append({"rank": rank, "check": name, "text": text})
            case {"done": True}:
                self.done.add(rank)

    @property
    def patience(self) -> float:
        """Seconds that silence may last now."""
        running = [names[-1] for names in self.began.values()]
        if len(running) < self.world_size or "start" in running:
            return START_SECONDS
        if JOINING in running or FIRST in running:
            return JOIN_SECONDS
        return NCCL_STALL_SECONDS if any(found.get("backend") == "nccl" for found in self.ranks.values()) else STALL_SECONDS

    def as_json(self) -> dict[str, Any]:
        """All of it for findings, page and --json. ``furthest``: the check that ranks were in; ``behind``: other ranks'."""
        last = max(self.began.values(), key=_progress, default=["start"])
        running = {rank: names[-1] for rank, names in self.began.items() if rank not in self.done}
        return {
            "hosts": list(self.hosts),
            "world_size": self.world_size,
            "ended": self.ended,
            "seconds": round(self.seconds, 2),
            "furthest": last[-1],
            "silent": sorted(set(range(self.world_size)) - set(self.began)),
            "behind": {str(rank): name for rank, name in sorted(running.items()) if name != last[-1]},
            "ranks": [{"rank": rank, **found} for rank, found in sorted(self.ranks.items())],
            "transport": {str(rank): name for rank, name in sorted(self.transport.items())},
            "checked": self.checked,
            "wrong": self.wrong,
            "errors": self.errors,
            "pairs": self.pairs,
            "sizes": self.sizes,
            "words": self.words,
        }


def _progress(names: Sequence[str]) -> int:
    """How far a rank has come. Pairs of hosts do not count: not all ranks take part in them."""
    return sum(not name.startswith(PAIR) for name in names)


def run_live(
    hosts: Sequence[Host], command: Sequence[str], *, several: bool, quick: bool, seconds: float = TIME_LIMIT_SECONDS
) -> Live:
    """The live check on ``hosts``, which have slots. ``command``: the launcher with all options but hosts and module."""
    live = Live([host.name for host in hosts], sum(len(host.slots or ()) for host in hosts))
    with tempfile.TemporaryDirectory(prefix="zerorun-report-") as folder:
        exports = [f"--export={name}={value}" for name, value in OWN_MODULES.items()]
        worker = ["-m", "zerorun.report.live_worker", *(["--quick"] if quick else [])]
        options = _host_options(hosts, Path(folder)) if several else ["--nproc-per-node", str(live.world_size)]
        process = subprocess.Popen(
            [*command, f"--grace={_GRACE_SECONDS}", *exports, *options, *worker],
            env={**without_torchrun_defaults(os.environ), **OWN_MODULES},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is for this process, which then ends the launcher
            preexec_fn=die_with_parent,
        )
        start = time.monotonic()
        try:
            live.ended = _read(process, live, start, seconds)
        finally:
            _end(process)
            live.seconds = time.monotonic() - start
    return live


def _host_options(hosts: Sequence[Host], folder: Path) -> list[str]:
    """A hostfile of exactly ``hosts``, and a filter where not all of the first slots are meant."""
    lines, named = [], []
    for host in hosts:
        slots = host.slots or (0,)
        user, port = (f" user={host.user}" if host.user else ""), (f" port={host.port}" if host.port else "")
        lines.append(f"{host.name} slots={max(slots) + 1}{user}{port}\n")
        name = f"[{host.name}]" if ":" in host.name else host.name
        named.append(f"{name}:{','.join(map(str, slots))}")
    (folder / "hosts").write_text("".join(lines))
    partly = any(host.slots != tuple(range(len(host.slots or ()))) for host in hosts)
    return ["--hostfile", str(folder / "hosts"), *(["--include", "@".join(named)] if partly else [])]


def _read(process: subprocess.Popen[bytes], live: Live, start: float, seconds: float) -> str:
    """Read until the launcher has ended, or must be: how it ended."""
    rests: dict[int, bytes] = {}
    heard = start
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
            rests[stream.fileno()] = b""
        while selector.get_map():
            for key, _ in selector.select(0.2):
                chunk = os.read(key.fd, 1 << 16)
                *lines, rests[key.fd] = (rests[key.fd] + chunk).split(b"\n")
                if not chunk:
                    selector.unregister(key.fileobj)
                    lines = [rests[key.fd]]
                for line in lines:
                    if live.take(line.decode(errors="replace")):
                        heard = time.monotonic()
            now = time.monotonic()
            if now - heard > live.patience:
                return "hang"
            if now - start > seconds:
                return "hang" if now - heard > live.patience / 2 else "time limit"
    return _ending(live, process.wait())


def _ending(live: Live, status: int) -> str:
    if status == 0 and len(live.done) == live.world_size:
        return "finished"
    return "failed" if live.began else "refused"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the launcher end the workers on all hosts; kill it if it does not. Its guard then ends those of this host."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=_GRACE_SECONDS + _END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
