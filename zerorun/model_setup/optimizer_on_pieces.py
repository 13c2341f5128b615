"""The optimizer that a script or a configuration asks for, over the pieces of flat buffers that this rank updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..distributed.transport.communicator import Communicator
from ..ops.rounding import MasterFormat
from ..ops.single_pass import SinglePassOptimizer
from ..optim.muon import Muon
from ..optim.optimizer_needs import give_overrides, overrides_of
from ..optim.optimizers import build_optimizer, split_state, watched
from ..optim.parameter_parts import PartsOptimizer
from ..optim.requested_optimizer import RawOptimizer
from ..plan.sharding_plan import ShardingPlan
from ..zero.matrix_updates import MatrixUpdates
from ..zero.optimizer_pieces import OptimizerPiece, build_pieces
from ..zero.part_sums import PartSums
from ..zero.sharded_optimizer import PiecesInFp32, ShardedOptimizer
from ..zero.unit import Unit, links_of


def shard_optimizer(
    raw: RawOptimizer,
    plan: ShardingPlan,
    units: list[Unit],
    comm: Communicator,
    copies: Mapping[str, str],
    *,
    refuse_unused: bool,
) -> ShardedOptimizer | None:
    """Return the optimizer that ``raw`` asks for, over this rank's pieces of ``units``; None if it asks for none.

    ``copies``: name of a parameter here -> its name in the first pipeline stage that has it.
    """
    if not raw.groups:
        return None
    pieces = build_pieces(units, whole=raw.whole, parts=plan.by_parts)
    optimizer = _made_over(pieces, raw) if raw.optimizer is None else _moved_to(pieces, raw, raw.optimizer)
    if isinstance(optimizer, PartsOptimizer) and plan.by_parts:
        _give_parts(optimizer, pieces, plan, comm)
    if isinstance(optimizer, SinglePassOptimizer):
        _give_formats(optimizer, pieces, units, raw.seed, copies)
    matrices = None
    if plan.matrices is not None and isinstance(optimizer, Muon):
        matrices = MatrixUpdates(plan, plan.matrices, optimizer, units, comm.stage())
    in_fp32 = None
    if not isinstance(optimizer, SinglePassOptimizer) and (raw.formats or raw.master is not MasterFormat.FP32):
        cuts, seed = not (raw.whole or plan.by_parts), raw.seed
        in_fp32 = PiecesInFp32(optimizer, lambda piece: () if seed is None else piece.origins(copies, seed), cuts=cuts)
    return ShardedOptimizer(
        optimizer,
        pieces,
        units,
        comm,
        split_state,
        refuse_unused=refuse_unused,
        matrices=matrices,
        in_fp32=in_fp32,
        watched=watched(optimizer, raw.divided_for),
    )


def _by_group(pieces: Sequence[OptimizerPiece], raw: RawOptimizer) -> list[list[torch.Tensor]]:
    """The tensors of each group. If they are whole parameters they have the order of these, which an update may go by."""
    place = {id(param): number for group in raw.groups for number, param in enumerate(group["params"]) if raw.whole}
    tensors: list[list[torch.Tensor]] = [[] for _ in raw.groups]
    for piece in sorted(pieces, key=lambda piece: place.get(id(piece.flat_group.params[piece.runs[0].entry]), 0)):
        tensors[piece.group].append(piece.tensor)
    return tensors


def _made_over(pieces: Sequence[OptimizerPiece], raw: RawOptimizer) -> torch.optim.Optimizer:
    """An optimizer by the configuration."""
    owned = _by_group(pieces, raw)
    groups = [{**group, "params": tensors} for group, tensors in zip(raw.groups, owned, strict=True)]
    return build_optimizer(raw.name, raw.params, groups)


def _moved_to(
    pieces: Sequence[OptimizerPiece], raw: RawOptimizer, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """The optimizer of the script, with pieces in place of the parameters that it had."""
    overrides = overrides_of(optimizer)
    for group, tensors in zip(optimizer.param_groups, _by_group(pieces, raw), strict=True):
        group["params"] = tensors
    owners = {piece.tensor: id(piece.flat_group.params[piece.runs[0].entry]) for piece in pieces if overrides}
    give_overrides(optimizer, {tensor: overrides[owner] for tensor, owner in owners.items() if owner in overrides})
    optimizer.state.clear()  # Adagrad has some of whole parameters, and makes them anew
    return optimizer


def _give_parts(
    optimizer: PartsOptimizer, pieces: Sequence[OptimizerPiece], plan: ShardingPlan, comm: Communicator
) -> None:
    number = {part.name: index for index, part in enumerate(plan.parts)}
    places = {piece.tensor: number[piece.flat_group.names[piece.runs[0].entry]] for piece in pieces}
    optimizer.take_parts(plan.parts, places, PartSums(plan, comm))


def _give_formats(
    optimizer: SinglePassOptimizer,
    pieces: Sequence[OptimizerPiece],
    units: list[Unit],
    seed: int | None,
    copies: Mapping[str, str],
) -> None:
    """Tell the optimizer how masters are kept, which draws round them, and where their states are at home."""
    optimizer.formats.update({piece.tensor: piece.format for piece in pieces})
    optimizer.rests.update({piece.tensor: rest for piece in pieces if (rest := piece.rest) is not None})
    if seed is not None:
        optimizer.origins.update({piece.tensor: piece.origins(copies, seed) for piece in pieces})
    link = next((link for link in links_of(units) if link.store is not None), None)
    if link is not None:
        optimizer.state_home = link.home
