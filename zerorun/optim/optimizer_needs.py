"""What an optimizer needs of the parameters that it updates: any of their elements, sums, whole matrices, or all of them.

Classes that zerorun knows are in a table (optimizers.py). Others are tried on the CPU: copies of the optimizer take a few
steps on matrices, on the halves of the matrices as flat tensors, and on each matrix alone and beside another one of its
group. Where all come to the same bits, the optimizer does not notice what it is given. The matrices are larger than the
sizes at which optimizers change their ways (8-bit states begin at 4,096 elements), and the halves smaller. Small ones go on
for more steps, because some optimizers change their ways after a warm-up. All is done again with other numbers in place of
settings that are 0, which a script may raise later. What is seen to need matrices is tried no further. Where a script
changes settings in other ways, :class:`WatchedSettings` tries again.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed.generators import generators_as_before
from ..errors import ModelError, StepError

_SHAPE, _STEPS = (96, 64), 3
_SMALL, _MANY = (16, 8), 64  # where there are many groups, fewer steps: at most _UPDATES over all groups
_UPDATES = 512
_RATE = 0.01  # a warm-up may begin with 0, with which nothing would move

_NONE: Mapping[Any, Any] = {}

Make = Callable[[list[list[Tensor]]], torch.optim.Optimizer]
"""Makes an optimizer of the tensors of each parameter group."""


class Needs(IntEnum):
    """On what the update of an element depends."""

    ELEMENTS = 0  # on its own gradient and state, and on step counts
    SUMS = 1  # on sums over its parameter, too, which ranks can make together (parameter_parts.py)
    MATRICES = 2  # on those of its parameter
    MODEL = 3  # on those of other parameters, too


def try_needs(make: Make, groups: int) -> Needs:
    """Find out what the optimizer that ``make`` makes, with this number of parameter groups, needs.

    One whose trial fails is taken to need matrices: that is right for all that do not look at other parameters. Raises
    ModelError for one that asks other ranks.
    """
    many = min(_MANY, max(_STEPS, _UPDATES // groups))
    for zeros in (True, False):
        for shape, steps in ((_SHAPE, _STEPS), (_SMALL, many)):
            try:
                found = _compare(make, groups, shape, steps, zeros)
            except ModelError:
                raise
            except Exception:  # an optimizer of the user's may raise anything, and will again where the user sees it
                if zeros:  # otherwise a number that is 0 may be none that can be another
                    return Needs.MATRICES
                continue
            if found is not Needs.ELEMENTS:
                return found
    return Needs.ELEMENTS


def _compare(make: Make, groups: int, shape: tuple[int, int], steps: int, zeros: bool) -> Needs:
    generator = torch.Generator().manual_seed(1)
    after = partial(_values_after, make, groups, zeros)
    # For each matrix its first values, and the gradients of all steps.
    matrices = [torch.randn((1 + steps, *shape), generator=generator) for _ in range(2 * groups)]
    alone = [after(part, seed) for seed, part in enumerate((matrices[:groups], matrices[groups:]))]
    if after(matrices[:groups], 10) != alone[0]:  # noise, which no two ranks would have alike
        return Needs.MATRICES
    flat = [matrix.view(1 + steps, -1) for matrix in matrices[:groups]]
    halves = [after([tensor.chunk(2, 1)[half] for tensor in flat], 20) for half in range(2)]
    if after(matrices, 30) != alone[0] + alone[1]:
        return Needs.MODEL
    by_elements = all(halves) and [first + second for first, second in zip(*halves, strict=True)] == alone[0]
    return Needs.ELEMENTS if by_elements else Needs.MATRICES


def _values_after(make: Make, groups: int, zeros: bool, given: Sequence[Tensor], seed: int) -> list[bytes]:
    """The values of each tensor after the steps, as bytes. Empty if states of flat tensors do not go by their elements.

    ``given``: of each tensor its first values and gradients, [1 + steps, ...]; they go to the groups in turn. ``zeros``:
    settings that are 0 stay so.
    """
    params = [tensor[0].clone() for tensor in given]
    with generators_as_before(gpus=False):
        torch.manual_seed(seed)
        optimizer = make([params[group::groups] for group in range(groups)])
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.full_like(group["lr"], _RATE) if torch.is_tensor(group["lr"]) else _RATE
            if not zeros:
                group.update({key: _RATE for key, value in group.items() if _is_number(value) and not value})
        for step in range(len(given[0]) - 1):
            for param, tensor in zip(params, given, strict=True):
                param.grad = tensor[1 + step].clone()
            step_alone(optimizer)
    states = [(param, value) for param in params for value in optimizer.state.get(param, {}).values()]
    by_elements = all(not torch.is_tensor(value) or value.dim() == 0 or value.shape == p.shape for p, value in states)
    if params[0].dim() == 1 and not by_elements:
        return []
    return [param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for param in params]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


class WatchedSettings:
    """The settings with which ``optimizer`` was tried, and what it was divided for: it must not come to need ``more``."""

    def __init__(self, optimizer: torch.optim.Optimizer, divided_for: Needs) -> None:
        self._optimizer, self._divided_for = optimizer, divided_for
        self.stepped()

    def stepped(self) -> None:
        """The optimizer has stepped. What it has changed itself, such as counts, is no reason for another trial."""
        self._tried = _switches(self._optimizer)

    def refuse_more(self) -> None:
        """Raise StepError if somebody has changed settings since, and with these the optimizer needs more."""
        now = _switches(self._optimizer)
        if now == self._tried:
            return
        if try_needs(partial(copy_over, self._optimizer), len(now)) > self._divided_for:
            both = [(old, new, old.keys() | new.keys()) for old, new in zip(self._tried, now, strict=True)]
            changed = sorted({key for old, new, keys in both for key in keys if old.get(key) != new.get(key)})
            raise StepError(
                f"{type(self._optimizer).__name__} was divided over ranks as a trial in initialize() had shown that it may "
                f"be. With what its groups have now as {' and '.join(map(repr, changed))} it looks at whole parameters, or "
                "at all of them. Weights are those before this step. Remedy: set that before initialize(), or give its "
                "class the attribute elementwise = False, with which it gets whole parameters."
            )
        self._tried = now


def _switches(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group, what may decide how it is updated. Rates do not, nor does how large other fractions are."""
    return [
        {key: _switch(value) for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]


def _switch(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_switch, value))
    if isinstance(value, float):
        return float, value != 0
    return value if value is None or isinstance(value, (int, str)) else type(value)


