"""Hosts that join by themselves, played against strangers: who has no secret cannot join, read, stop or steer."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import resource
import selectors
import shlex
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import patience

from zerorun.errors import LaunchError
from zerorun.launcher import manual_launch
from zerorun.launcher import secret as secrets
from zerorun.launcher.agent_line import Line, encode
from zerorun.launcher.job_plan import WorkerCommand
from zerorun.launcher.remote import LONGEST_MESSAGE, RemoteNode
from zerorun.launcher.terminal_escapes import Cleaner, plain

SECRET = "correct horse battery staple"
HELLO = {
    "is": "hello",
    "version": "1",
    "machine": "m",
    "hostname": "h",
    "cores": [0],
    "slots": 1,
    "node_rank": 1,
    "job_id": "none",
}
# Levels of lists that JSON reads, and that a function that calls itself for each of them does not.
DEEP = 900 if sys.version_info < (3, 12) else 3000
Start = Callable[..., subprocess.Popen[str]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command of one host, and ends what a failing test leaves running."""
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    jobs: list[subprocess.Popen[str]] = []

    def start_host(
        rank: int, port: int, *options: str, secret: str | None = SECRET, is_pod: bool = False, **popen: object
    ) -> subprocess.Popen[str]:
        place = {"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port}
        given = [] if is_pod else [f"--{name}={value}" for name, value in place.items()]
        command = [sys.executable, "-m", "zerorun.launcher.cli", *given, *options, "train.py"]
        known = {} if secret is None else {"ZERORUN_JOB_SECRET": secret}
        known |= {f"PET_{name.upper()}": str(value) for name, value in place.items()} if is_pod else {}
        environment = {**os.environ, **known, "HF_TOKEN": "hf_taken"}
        streams: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **popen,
        }
        jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **streams))  # type: ignore[call-overload]
        return jobs[-1]

    yield start_host
    for job in jobs:
        if job.poll() is None:
            job.kill()
        job.communicate()


def knock(port: int) -> socket.socket:
    deadline = time.monotonic() + 20 * patience()
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5 * patience())
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "node 0 does not listen"
            time.sleep(0.02)


def say(connection: socket.socket, *messages: dict[str, object], **message: object) -> None:
    """In one piece: who hears the first may hang up before another could be sent."""
    connection.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in messages or [message]))


def hear_all(connection: socket.socket) -> bytes:
    """Everything that comes until the other end hangs up or says no more for a while."""
    connection.settimeout(3)
    heard = b""
    try:
        while chunk := connection.recv(1 << 16):
            heard += chunk
    except OSError:
        pass
    return heard


def assert_both_trained(leader: subprocess.Popen[str], guest: subprocess.Popen[str]) -> str:
    """What the leader said besides."""
    out, err = leader.communicate(timeout=30 * patience())
    assert leader.returncode == 0, err
    assert sorted(out.splitlines()) == ["[rank 1] rank 1 of 2", "rank 0 of 2"]
    assert guest.wait(20) == 0
    return err


# -- who knows no secret -----------------------------------------------------------------------------------------------


def test_a_stranger_takes_no_place_and_learns_nothing(start: Start) -> None:
    port = free_port()
    leader = start(0, port, "--export=HF_TOKEN")
    heard = b""
    for proof in (None, "00" * 32, "é", 5):
        with knock(port) as stranger:
            if proof is not None:
                say(stranger, **{"is": "proof", "nonce": "ab" * 32, "proof": proof})
            else:
                note: dict[str, object] = {"is": "note", "text": "\x1b]0;owned\x07\x1b[2J"}
                say(stranger, HELLO, note, {"is": "signal", "number": 15})
            heard += hear_all(stranger)
    err = assert_both_trained(leader, start(1, port))
    assert b"hf_taken" not in heard and b'"env"' not in heard and os.fsencode(os.getcwd()) not in heard
    assert "\x1b" not in err and "owned" not in err
    assert err.count("127.0.0.1 does not know this job's secret and was sent away") == 1


def test_a_host_with_another_secret_is_told_so(start: Start) -> None:
    port = free_port()
    leader = start(0, port)
    wrong = start(1, port, secret="another one of the same length")
    _, err = wrong.communicate(timeout=30 * patience())
    assert wrong.returncode == 2 and "has another secret than node 0. Remedy: give both the same." in err
    assert_both_trained(leader, start(1, port))


