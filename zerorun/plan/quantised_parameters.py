"""Which parameters ranks send to one another as codes when they are gathered, and when they are reduced.

The codes are those of quantised_blocks.py, or of float8_codes.py where layers that multiply in fp8 are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..config.sections import ZeroOptimization
from ..distributed.float8_codes import Float8Cast
from ..distributed.quantised_blocks import BLOCK
from ..distributed.quantised_hops import QuantisedHop, plan_hops
from ..distributed.topology import Topology
from .parameter_kinds import is_packed
from .sharding_plan import UnitPlan
from .stage_policy import Policy
from .units import ROOT, UnitSpec


@dataclass(frozen=True)
class Quantised:
    """``gathers``: of the parameter send codes, with ``float8`` fp8 ones; ``gradients``: reductions of its gradient do."""

    gathers: bool = False
    float8: Float8Cast | None = None
    gradients: bool = False

    def __bool__(self) -> bool:
        return self.gathers or self.gradients


@dataclass(frozen=True)
class QuantisedWire:
    """What the configuration says about codes. ``whole``: no parameter is cut, so that shards differ in size.

    ``casts``: id(parameter) -> how its layer casts it, of those that are to be gathered in fp8.
    """

    settings: ZeroOptimization
    policy: Policy
    topology: Topology
    whole: bool
    casts: Mapping[int, Float8Cast]

    def of(self, spec: UnitSpec, param: nn.Parameter, dtype: torch.dtype, *, trained: bool, numel: int) -> Quantised:
        """Return what of ``param``, which is in ``spec`` and kept in ``dtype``, is coded: of matrices with a whole block.

        ``numel``: its elements, the same number on all tensor ranks.

        Gains of norms and biases are few, and a block would have them beside much smaller values.
        """
        wide = dtype.is_floating_point and dtype.itemsize > 1 and not is_packed(param)
        if self.topology.shard == 1 or not wide or param.dim() < 2 or numel < BLOCK:
            return Quantised()
        settings, policy = self.settings, self.policy
        weights = settings.zero_quantized_weights or (settings.zero_quantized_nontrainable_weights and not trained)
        cast = self.casts.get(id(param)) if dtype != torch.float16 else None  # in which 5-bit exponents are not exact
        shares = policy.share_param_slots and spec.shares_slots and spec.name != ROOT
        gradients = settings.zero_quantized_gradients and policy.shard_optimizer and trained and not self.whole
        return Quantised((weights or cast is not None) and shares, cast if shares else None, gradients=gradients)

    def hops(self, units: Iterable[UnitPlan]) -> tuple[QuantisedHop, ...]:
        """Return the hops of gradients that are coded; none if none are."""
        if not any(group.codes_gradients for unit in units for group in unit.trainable):
            return ()
        return self._hops

    def residual_numel(self, shard: int) -> int:
        """Return the elements that a rank keeps of what rounding has left out of gradients, for shards of ``shard``."""
        return sum(hop.residual_numel(shard) for hop in self._hops)

    @property
    def _hops(self) -> tuple[QuantisedHop, ...]:
        settings = self.settings
        feedback = settings.zeropp_loco_param is not None
        return plan_hops(self.topology, between=settings.zero_quantized_gradients_bits, feedback=feedback)
