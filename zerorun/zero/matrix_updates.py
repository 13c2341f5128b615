"""Directions of matrices: momentum goes to the owners, which orthogonalize it, and comes back in the gradient's place.

What goes where is in the plan (plan/matrix_exchange.py), but for what only the other ranks know: which elements they have.
They tell it once. What a rank has of the matrices of one owner, in one turn, is a *parcel*: first what it gives, then what
it only gets back, because another rank gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from ..distributed.device import CopyStream, host_empty, queues
from ..distributed.tensor_shard import TensorShard
from ..distributed.transport.transport import Transport
from ..ops.newton_schulz import scale_of
from ..optim.muon import Muon, orthogonalized
from ..optim.parameter_parts import Part
from ..plan.matrix_exchange import FROM_OWNERS, TO_OWNERS, Matrix, MatrixExchange
from ..plan.sharding_plan import ShardingPlan
from .host_updates import take_in
from .optimizer_pieces import OptimizerPiece, owned_gradient
from .unit import Unit

_Parcels = Sequence[Sequence[int]]  # by rank: indices of matrices


class MatrixUpdates:
    """The exchange of one engine's matrices. All ranks of a pipeline stage make the same calls."""

    def __init__(
        self,
        plan: ShardingPlan,
        exchange: MatrixExchange,
        optimizer: Muon,
        units: Sequence[Unit],
        transport: Transport,
    ) -> None:
        """``exchange``: that of ``plan``. ``transport``: over its ranks, in its order."""
        self._exchange, self._optimizer, self._units, self._transport = exchange, optimizer, units, transport
        groups = [flat_group for unit in units for flat_group in unit.trainable]
        self._group_of = [groups[matrix.group] for matrix in exchange.matrices]
        self._runs = [g.plan.owned_run(m.entry) for g, m in zip(self._group_of, exchange.matrices, strict=True)]
        here = [plan.part(plan.trainable[matrix.group], matrix.entry) for matrix in exchange.matrices]
        self._held: list[list[Part]] = transport.values(here) if exchange.size > 1 else [here]
        # For each turn: what this rank has of the matrices of each owner, and what each rank has of this one's.
        self._parcels = [self._of_turn(turn) for turn in exchange.turns] if exchange.size > 1 else []
        room = (exchange.staging, exchange.owned) if exchange.size > 1 else (0, 0)
        self._copies = CopyStream(transport.device)
        landing = max((m.here for index, m in enumerate(exchange.matrices) if self._is_apart(index)), default=0)
        self._landing = host_empty(landing, exchange.dtype, pinned=landing > 0)
        self._staging, self._owned = (torch.empty(n, dtype=exchange.dtype, device=transport.device) for n in room)

    @property
    def bytes(self) -> int:
        """The bytes of the buffers for what is on its way."""
        return self._staging.nbytes + self._owned.nbytes

    @property
    def host_bytes(self) -> int:
        """The bytes of the buffer in host memory, if the device has memory of its own."""
        return self._landing.nbytes

    def direct(self, pieces: Sequence[OptimizerPiece], coefficient: torch.Tensor | float) -> None:
        """Take the gradients of ``pieces``, times ``coefficient``, into the momentum; put directions in their place.

        Of other pieces nobody may use the gradients afterwards. All ranks must call it, whichever pieces they have.
        """
        members = [piece for piece in pieces if self._optimizer.param_groups[piece.group]["use_muon"]]
        self._optimizer.begin(piece.tensor for piece in members)
        take_in(self._units, members, self._optimizer, self._optimizer.advance, coefficient)
        for mine, theirs in self._parcels:
            self._take_turn(mine, theirs)
        for index in range(len(self._exchange.matrices)) if self._exchange.size == 1 else ():
            matrix = self._staging.new_empty(self._matrix(index).numel)
            self._bring([(index, matrix)])
            self._put(index, self._orthogonalized(index, matrix).view(-1))

    def _take_turn(self, mine: _Parcels, theirs: _Parcels) -> None:
        exchange = self._exchange
        staged = _consecutive(self._staging, [sum(self._held[exchange.rank][i].numel for i in parcel) for parcel in mine])
        places = [pair for flat, own in zip(staged, mine, strict=True) for pair in self._parts(exchange.rank, own, flat)]
        self._bring(places)
        sent = [flat[: self._given(exchange.rank, parcel)] for flat, parcel in zip(staged, mine, strict=True)]
        received = _consecutive(self._owned, [self._given(peer, parcel) for peer, parcel in enumerate(theirs)])
        self._transport.all_to_all(sent, received, TO_OWNERS).wait()
        owned = sorted({index for parcel in theirs for index in parcel})
        results = {index: self._orthogonalized(index, self._joined(index, theirs, received)) for index in owned}
        self._transport.all_to_all(self._answers(theirs, results), staged, FROM_OWNERS).wait()
        for index, part in places:
            self._put(index, part)

    # -- what ranks have -----------------------------------------------------------------------------------------

    def _matrix(self, index: int) -> Matrix:
        return self._exchange.matrices[index]

    def _of_turn(self, turn: Sequence[int]) -> tuple[_Parcels, _Parcels]:
        own, ranks = self._exchange.rank, range(self._exchange.size)
        return [self._parcel(own, owner, turn) for owner in ranks], [self._parcel(peer, own, turn) for peer in ranks]

    def _parcel(self, rank: int, owner: int, turn: Sequence[int]) -> list[int]:
        """The matrices of ``owner`` of which ``rank`` has elements, those that it gives first."""
        found = [i for i in turn if self._matrix(i).owner == owner and self._held[rank][i].numel]
        return sorted(found, key=lambda i: not self._exchange.gives(rank, self._matrix(i)))

    def _given(self, rank: int, parcel: Sequence[int]) -> int:
        """How many elements of its ``parcel`` the rank gives."""
        return sum(self._held[rank][i].numel for i in parcel if self._exchange.gives(rank, self._matrix(i)))

    def _parts(self, rank: int, parcel: Sequence[int], flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(index of a matrix, what ``rank`` has of it), for each of its ``parcel``, which begins where ``flat`` does."""
        return list(zip(parcel, _consecutive(flat, [self._held[rank][i].numel for i in parcel]), strict=True))

    def _gradient(self, index: int) -> torch.Tensor:
        """This rank's elements of the gradient of a matrix: flat, fp32, where the master is."""
        run, group = self._runs[index], self._group_of[index]
        return owned_gradient(group)[run.offset : run.offset + run.numel] if run else group.grad_shard[:0]

    # -- as an owner ---------------------------------------------------------------------------------------------

    def _joined(self, index: int, parcels: _Parcels, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """The matrix, from what ranks have given."""
        found: dict[TensorShard | None, list[tuple[int, torch.Tensor]]] = {}
        for peer, parcel in enumerate(parcels):
            given = [i for i in parcel if self._exchange.gives(peer, self._matrix(i))]
            for i, part in self._parts(peer, given, received[peer]):
                if i == index:
                    held = self._held[peer][i]
                    found.setdefault(held.shard, []).append((held.start, part))
        joined = {shard: torch.cat([part for _, part in sorted(parts, key=_start)]) for shard, parts in found.items()}
        if None in joined:
            return joined[None]
        whole = self._owned.new_empty(self._matrix(index).shape)
        for shard, part in joined.items():
            assert shard is not None
            shard.put(part.view(shard.local_shape), whole)
        return whole

    def _orthogonalized(self, index: int, matrix: torch.Tensor) -> torch.Tensor:
        settings = self._optimizer.param_groups[self._settings_of(index)]
        return orthogonalized(matrix.view(self._matrix(index).shape), settings)

    def _settings_of(self, index: int) -> int:
        return self._group_of[index].plan.optimizer_groups[self._matrix(index).entry]

    def _answers(self, parcels: _Parcels, results: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """What each rank gets, in the buffer of owned matrices. Ranks that have the same elements get the same tensor."""
        made: dict[tuple[tuple[int, Part], ...], torch.Tensor] = {}
        cuts: dict[tuple[int, TensorShard], torch.Tensor] = {}
        used = 0
        for peer, parcel in enumerate(parcels):
            key = self._contents(peer, parcel)
            if key in made:
                continue
            flat = self._owned[used : used + sum(held.numel for _, held in key)]
            used += flat.numel()
            for (index, held), part in zip(key, _consecutive(flat, [h.numel for _, h in key]), strict=True):
                if held.shard is not None and (index, held.shard) not in cuts:
                    cuts[index, held.shard] = held.shard.cut(results[index])
                source = results[index] if held.shard is None else cuts[index, held.shard]
                part.copy_(source.reshape(-1)[held.start : held.start + held.numel])
            made[key] = flat
        return [made[self._contents(peer, parcel)] for peer, parcel in enumerate(parcels)]

    def _contents(self, peer: int, parcel: Sequence[int]) -> tuple[tuple[int, Part], ...]:
        return tuple((i, self._held[peer][i]) for i in parcel)

    # -- between gradients and buffers -----------------------------------------------------------------------------

    def _is_apart(self, index: int) -> bool:
        """True if the gradient of a matrix is in host memory, and the buffers are not."""
        return self._group_of[index].host_grad is not None and queues(self._transport.device)

    def _bring(self, places: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Round this rank's elements of matrices into the flat tensors of ``places``."""
        self._copies.follow()
        for index, part in places:
            if self._is_apart(index):
                self._copies.copy(self._gradient(index).to(part.dtype), part)
            else:
                part.copy_(self._gradient(index))
        self._copies.lead()

    def _put(self, index: int, direction: torch.Tensor) -> None:
        """Let the gradient of a matrix, as far as this rank has it, be the flat ``direction``, scaled by the shape."""
        if self._is_apart(index):
            self._copies.follow(read=direction)
            host = self._landing[: direction.numel()]
            self._copies.copy(direction, host).synchronize()
            direction = host
        settings = self._optimizer.param_groups[self._settings_of(index)]
        self._gradient(index).copy_(direction).mul_(scale_of(self._matrix(index).shape, settings["adjust_lr_fn"]))


def _start(part: tuple[int, torch.Tensor]) -> int:
    return part[0]


def _consecutive(flat: torch.Tensor, numels: Sequence[int]) -> list[torch.Tensor]:
    """Views of ``flat``, one after the other, of so many elements."""
    return [flat[low:high] for low, high in pairwise(accumulate(numels, initial=0))]
