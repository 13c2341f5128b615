"""Real hosts on one machine: Linux namespaces with a network, an sshd and, where asked, SLURM daemons of their own.

A host is one process tree: PID 1 is a shell in new network, host name, process, mount and IPC namespaces. When PID 1 is
killed the kernel ends the whole host, so nothing has to be cleaned up in detail. The hosts hang on a bridge in a namespace
of its own; the machine's network is never touched. Folders are shared by all hosts except /run, /dev/shm, /etc/ssh and the
hosts' own ``local`` folder. Needs root and the Debian packages in PACKAGES.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness import patience

PACKAGES = "openssh-server iproute2 procps slurm-wlm munge"
NETWORK = "10.77.0"  # only inside the namespaces
_FIRST = 10  # last byte of the first host's address
_AS_ONE = ("--fork", "--kill-child=KILL")  # what unshare starts ends with it
ROOT = Path(__file__).parents[2]

_INIT = """\
hostname "$1"
mount -t tmpfs tmpfs /run && mkdir -p /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/etc_ssh" /etc/ssh
mount --bind "$3/hosts" /etc/hosts
mount --bind "$3/nsswitch.conf" /etc/nsswitch.conf
mkdir -p "$3/local" && mount --bind "$2/local" "$3/local"
# What the user's shell does first takes time, and a host that crashes in it may leave a lock for all others.
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc
while [ ! -e "$2/plugged" ]; do sleep 0.01; done
/usr/sbin/sshd -f /etc/ssh/sshd_config -E /run/sshd.log
: > "$2/up"
trap 'exit 0' TERM
while :; do sleep 1000 & wait $!; done
"""
_SSHD = """\
Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 100:30:200
"""
_SSH = """\
Host node*
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
"""


def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if sys.platform != "linux":
        return "needs Linux namespaces"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    for program in ("/usr/sbin/sshd", "ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"needs {program} (Debian packages: {PACKAGES})"
    probe = ["unshare", "--net", "--uts", "--pid", "--mount", "--ipc", "--fork", "ip", "link", "add", "a0", "type", "veth"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return "this kernel or container allows no network namespaces"
    return None


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds * patience()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """One host of the cluster."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster, self.index, self.name = cluster, index, f"node{index}"
        self.folder = cluster.folder / self.name
        self.address = f"{NETWORK}.{_FIRST + index}"
        self._outer: subprocess.Popen[bytes] | None = None
        self.pid = 0  # of its PID 1, as seen from outside

    def boot(self) -> None:
        for marker in ("plugged", "up"):
            (self.folder / marker).unlink(missing_ok=True)
        namespaces = ["unshare", "--net", "--uts", "--pid", "--mount", "--ipc", "--mount-proc", *_AS_ONE]
        init = ["bash", "-c", _INIT, "init", self.name, str(self.folder), str(self.cluster.folder)]
        with open(self.folder / "init.log", "ab") as log:
            self._outer = subprocess.Popen(
                [*namespaces, *init], stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )
        self.pid = _only_child(self._outer.pid)
        # A fixed MAC address, so that the others' tables stay right when the host comes back.
        mac, port = f"02:00:00:00:00:{_FIRST + self.index:02x}", f"v{self.name}"
        self.cluster.on_switch(
            f"ip link del {port} 2>/dev/null; "
            f"ip link add name {port} type veth peer name eth0 address {mac} netns {self.pid} && "
            f"ip link set {port} master br0 up"
        )
        self.shell(f"ip link set lo up; ip addr add {self.address}/24 dev eth0; ip link set eth0 up")
        (self.folder / "plugged").touch()

    def wait_until_up(self) -> None:
        wait_for((self.folder / "up").exists, 20, f"{self.name} comes up")

    def command(self, argv: Sequence[str], folder: Path | None = None) -> list[str]:
        """``argv`` as a command that runs on this host."""
        place = [] if folder is None else [f"--wd={folder}"]
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-p", "-m", "-i", *place, "--", *argv]

    def shell(self, script: str, **options: object) -> subprocess.CompletedProcess[str]:
        settings = {"capture_output": True, "text": True, "check": True, "timeout": 60, **options}
        return subprocess.run(self.command(["bash", "-c", script]), **settings)  # type: ignore[call-overload, no-any-return]

    def cut(self) -> None:
        """From now on packets vanish, in both directions, without a word."""
        self.cluster.on_switch(f"ip link set v{self.name} nomaster")

    def heal(self) -> None:
        self.cluster.on_switch(f"ip link set v{self.name} master br0 up")

    @contextlib.contextmanager
    def delayed(self, milliseconds: float) -> Iterator[None]:
        """Every packet to and from this host takes so much longer."""
        port, near, far = f"v{self.name}", f"d{self.name}", f"e{self.name}"
        self.cluster.on_switch(
            f"ip link add name {near} type veth peer name {far}; ip link set {near} up; ip link set {far} master br0 up; "
            f"ip link set {port} nomaster"
        )
        command = [sys.executable, str(Path(__file__).with_name("delay.py")), port, near, str(milliseconds)]
        relay = subprocess.Popen(self.cluster.switch_command(command), stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        relay.stdout.readline()
        try:
            yield
        finally:
            relay.terminate()
            relay.communicate()
            self.cluster.on_switch(f"ip link del {near}; ip link set {port} master br0 up")

    def crash(self) -> None:
        """All processes end; the kernel still closes their connections."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def power_off(self) -> None:
        """All processes end, and nobody hears of it."""
        self.cut()
        self.crash()

    def _reap(self) -> None:
        if self._outer is not None:
            self._outer.wait(10)
            self._outer = None

    @property
    def is_up(self) -> bool:
        return self._outer is not None


class Cluster:
    """``count`` hosts node0, node1, ... with their files under ``folder``, which must be short-lived and private."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.hosts = [Host(self, index) for index in range(count)]
        self._switch: subprocess.Popen[bytes] | None = None

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def up(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(self.folder / "id"))
        names = [f"{host.address} {host.name}" for host in self.hosts]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        for host in self.hosts:
            self._make_keys(host)
        keeper = ["unshare", "--net", *_AS_ONE, "sleep", "infinity"]
        self._switch = subprocess.Popen(keeper, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        self._switch_pid = _only_child(self._switch.pid)
        self.on_switch("ip link set lo up; ip link add name br0 type bridge; ip link set br0 up")
        for host in self.hosts:
            host.boot()
        for host in self.hosts:
            host.wait_until_up()

    def _make_keys(self, host: Host) -> None:
        ssh = host.folder / "etc_ssh"
        ssh.mkdir(parents=True)
        (host.folder / "local").mkdir()
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", str(ssh / "ssh_host_ed25519_key"))
        shutil.copy(self.folder / "id.pub", ssh / "authorized_keys")
        (ssh / "sshd_config").write_text(_SSHD)
        (ssh / "ssh_config").write_text(_SSH.format(folder=self.folder))
        public = (ssh / "ssh_host_ed25519_key.pub").read_text().split()[:2]
        with open(self.folder / "known_hosts", "a") as known:
            known.write(" ".join([f"{host.name},{host.address}", *public]) + "\n")

    def switch_command(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self._switch_pid), "-n", *argv]

    def on_switch(self, script: str) -> None:
        _run(*self.switch_command(["bash", "-c", script]))

    def down(self) -> None:
        for host in self.hosts:
            if host.is_up:
                host.crash()
        if self._switch is not None:
            os.kill(self._switch_pid, signal.SIGKILL)
            self._switch.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def heal(self) -> None:
        """All hosts up and reachable again."""
        for host in self.hosts:
            if not host.is_up:
                host.boot()
            host.heal()
            host.wait_until_up()


def processes(marker: str) -> list[int]:
    """Living processes, on all hosts and outside, with ``marker`` in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if marker.encode() in text and state not in "ZX":
                found.append(int(entry.name))
    return found


def _only_child(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    wait_for(lambda: children.read_text().split(), 10, "unshare forks")
    return int(children.read_text().split()[0])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path
