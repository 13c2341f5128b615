"""SLURM on the test bed: a controller on host 0 and slurmd with munge on the first hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from harness import patience
from testbed import PACKAGES, Cluster

_CONF = """\
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
KillWait=5
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
JobRequeue=1
SlurmdParameters=config_overrides
"""
_START = """\
set -e
mkdir -p /run/slurm/state /run/slurm/spool /run/munge
mountpoint -q /etc/slurm || mount --bind {folder} /etc/slurm
munged --force --key-file={folder}/munge.key --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
  --log-file=/run/munge/munged.log --seed-file=/run/munge/seed --num-threads=2 2>/dev/null
[ $(hostname) != node0 ] || slurmctld -c
slurmd -c
"""


def missing() -> str | None:
    """Why there can be no SLURM here; None if there can."""
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(program) is None and not Path(f"/usr/sbin/{program}").exists():
            return f"needs {program} (Debian packages: {PACKAGES})"
    return None


class Slurm:
    """SLURM on the first ``count`` hosts of ``cluster``."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.cluster, self.count = cluster, count
        self.folder = cluster.folder / "slurm"

    def up(self) -> None:
        self.folder.mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.unlink(missing_ok=True)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        nodes = [f"NodeName=node{index} CPUs=4 RealMemory=2000 State=UNKNOWN" for index in range(self.count)]
        partition = "PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        (self.folder / "slurm.conf").write_text("\n".join([_CONF, *nodes, partition, ""]))
        os.makedirs("/etc/slurm", exist_ok=True)  # to mount on
        for host in self.cluster.hosts[: self.count]:
            # To files: daemons that keep a pipe open would keep us waiting for its end.
            start = _START.format(folder=self.folder)
            host.shell(f"({start}) > {host.folder}/slurm.log 2>&1 < /dev/null", capture_output=False)
        self.wait_until_idle()

    def wait_until_idle(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds * patience()
        while self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") != str(self.count):
            if time.monotonic() > deadline:
                raise TimeoutError(self.ask("sinfo"))
            time.sleep(0.1)

    def ask(self, *command: str) -> str:
        """What a SLURM command prints on host 0; empty if it fails."""
        full = self.cluster[0].command(["timeout", "5", *command])
        return subprocess.run(full, capture_output=True, text=True, check=False, timeout=20 * patience()).stdout.strip()

    def command(self, argv: Sequence[str], folder: Path) -> list[str]:
        return self.cluster[0].command(argv, folder)

    def down(self) -> None:
        """Stop the daemons; the hosts stay."""
        for host in self.cluster.hosts[: self.count]:
            pids = "$(cat /run/slurm/slurmd.pid /run/slurm/slurmctld.pid /run/munge/munged.pid 2>/dev/null)"
            host.shell(f'p="{pids}"; kill $p; for i in {{1..100}}; do kill -0 $p 2>/dev/null || exit 0; sleep 0.05; done')
