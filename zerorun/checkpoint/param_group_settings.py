"""Settings of an optimizer's parameter groups: which are saved, and which of them a load takes over.

Rates, betas and decays come from the checkpoint, as schedules and scripts have changed them. What chooses the formula of
the update is what this run asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..optim.lr_schedules import LRSchedule
from .read import Reader
from .write_plan import OPTIMIZER

# Keys of parameter groups that say how a step is computed, and not what it computes. They are not saved.
IMPLEMENTATION = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "decoupled", "ns_method", "ns_dtype"}
)

# Keys that choose among formulas -> what a class does whose groups lack them; None if that is not known. They are saved,
# but a load does not take them over, as it does rates and decays: what this run asks for holds, or the load is refused.
VARIANTS: dict[str, bool | None] = {
    **dict.fromkeys(("maximize", "amsgrad", "nesterov", "centered", "eps_inside_sqrt"), False),
    "bias_correction": True,
    "decoupled_weight_decay": None,
    "use_muon": None,
}
_NOT_ALWAYS_SAVED = frozenset({"bias_correction", "decoupled_weight_decay", "use_muon"})  # what is not there is not known

# What schedules write into parameter groups, and go on from: those of torch, and of zerorun.
_OF_SCHEDULES = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})

# A remedy.
FRESH_MOMENTS = "pass load_optimizer=False: a new engine has fresh moments then, and one that has trained keeps its own."

# Variants that keep a state which the others do not: (key, value) -> the state.
_STATES = {
    ("amsgrad", True): "max_exp_avg_sq",
    ("centered", True): "grad_avg",
    ("use_muon", True): "momentum_buffer",
    ("use_muon", False): "exp_avg",
}


@dataclass(frozen=True)
class Variant:
    """A key of ``VARIANTS`` that had the value ``stored`` in a parameter group, and has ``own`` in this run."""

    group: int
    key: str
    stored: bool
    own: bool

    def __str__(self) -> str:
        return f"{self.key} {self.own} in parameter group {self.group} (saved with {self.stored})"

    @property
    def needed(self) -> str | None:
        """The state that this run needs for it."""
        return _STATES.get((self.key, self.own))

    @property
    def left_out(self) -> str | None:
        """The state that only what was saved needs."""
        return _STATES.get((self.key, self.stored))


def _other_variants(own: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]]) -> list[Variant]:
    """The formulas that this run's groups ask for and the ``stored`` ones did not, or the other way round."""
    found = []
    for number, (ours, theirs) in enumerate(zip(own, stored, strict=True)):
        for key, lacking in VARIANTS.items():
            here, there = ours.get(key, lacking), theirs.get(key, None if key in _NOT_ALWAYS_SAVED else lacking)
            if isinstance(here, int) and isinstance(there, int) and bool(here) != bool(there):
                found.append(Variant(number, key, bool(there), bool(here)))
    return found


def compare_variants(
    reader: Reader, own: Sequence[dict[str, Any]], stored: Sequence[dict[str, Any]], members: Sequence[Sequence[str]]
) -> list[Variant]:
    """Return where the formulas of this run's groups are others than those of the ``stored`` ones.

    ``members``: the parameters of each group, as they are called in the files. Raises CheckpointError if a formula of this
    run needs what the checkpoint does not have.
    """
    others, sets = _other_variants(own, stored), [kind for kind in reader.sets if kind.startswith(OPTIMIZER)]
    for variant in others:
        reason, was = "", stored[variant.group]
        kept = [{kind for kind in sets if name in reader.places(kind)} for name in members[variant.group]]
        if variant.needed and any(kinds and not any(is_of(k, variant.needed) for k in kinds) for kinds in kept):
            reason = f"needs the state {variant.needed!r}, which is not there"
        elif variant.key == "nesterov" and variant.own and (not was.get("momentum", 1) or was.get("dampening")):
            momentum = f"momentum {was.get('momentum')} and dampening {was.get('dampening', 0)}"
            reason = f"needs momentum and no dampening; {momentum} come from the checkpoint"
        if reason:
            raise CheckpointError(
                f"{reader.path} was saved with {variant.key} {variant.stored} in parameter group {variant.group}, and this "
                f"run has {variant.key} {variant.own}, which {reason}. Remedy: set {variant.key} to "
                f"{str(variant.stored).lower()} in optimizer.params of the configuration, or in the parameter group, or "
                + FRESH_MOMENTS
            )
    return others


def take_over(own: dict[str, Any], stored: dict[str, Any], left: frozenset[str], first: frozenset[str]) -> None:
    """Let a parameter group of this run have the ``stored`` settings, but for those under the keys ``left``.

    What steps have added to the group, and is not stored, goes, as with torch. ``first``: the keys that it began with.
    """
    of_run = IMPLEMENTATION | VARIANTS.keys()
    for key in own.keys() - stored.keys() - of_run - first - _OF_SCHEDULES:
        del own[key]
    own.update({key: value for key, value in stored.items() if key not in of_run | left})


def of_schedule(schedule: Any, number: int, own: dict[str, Any], stored: dict[str, Any]) -> frozenset[str]:
    """The keys of group ``number`` that ``schedule``, which does not go on from the checkpoint, writes or goes on from.

    Most schedules of torch multiply the rate that the group has. Groups have ``max_momentum`` where the momentum cycles.
    """
    cycled = schedule.cycled(number) if isinstance(schedule, LRSchedule) else None
    if "max_momentum" in own or "max_momentum" in stored:
        cycled = "betas" if "betas" in own else "momentum"
    return _OF_SCHEDULES | ({cycled} if cycled else set())


def is_of(kind: str, state: str | None) -> bool:
    """True for the set of ``state``, or of a tensor that is wrapped in it."""
    return state is not None and f"{kind}.".startswith(f"{OPTIMIZER}{state}.")