# -- trials -----------------------------------------------------------------------------------------------------------


def copy_over(
    optimizer: torch.optim.Optimizer, members: list[list[torch.Tensor]], copies: Mapping[Tensor, Tensor] = _NONE
) -> torch.optim.Optimizer:
    """Copy ``optimizer`` with its settings over other parameters, without hooks and methods patched by schedulers.

    A step of the copy changes nothing that the optimizer has. ``copies``: tensor -> the parameter of the optimizer of which
    it has the overrides; others have none.
    """
    made: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if not (callable(value) and hasattr(type(optimizer), key)):
            made.__dict__[key] = copy(value) if isinstance(value, (dict, list, set)) else _own(value)
    made.param_groups = [
        {**{key: _own(value) for key, value in group.items()}, "params": params}
        for group, params in zip(optimizer.param_groups, members, strict=True)
    ]
    overrides = overrides_of(optimizer) if copies else {}
    give_overrides(made, {copy: overrides[id(own)] for copy, own in copies.items() if id(own) in overrides})
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


def step_alone(optimizer: torch.optim.Optimizer) -> None:
    """Take a step as a trial. Raises ModelError if it asks other ranks, which may be at something else."""
    with _Alone(optimizer):
        step_once(optimizer)


class _Alone(TorchDispatchMode):
    """Refuses collectives."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._name = type(optimizer).__name__

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to PyTorch, whose wrapper for skipped classes imports the compiler: a second of initialize()."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ModelError(
                f"optimizer {self._name} asks other ranks in its step() ({func}), to divide the work by itself. Here each "
                "rank has other parts of the parameters, and the engine makes the collectives. Remedy: give an optimizer "
                'that updates whatever it is given; for Muon, "optimizer": {"type": "Muon"} in the configuration.'
            )
        return func(*args, **(kwargs or {}))


def makes_states_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if ``optimizer`` gives parameters the states that they lack when it steps. It is not changed."""
    members = [[torch.zeros(1)] for _ in optimizer.param_groups]
    for (param,) in members:
        param.grad = torch.zeros(1)
    try:
        step_alone(copy_over(optimizer, members))
    except Exception:  # Adagrad's is a KeyError, before torch 2.12
        return False
    return True


# -- overrides: settings of single parameters, which bitsandbytes keeps in one table for all optimizers of the process ----

_TABLES = ("pid2config", "index2config", "module_weight_config_triple")  # the names that bitsandbytes gives them


def overrides_of(optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Any]]:
    """The settings that single parameters of ``optimizer`` have instead of those of their group, by id(parameter)."""
    manager: Any = getattr(optimizer, "mng", None)
    if optimizer is None or not _has_tables(manager):
        return {}
    found = dict(manager.pid2config)
    found.update({id(getattr(module, name, None)): own for module, name, own in manager.module_weight_config_triple})
    mine = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {key: own for key, own in found.items() if key in mine}


def give_overrides(optimizer: torch.optim.Optimizer, overrides: Mapping[Tensor, dict[str, Any]]) -> None:
    """Let these parameters of ``optimizer`` have ``overrides`` from now on, and others none.

    It gets a table of its own: in that of the process, places of parameters are those of whichever optimizer came before.
    """
    manager = getattr(optimizer, "mng", None)
    if _has_tables(manager):
        own = copy(manager)
        by_id = {id(param): dict(settings) for param, settings in overrides.items()}
        vars(own).update(zip(_TABLES, (by_id, {}, []), strict=True))
        vars(optimizer).update(mng=own)


def _has_tables(manager: Any) -> bool:
    return all(hasattr(manager, table) for table in _TABLES)
