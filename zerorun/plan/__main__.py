"""Shows what each rank of a training would hold and send, without ranks: ``python -m zerorun.plan --help``."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from ..errors import TopologyError, ZerorunError
from ..log import print_lines
from ..memory.estimate import default_transport
from ..model_setup.checked_arguments import take_in
from ..model_setup.model_factory import model_from
from ..model_setup.planned_stages import planned_parts
from .byte_ledger import with_states
from .make_plan import planned_topology
from .optimizer_states import OptimizerStates
from .sharding_plan import ShardingPlan
from .written_plan import as_table, to_json


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zerorun.plan", description=__doc__)
    parser.add_argument("--model", required=True, metavar="MODULE:FACTORY", help="a function that returns the model")
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, JSON")
    parser.add_argument("--world-size", required=True, type=int, help="ranks")
    parser.add_argument("--rank", type=int, default=0, help="whose plan (default 0)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="on each host (default 8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the ranks (default cuda)")
    parser.add_argument("--json", action="store_true", help="the whole plan as JSON instead of a table")
    given = parser.parse_args(arguments)
    sys.path.insert(0, "")
    try:
        with redirect_stdout(sys.stderr):  # what the model's own code prints is no part of the plan
            plan = plan_of(given.model, given.config, given.world_size, given.rank, given.ranks_per_node, given.device)
    except (ZerorunError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print_lines((to_json(plan, indent=1) if given.json else as_table(plan)).splitlines())
    return 0


def plan_of(model: str, config: str, world_size: int, rank: int, ranks_per_node: int, device: str) -> ShardingPlan:
    """Make the plan of ``rank``, with the states of its optimizer. The model is made on the meta device, without values.

    Raises ConfigError, ModelError, PipelineError or TopologyError.
    """
    if world_size < 1:
        raise TopologyError(f"--world-size {world_size} must be at least 1.")
    with torch.device("meta"):
        module = model_from(model)
    wanted, raw = take_in(module, config, None, None, None, world_size)
    local = min(ranks_per_node, world_size)
    topology = planned_topology(wanted, world_size, local, rank)
    for part in planned_parts(module, wanted, raw, topology):
        if part.topology.pipe_rank == topology.pipe_rank:
            here = replace(part, topology=replace(topology, mesh=None))
            plan = here.plan(wanted, default_transport(device, world_size, local), device)
            return with_states(plan, OptimizerStates(here.raw, torch.device("cpu")))
    raise TopologyError(f"rank {rank} is in pipeline stage {topology.pipe_rank}, and the model is another one.")


if __name__ == "__main__":
    sys.exit(main())
