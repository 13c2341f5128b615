"""What an optimizer needs of the parameters that it updates: any of their elements, sums, whole matrices, or all of them.

Classes that zerorun knows are in a table (optimizers.py). Others are tried on the CPU: copies of the optimizer take a few
steps on matrices, on the halves of the matrices as flat tensors, and on each matrix alone. Where all come to the same bits,
the optimizer does not notice what it is given. The matrices are larger than the sizes at which optimizers change their ways
(8-bit states begin at 4,096 elements), and the halves smaller.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

_SHAPE = (96, 64)
_STEPS = 3
_RATE = 0.01  # a warm-up may begin with 0, with which nothing would move

Make = Callable[[list[list[Tensor]]], torch.optim.Optimizer]
"""Makes an optimizer of the tensors of each parameter group."""


class Needs(IntEnum):
    """On what the update of an element depends."""

    ELEMENTS = 0  # on its own gradient and state, and on step counts
    SUMS = 1  # on sums over its parameter, too, which ranks can make together (parts.py)
    MATRICES = 2  # on those of its parameter
    MODEL = 3  # on those of other parameters, too


def try_needs(make: Make, groups: int) -> Needs:
    """Find out what the optimizer that ``make`` makes, with this number of parameter groups, needs.

    One whose trial fails is taken to need matrices: that is right for all that do not look at other parameters.
    """
    try:
        return _compare(make, groups)
    except Exception:  # an optimizer of the user's may raise anything, and will again where the user sees it
        return Needs.MATRICES


def _compare(make: Make, groups: int) -> Needs:
    generator = torch.Generator().manual_seed(1)
    # For each matrix its first values, and the gradients of all steps.
    matrices = [torch.randn((1 + _STEPS, *_SHAPE), generator=generator) for _ in range(2 * groups)]
    alone = [_values_after(make, groups, part, seed) for seed, part in enumerate((matrices[:groups], matrices[groups:]))]
    if _values_after(make, groups, matrices[:groups], 10) != alone[0]:  # noise, which no two ranks would have alike
        return Needs.MATRICES
    flat = [matrix.view(1 + _STEPS, -1) for matrix in matrices[:groups]]
    halves = [_values_after(make, groups, [tensor.chunk(2, 1)[half] for tensor in flat], 20) for half in range(2)]
    if all(halves) and [first + second for first, second in zip(*halves, strict=True)] == alone[0]:
        return Needs.ELEMENTS
    return Needs.MATRICES if _values_after(make, groups, matrices, 30) == alone[0] + alone[1] else Needs.MODEL


def _values_after(make: Make, groups: int, given: Sequence[Tensor], seed: int) -> list[bytes]:
    """The values of each tensor after the steps, as bytes. Empty if states of flat tensors do not go by their elements.

    ``given``: of each tensor its first values and gradients, [1 + steps, ...]; they go to the groups in turn.
    """
    params = [tensor[0].clone() for tensor in given]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        optimizer = make([params[group::groups] for group in range(groups)])
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.full_like(group["lr"], _RATE) if torch.is_tensor(group["lr"]) else _RATE
        for step in range(_STEPS):
            for param, tensor in zip(params, given, strict=True):
                param.grad = tensor[1 + step].clone()
            step_once(optimizer)
    states = [(param, value) for param in params for value in optimizer.state.get(param, {}).values()]
    by_elements = all(not torch.is_tensor(value) or value.dim() == 0 or value.shape == p.shape for p, value in states)
    if params[0].dim() == 1 and not by_elements:
        return []
    return [param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for param in params]


# -- trials -----------------------------------------------------------------------------------------------------------


def copy_over(optimizer: torch.optim.Optimizer, members: list[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """Copy ``optimizer`` with its settings over other parameters, without hooks and methods patched by schedulers.

    A step of the copy changes nothing that the optimizer has.
    """
    made: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if not (callable(value) and hasattr(type(optimizer), key)):
            made.__dict__[key] = copy(value) if isinstance(value, (dict, list, set)) else _own(value)
    made.param_groups = [
        {**{key: _own(value) for key, value in group.items()}, "params": params}
        for group, params in zip(optimizer.param_groups, members, strict=True)
    ]
    made.state = defaultdict(dict)
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    found: torch.optim.Optimizer = made
    return found


def _own(setting: Any) -> Any:
    return setting.clone() if torch.is_tensor(setting) else setting


def step_once(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without torch.compile: compiling would take longer than the estimate that the step is for."""
    compiles = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext():
        optimizer.step()
