"""``deepspeed.launcher.runner``: what scripts that start jobs take from it. Needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import LaunchError
from ..launcher.cli import main as launch
from ..launcher.hosts import Host, parse_hostfile, select
from ..launcher.job_plan import EXPORTED_NAMES, EXPORTED_PREFIXES
from ..log import warn_once

DLTS_HOSTFILE = "/job/hostfile"
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
EXPORT_ENVS = [*EXPORTED_PREFIXES, *EXPORTED_NAMES]  # how the variables begin that go to other hosts; scripts add to it


def main(args: Sequence[str] | None = None) -> None:
    """Launch, as the ``deepspeed`` command of an installed DeepSpeed does, with the command line ``args``.

    Raises SystemExit with the status of a job that fails or is refused, as DeepSpeed does: callers go on after it.
    """
    added = tuple(start for start in EXPORT_ENVS if start not in (*EXPORTED_PREFIXES, *EXPORTED_NAMES))
    exports = [f"--export={name}" for name in os.environ if added and name.startswith(added)]
    status = launch([*exports, *(sys.argv[1:] if args is None else args)], local_rank_arg=True)
    if status:
        sys.exit(status)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return name of a host -> number of its slots, in the order of the file; None, with a warning, if there is no file.

    Raises LaunchError for what is no hostfile, or does not say the slots of a host.
    """
    path = Path(hostfile_path)
    if not path.is_file():
        warn_once(f"there is no hostfile {hostfile_path}: only this host is used.")
        return None
    found = {}
    for host in parse_hostfile(path.read_text(encoding="utf-8-sig"), hostfile_path):
        if host.slots is None:
            raise LaunchError(
                f"{hostfile_path}: the slots of {host.name!r} are not known. Remedy: add slots=N to its line."
            )
        found[host.name] = len(host.slots)
    return found


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Return name of a host -> its slots that a filter leaves. Raises LaunchError, as ``--include`` and ``--exclude`` do.

    ``resource_pool``: as ``fetch_hostfile`` has returned it. A filter is empty, or has DeepSpeed's grammar.
    """
    hosts = [Host(name, tuple(range(count))) for name, count in resource_pool.items()]
    return {host.name: list(host.slots or ()) for host in select(hosts, inclusion, exclusion)}
