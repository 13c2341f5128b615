"""Links: the time of a collective, from its bytes, its group and the links between the ranks of the group."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Cluster

# NCCL's own table (tuning.cc), in seconds: for LL, LL128 and Simple, the base, and a hop over NVLink and over the network.
_BASE = (6.6e-6, 14e-6, 8.4e-6)
_RING_NEAR, _RING_FAR = (0.6e-6, 1.9e-6, 3.4e-6), (2.7e-6, 4e-6, 14e-6)
_TREE_NEAR, _TREE_FAR = (0.6e-6, 1.25e-6, 4e-6), (5e-6, 8.5e-6, 14e-6)
_OF_BANDWIDTH = (0.5, 0.92, 1.0)
NETWORK = 0.92  # of the rate of the cards, which messages reach
NVLINK = 0.8  # of the data sheet, which gathers reach (361 of 450 GB/s)


@dataclass(frozen=True)
class RankGroup:
    """``size`` ranks that call a collective together, ``near`` of them in each node."""

    size: int
    near: int

    @classmethod
    def of(cls, cluster: Cluster, size: int, stride: int) -> RankGroup:
        """The group of ``size`` ranks whose neighbours are ``stride`` ranks apart."""
        return cls(size, max(1, min(size, max(cluster.per_node, cluster.gpu.domain) // stride)))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.near)


def bandwidth(cluster: Cluster, group: RankGroup) -> float:
    """Return the bytes per second and rank of a ring: NVLink, or this group's share of the cards of a node."""
    near = cluster.gpu.nvlink * NVLINK
    if group.nodes == 1:
        return near
    return min(near, group.near / cluster.per_node * cluster.nics * NETWORK)


def gather_seconds(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an all-gather of ``nbytes`` in all, or of a reduce-scatter of as many."""
    return _ring(cluster, group, nbytes, rounds=1)


def all_reduce_seconds(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an all-reduce of ``nbytes``: the fastest of ring and tree, with LL, LL128 and Simple."""
    if group.size == 1 or not nbytes:
        return 0.0
    if cluster.gpu.sum_rate and group.nodes == 1:
        return cluster.gpu.sum_latency + 2 * nbytes * (group.size - 1) / group.size / cluster.gpu.sum_rate
    ring = _ring(cluster, group, nbytes, rounds=2)
    if cluster.gpu.latency:
        return ring
    rate, depth = bandwidth(cluster, group), 2 * max(group.nodes - 1, 1).bit_length()
    tree = min(
        base + 2 * (group.near - 1) * near + depth * far + 2 * nbytes / (rate * part)
        for base, near, far, part in zip(_BASE, _TREE_NEAR, _TREE_FAR, _OF_BANDWIDTH, strict=True)
    )
    return min(ring, tree)


def exchange_seconds(cluster: Cluster, group: RankGroup, nbytes: float) -> float:
    """Return the seconds of an all-to-all in which each rank has ``nbytes``, equally many for each, itself among them.

    Ranks send to all others at once: over NVLink to those of their node, and over their own card to the rest.
    """
    if group.size == 1 or not nbytes:
        return 0.0
    near_bytes, far_bytes = (nbytes * count / group.size for count in (group.near - 1, group.size - group.near))
    near_rate, far_rate = cluster.gpu.nvlink * NVLINK, cluster.nics / cluster.per_node * NETWORK
    moved = max(near_bytes / near_rate, far_bytes / far_rate)
    if cluster.gpu.latency:
        return cluster.gpu.latency + moved
    hops = _RING_NEAR if group.nodes == 1 else _RING_FAR
    return min(base + hop + moved / part for base, hop, part in zip(_BASE, hops, _OF_BANDWIDTH, strict=True))


def _ring(cluster: Cluster, group: RankGroup, nbytes: float, rounds: int) -> float:
    if group.size == 1 or not nbytes:
        return 0.0
    rate, moved = bandwidth(cluster, group), rounds * nbytes * (group.size - 1) / group.size
    if cluster.gpu.latency:
        return rounds * cluster.gpu.latency + moved / rate
    far_hops = rounds * (group.nodes - 1)
    near_hops = rounds * (group.size - 1) - far_hops
    return min(
        base + near_hops * near + far_hops * far + moved / (rate * part)
        for base, near, far, part in zip(_BASE, _RING_NEAR, _RING_FAR, _OF_BANDWIDTH, strict=True)
    )