def test_connections_that_say_nothing_keep_nobody_out(start: Start) -> None:
    """More than the leader may have descriptors."""
    port = free_port()
    leader = start(0, port, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
    idle = [knock(port) for _ in range(90)]
    assert "Traceback" not in assert_both_trained(leader, start(1, port))
    for connection in idle:
        connection.close()


def test_a_silent_stranger_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerorun.launcher import manual_launch

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(manual_launch, "GREETING_SECONDS", 0.0)
    guest = manual_launch.GuestNode("127.0.0.1", ours, SECRET, selectors.DefaultSelector(), Silent())  # type: ignore[arg-type]
    guest.tick(time.monotonic() + 0.1)
    assert guest.lost is not None and not guest.pending
    theirs.close()


def test_a_false_leader_gets_no_host(start: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        guest = start(1, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            say(connection, do="challenge", nonce="ab" * 32)
            answer = json.loads(connection.recv(1 << 16))
            welcome = {"do": "welcome", "proof": answer["proof"]}  # the host's own words, back
            say(connection, welcome, {"do": "job", "grace": 1.0})
            _, err = guest.communicate(timeout=30 * patience())
    assert guest.returncode == 2 and "it does not know this job's secret, so it is not node 0" in err
    assert SECRET not in json.dumps(answer)


def test_nobody_on_the_way_can_add_change_or_repeat_a_line() -> None:
    key = secrets.proof(SECRET, secrets.LEADER_WRITES, "a", "b")
    for tamper in (
        lambda line: line + b'{"do": "kill"}\n',
        lambda line: line * 2,
        lambda line: line.replace(b"1", b"2", 99),
    ):
        left, right = socket.socketpair()
        sender, receiver = Line(left.detach()), Line(right.detach())
        sender.seal(secrets.Seal(key).mark, secrets.Seal(key).mark)
        receiver.seal(secrets.Seal(key).mark, secrets.Seal(key).mark)
        sender.send({"do": "ping"})
        assert receiver.receive() == [{"do": "ping"}]
        sender.send({"do": "ping", "t": 1})
        line = os.read(receiver.reader, 1 << 16)
        os.write(sender.writer, tamper(line))
        assert len(receiver.receive()) <= 1 and receiver.ended
        sender.close()
        receiver.close()


# -- the secret itself -------------------------------------------------------------------------------------------------


def test_pods_of_kubernetes_train_together(start: Start) -> None:
    """Where an operator says by torchrun's variables which pod is which."""
    port = free_port()
    leader, guest = start(0, port, is_pod=True), start(1, port, is_pod=True)
    assert "PET_NNODES=2, PET_NODE_RANK=0, PET_MASTER_ADDR=127.0.0.1" in assert_both_trained(leader, guest)


def test_a_host_keeps_its_own_number_of_threads(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['RANK'], os.environ['OMP_NUM_THREADS'])\n")
    port = free_port()
    leader, guest = (start(rank, port, f"--export=OMP_NUM_THREADS={7 + rank}") for rank in (0, 1))
    out, err = leader.communicate(timeout=30 * patience())
    assert sorted(out.splitlines()) == ["0 7", "[rank 1] 1 8"], err
    assert guest.wait(20) == 0


def test_a_file_that_node_0_makes_lets_all_start_at_once(start: Start, tmp_path: Path) -> None:
    port = free_port()
    guest = start(1, port, "--secret-file=job.secret", secret=None)
    err = assert_both_trained(start(0, port, "--secret-file=job.secret", secret=None), guest)
    made = tmp_path / "job.secret"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert made.read_text().strip() not in err and "with the secret in job.secret" in err


@pytest.mark.parametrize("mode", (0o640, 0o604, 0o620, 0o644))
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(mode)
    with pytest.raises(LaunchError, match=f"its mode is {mode:04o}, .* write it. Remedy: delete it, .* with mode 0600."):
        secrets.leaders_secret(file, {}, terminal=True)
    file.unlink()
    secrets.leaders_secret(file, {}, terminal=True)
    assert file.stat().st_mode & 0o777 == 0o600  # what the remedy promises


def test_files_that_are_no_secrets_are_refused(tmp_path: Path) -> None:
    file, link, fifo, short = (tmp_path / name for name in ("file", "link", "fifo", "short"))
    file.write_text(SECRET)
    file.chmod(0o600)
    assert secrets.leaders_secret(file, {"ZERORUN_JOB_SECRET": "x" * 20}, terminal=False) == (SECRET, False)
    link.symlink_to(file)
    os.mkfifo(fifo, 0o600)
    short.write_text("hunter2\n")
    short.chmod(0o600)
    for path, words in (
        (link, "it is a symbolic link"),
        (fifo, "no regular file"),
        (short, "this one has 7"),
        (tmp_path, "no regular"),
    ):
        with pytest.raises(LaunchError, match=words):
            secrets.guests_secret(path, {}, seconds=0)
    with pytest.raises(LaunchError, match="node 0 has not made it within 0 s"):
        secrets.guests_secret(tmp_path / "gone", {}, seconds=0)
    if os.geteuid() == 0:
        os.chown(file, 65534, -1)
        with pytest.raises(LaunchError, match="it belongs to user 65534"):
            secrets.leaders_secret(file, {}, terminal=True)


def test_a_host_that_waits_for_node_0_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to five minutes, for a file or for a port: once each, and not where it takes a moment."""
    for module in (secrets, manual_launch):
        monkeypatch.setattr(module, "SILENT_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(manual_launch, "JOIN_SECONDS", 1.5)
    port, told = free_port(), list[str]()
    with pytest.raises(LaunchError, match="has not made it within 1 s"):
        secrets.guests_secret(tmp_path / "gone", {}, seconds=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"[zerorun] --secret-file {tmp_path / 'gone'} is not there yet: node 0 makes it. Waiting for 1 s"
    )
    with pytest.raises(LaunchError, match=r"no leader at 127\.0\.0\.1"):
        manual_launch.enter("127.0.0.1", port, SECRET, say=told.append)
    (line,) = told
    assert line.startswith(f"no leader at 127.0.0.1 port {port} yet (") and line.endswith("with --node-rank 0?")


@pytest.mark.parametrize("rank", (0, 1))
def test_without_a_secret_nothing_starts_and_none_goes_into_a_log(start: Start, rank: int) -> None:
    job = start(rank, free_port(), secret=None)
    _, err = job.communicate(timeout=20 * patience())
    assert job.returncode == 2 and "--secret-file" in err and "ZERORUN_JOB_SECRET" in err


def test_a_terminal_shows_the_command_for_the_other_hosts(start: Start, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    leader = start(0, free_port(), secret=None, stderr=slave)
    os.close(slave)
    shown = ""
    while "train.py" not in shown:
        shown += os.read(master, 1 << 16).decode()
    words = shlex.split(re.search(r"(ZERORUN_JOB_SECRET=.*)\r\n", shown)[1])  # type: ignore[index]
    name, _, made = words[0].partition("=")
    assert name == "ZERORUN_JOB_SECRET" and len(made) >= 32 and words[1] == "zerorun"
    environment = {**os.environ, "ZERORUN_JOB_SECRET": made}
    command = [sys.executable, "-m", "zerorun.launcher.cli", *words[2:]]
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=30 * patience(), check=False).returncode == 0
    assert leader.wait(20) == 0
    os.close(master)


def test_the_secret_is_in_no_argument_list_and_no_worker(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import contextlib, glob, os\n"
        "said = b''\n"
        "for name in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    with contextlib.suppress(OSError), open(name, 'rb') as file:\n"  # of a process that has ended since
        "        said += file.read()\n"
        f"print({SECRET!r}.encode() in said, {SECRET!r} in str(dict(os.environ)))\n"
    )
    port = free_port()
    leader, guest = start(0, port), start(1, port)
    out, err = leader.communicate(timeout=30 * patience())
    assert sorted(out.splitlines()) == ["False False", "[rank 1] False False"], err
    assert guest.wait(20) == 0


# -- who knows it, and talks nonsense ----------------------------------------------------------------------------------


class Silent:
    """A job in which nothing may happen."""

    def say(self, text: str) -> None:
        raise AssertionError(text)

    on_note = on_signal = on_end = on_empty = on_output = say


def greeted(**facts: object) -> tuple[RemoteNode, socket.socket, selectors.BaseSelector]:
    """A node of which rank 1 is a worker, and the other end of its line."""
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    node = RemoteNode("node1", selector, Silent(), lambda text: None)  # type: ignore[arg-type]
    node.attach(Line(ours.detach()))
    say(theirs, **{**HELLO, **facts})
    node._read()
    assert node.facts
    node.start([WorkerCommand(1, 0, ("x",), {})])
    return node, theirs, selector


@pytest.mark.parametrize(
    "message",
    [
        {"is": "probed"},
        {"is": "probed", "interface": 5},
        {"is": "reserved", "port": "x"},
        {"is": "reserved", "port": 70000},
        {"is": "output", "rank": 0, "stream": "stdout", "data": "eA=="},
        {"is": "output", "rank": 1, "stream": "x", "data": ""},
        {"is": "output", "rank": [1], "stream": "stdout", "data": ""},
        {"is": "end", "rank": 0, "code": 0, "at": 0, "asked": True},
        {"is": "end", "rank": 1, "code": "x", "at": 0, "asked": True},
        {"is": "end", "rank": 1, "code": 1, "at": float("nan"), "asked": False},
        {"is": "end", "rank": 1, "code": 1, "at": 10**400, "asked": False},
        {"is": "empty", "unkillable": 5, "oom_kills": 0, "held": []},
        {"is": "empty", "unkillable": [], "oom_kills": 0, "held": ["x"]},
        {"is": "windows", "of": 5},
        {"is": "windows", "of": [[1, 0, 1, [1, 2], [1, 2, 3, 4, 5, 6, 7]]]},
        {"is": "windows", "of": [[1, 0, 1]]},
        {"is": "windows", "of": [[1, 0, "x", [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]]]},
        {"is": "note"},
        {"is": "note", "text": 5},
        {"is": "note", "text": "x", "deep": functools.reduce(lambda inside, _: [inside], range(DEEP), 0)},
        {"is": "pong", "t": "x", "now": 1},
        {"is": "signal", "number": 9},
        {"is": "trouble"},
        {"is": "unheard of"},
        {"is": None},
        {"is": [1]},
        {},
        HELLO,
    ],
)
def test_an_answer_that_cannot_be_meant_loses_the_host(message: dict[str, object]) -> None:
    node, theirs, _ = greeted()
    say(theirs, **message)
    node._read()
    assert node.lost == "what it sends cannot be understood" and not node.answers
    theirs.close()


def test_a_message_without_end_loses_the_host() -> None:
    node, theirs, _ = greeted()
    theirs.setblocking(False)
    sent = 0
    while node.lost is None:
        sent += theirs.send(b"x" * (1 << 16))
        node._read()
        assert sent <= LONGEST_MESSAGE + (1 << 18)
    theirs.close()


def test_texts_of_other_hosts_cannot_steer_the_terminal() -> None:
    said: list[str] = []
    node, theirs, _ = greeted(version="\x1b[31m2\x07")
    assert node.facts["version"] == "[31m2"
    heard: list[object] = []
    node._listener.on_note = said.append  # type: ignore[method-assign]
    node._listener.on_output = lambda *words: heard.append(words)  # type: ignore[method-assign]
    say(theirs, **{"is": "note", "text": "a\x1b]52;c;ZXZpbA==\x07\rb\u009b2J\u202e\nc"})
    say(theirs, **{"is": "output", "rank": 1, "stream": "stdout", "data": encode(b"\x1b]H\x07hi\n")})
    node._read()
    assert said == ["node1: a]52;c;ZXZpbA==b2J\nc"]
    assert heard == [(1, "stdout", b"hi\n")]
    theirs.close()


def test_ends_are_told_by_the_clock_of_this_host() -> None:
    """Which failure was first must not depend on when hosts were booted."""
    node, theirs, _ = greeted()
    heard: list[float] = []
    node._listener.on_end = lambda rank, code, at, asked: heard.append(at)  # type: ignore[method-assign]
    node.clock.ahead = 1000.0
    say(theirs, **{"is": "end", "rank": 1, "code": 1, "at": 1005.0, "asked": False})
    node._read()
    assert heard == [5.0]
    theirs.close()


def test_the_shortest_round_trip_tells_the_clock_best(monkeypatch: pytest.MonkeyPatch) -> None:
    node, theirs, _ = greeted()
    for here, sent, there in ((14.0, 10.0, 512.5), (21.0, 20.0, 520.5), (40.0, 30.0, 400.0)):
        monkeypatch.setattr("zerorun.launcher.remote.time.monotonic", lambda here=here: here)
        say(theirs, **{"is": "pong", "t": sent, "now": there})
        node._read()
    assert node.clock.ahead == 500.0
    theirs.close()


@pytest.mark.parametrize("step", (1, 3, 1000))
def test_output_keeps_colours_and_bars_and_nothing_else(step: int) -> None:
    kept = "\x1b[1;31mred\x1b[0m \r50%\x1b[K\n\x1b[A é\tx".encode()
    gone = b"\x1b]0;title\x07\x1b]52;c;eA==\x1b\\\x1b[2J\x1b[6n\x1bPq\x1b\\\x1b(0\x1bc\x07\x05\x0e\xc2\x9b"
    gone += b"\x1b[?1049h\x1b[3;4r"
    text = gone + kept + gone + b"end"
    cleaner = Cleaner()
    chunks = [cleaner.feed(text[at : at + step]) for at in range(0, len(text), step)]
    assert b"".join([*chunks, cleaner.feed(b"")]) == kept + b"end"
    assert Cleaner().feed(b"\x1b]" + b"x" * 10_000).count(b"\x1b") == 0
    assert plain({"a": ["\x1b[1m", 5]}) == {"a": ["[1m", 5]}
