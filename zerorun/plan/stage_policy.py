"""The policy table: what a ZeRO stage means for slots and shards. Each stage is three flags, and not a class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """One row of the table.

    ``shard_optimizer``: a rank updates only its shard (else every rank updates everything).
    ``share_grad_slots``: blocks share gradient slots, so every backward reduces (else one slot per unit, reduced at the
    accumulation boundary).
    ``share_param_slots``: blocks share parameter slots, so parameters are gathered for each use.
    """

    stage: int
    shard_optimizer: bool
    share_grad_slots: bool
    share_param_slots: bool


STAGES = (
    Policy(0, shard_optimizer=False, share_grad_slots=False, share_param_slots=False),
    Policy(1, shard_optimizer=True, share_grad_slots=False, share_param_slots=False),
    Policy(2, shard_optimizer=True, share_grad_slots=True, share_param_slots=False),
    Policy(3, shard_optimizer=True, share_grad_slots=True, share_param_slots=True),
)
