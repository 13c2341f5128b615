"""The topology of the job that runs: ranks tell one another how many of them are on their hosts.

Ranks that each went by what they know of their own host would make different groups, and wait for one another for ever.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from ..config.parse import Config
from ..distributed.topology import Topology
from ..distributed.transport.world import gather_values
from ..plan.make_plan import planned_topology
from ..watch.launch_environment import told_ranks_here


def topology_of_job(config: Config) -> Topology:
    """Return the topology that ``config`` asks for, without process groups. All ranks must call it.

    Raises TopologyError, on all ranks alike, if the degrees do not divide the ranks, or hosts cut them.
    """
    world_size = dist.get_world_size()
    found = gather_values((told_ranks_here(world_size), socket.gethostname()))
    return planned_topology(config, world_size, sizes_of_hosts(found), dist.get_rank())


def sizes_of_hosts(found: Sequence[tuple[int | None, str]]) -> list[int]:
    """Return the numbers of ranks on hosts, of what ranks know: how many are with them, and the name of their host.

    The name counts only where a launcher has not told every rank how many there are.
    """
    told = [here for here, _ in found if here is not None]
    if len(told) < len(found):
        return list(Counter(name for _, name in found).values())
    sizes = [min(here, left) for here, ranks in Counter(told).items() for left in range(ranks, 0, -here)]
    return sorted(sizes, reverse=True)
