"""``deepspeed.utils.groups``: the ranks of the engine that was made last; before the first, all ranks are data-parallel."""

from __future__ import annotations

import torch.distributed as dist

from ..distributed.topology import Topology
from ..errors import TopologyError
from . import sequence_ranks
from .entry import newest_engine
from .mpu import Grid


def _topology() -> Topology | None:
    """That of the newest engine that has its process groups; None if there is none."""
    engine = newest_engine()
    return engine.topology if engine is not None and engine.topology.mesh is not None else None


def _ranks() -> Topology:
    return _topology() or sequence_ranks.chosen() or Topology(1, dist.get_world_size(), dist.get_rank())


def _grid() -> Grid:
    return Grid(_ranks())


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """The process group of the ranks with different data. Before the first engine, that of all ranks."""
    return dist.group.WORLD if _topology() is None else _grid().get_data_parallel_group()


def get_data_parallel_rank() -> int:
    return _grid().get_data_parallel_rank()


def get_data_parallel_world_size() -> int:
    return _grid().get_data_parallel_world_size()


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The process group of the ranks that divide each layer. The first call must come from all ranks."""
    return _grid().get_tensor_model_parallel_group()


def get_tensor_model_parallel_rank() -> int:
    return _grid().get_tensor_model_parallel_rank()


def get_tensor_model_parallel_world_size() -> int:
    return _grid().get_tensor_model_parallel_world_size()


def get_tensor_model_parallel_src_rank() -> int:
    return _grid().get_tensor_model_parallel_src_rank()


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_rank = get_tensor_model_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size


def get_sequence_parallel_group() -> dist.ProcessGroup | None:
    """The process group of the ranks that divide each sequence. The first call must come from all ranks."""
    topology = _topology()
    if topology is None and sequence_ranks.chosen() is not None:
        return sequence_ranks.get_sequence_parallel_group()
    return dist.group.WORLD if topology is None else topology.group("context")


def get_sequence_parallel_rank() -> int:
    return _ranks().context_rank


def get_sequence_parallel_world_size() -> int:
    return _ranks().context


def get_sequence_data_parallel_group() -> dist.ProcessGroup | None:
    """The process group of the ranks that sum gradients: with different data, or other parts of the same sequences."""
    topology = _topology()
    return dist.group.WORLD if topology is None else topology.group("data")


def get_sequence_data_parallel_rank() -> int:
    return _ranks().data_rank


def get_sequence_data_parallel_world_size() -> int:
    return _ranks().data_size


def get_expert_size() -> int:
    """How many ranks have different experts."""
    return _ranks().expert


def get_expert_size_name() -> str:
    """What DeepSpeed calls their groups: ``ep_size_4``."""
    return f"ep_size_{get_expert_size()}"


def _expert_ranks(group_name: str) -> Topology:
    """Raises TopologyError for groups of another size than that of ``expert_parallel.autoep_size``."""
    if group_name not in ("", get_expert_size_name()):
        raise TopologyError(
            f"there are no groups {group_name!r}: {get_expert_size()} ranks have different experts. Remedy: pass "
            f"{get_expert_size_name()!r}, or set expert_parallel.autoep_size."
        )
    return _ranks()


def get_expert_parallel_group(group_name: str = "") -> dist.ProcessGroup | None:
    """The process group of the ranks with different experts, after the first engine. All ranks must make the first call."""
    return _expert_ranks(group_name).group("expert")


def get_expert_parallel_rank(group_name: str = "") -> int:
    return _expert_ranks(group_name).expert_rank


def get_expert_parallel_world_size(group_name: str = "") -> int:
    return _expert_ranks(group_name).expert


def get_expert_data_parallel_group(group_name: str = "") -> dist.ProcessGroup | None:
    """The process group of the ranks with the same experts, after the first engine. All ranks must make the first call."""
    return _expert_ranks(group_name).group("expert_data")


def get_expert_data_parallel_rank(group_name: str = "") -> int:
    ranks = _expert_ranks(group_name)
    return ranks.ranks_along("expert_data").index(ranks.rank)


def get_expert_data_parallel_world_size(group_name: str = "") -> int:
    return _expert_ranks(group_name).size("expert_data")


def get_broadcast_src_rank() -> int:
    """The first rank of the world in this rank's data-parallel group."""
    return _grid().get_data_parallel_src_rank()


def one() -> int:
    """The number of ranks along an axis that is not divided."""
    return 1
