"""Supervisors for ranks that torchrun or srun has started: nobody reads their boards, unless they see to it.

[Note: who watches]
The first rank of each host starts a process that reads the boards of all ranks there (launcher/sidecar.py). Of several
hosts, that of rank 0 judges, and the others tell it what they see. The first ranks let each other know where it listens,
and a secret, by the store at which all ranks meet in any case.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from .launch_environment import is_task_of_several, rank_in, world_size_in

_BACKLOG = 1024


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def started_by_another(environment: Mapping[str, str]) -> bool:
    """True in a rank of several that torchrun or srun has started."""
    return world_size_in(environment) > 1 and _local_rank(environment) is not None


def begin_alone() -> None:
    """Have the ranks of this host watched, if this is the first of them. All ranks are here."""
    if _local_rank(os.environ) == 0:
        _start({"world_size": world_size_in(os.environ)})


def begin_together(store: Store, address: str) -> None:
    """Have the ranks of all hosts watched, if this is the first one here. ``address``: that of rank 0's host."""
    order: dict[str, Any] = {"world_size": world_size_in(os.environ)}
    if rank_in(os.environ) == 0:
        try:
            listener, secret = _listener(), secrets.token_hex(32)
        except OSError:
            refuse(store)
            return
        with listener:
            store.set(_key(), f"{listener.getsockname()[1]} {secret}")
            _start({**order, "listener": listener.fileno(), "secret": secret}, listener.fileno())
    elif _local_rank(os.environ) == 0:
        told = store.get(_key()).decode().split()
        if told:
            _start({**order, "address": address, "port": int(told[0]), "secret": told[1]})


def refuse(store: Store) -> None:
    """On rank 0: nobody watches the ranks of all hosts. Else others would wait for the word of it."""
    store.set(_key(), "")


def _key() -> str:
    return f"supervisors of round {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _start(order: Mapping[str, Any], *files: int) -> None:
    command = [sys.executable, "-m", "zerorun.launcher.sidecar"]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    own = {**os.environ, "PYTHONSAFEPATH": "1"}  # the current folder may hold a queue.py
    process = subprocess.Popen(command, env=own, stdin=pipe, stdout=null, start_new_session=True, pass_fds=files)
    assert process.stdin is not None
    with process.stdin as line:  # what is in the environment, other programs of this rank would see
        line.write(json.dumps({**order, "starter": os.getpid()}).encode())
    _started.append(process)


def _local_rank(environment: Mapping[str, str]) -> int | None:
    """The number of this rank on its host; None if neither torchrun nor srun has started it."""
    if "TORCHELASTIC_USE_AGENT_STORE" in environment:  # zerorun sets the other variables of torchrun
        return int(environment["LOCAL_RANK"]) if "LOCAL_WORLD_SIZE" in environment else None
    if is_task_of_several(environment):
        return int(environment.get("SLURM_LOCALID", 0))
    return None


_started: list[subprocess.Popen[bytes]] = []  # so that it is not reaped while the rank runs
