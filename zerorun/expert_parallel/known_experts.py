"""Which modules of a model are experts that ranks can have some of each, and what is in the way.

[Note: the seam]
Hugging Face's models share one call, whatever their block and their router do around it: ``experts(hidden [T, H], index
[T, K], weights [T, K]) -> [T, H]``, the sum over a row's K experts of weight times output. A module of experts is known by
this signature, and by parameters that all have the experts as their first dimension. ``ep_plan`` names these modules as
well, but the styles in it have changed their names. Experts that are called in another way, as Llama 4's, which all run on
all rows, are none: there is nothing to send.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import ConfigError, ConfigProblem

KEY = "expert_parallel.autoep_size"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # attributes of modules of experts
_ROUTED = 3  # arguments of the call


@dataclass(frozen=True)
class Experts:
    """The ``count`` experts of one layer: ``module``, called ``name`` in the model, and part of ``block``."""

    name: str
    module: nn.Module
    count: int
    block: nn.Module

    @property
    def shared(self) -> tuple[nn.Module, ...]:
        """The experts of the block that all rows go to."""
        found = (module for name, module in self.block.named_children() if "shared" in name and "gate" not in name)
        return tuple(module for module in found if next(module.parameters(), None) is not None)

    @property
    def own(self) -> tuple[str, ...]:
        """The names of the parameters, all [count, ...]."""
        return tuple(name for name, param in self.module._parameters.items() if param is not None)


def find_experts(model: nn.Module) -> list[Experts]:
    """Return the modules of experts that can be spread over ranks, in the model's order."""
    return [
        Experts(name, module, count, model.get_submodule(name.rpartition(".")[0]))
        for name, module in model.named_modules()
        if (count := _count(module)) > 1 and _takes_routes(module)
    ]


def check_experts(model: nn.Module, found: Sequence[Experts], size: int) -> None:
    """Raise ConfigError, with all problems, unless the experts ``found`` in ``model`` can be spread over ``size`` ranks."""
    problems = [*_problems(model, found, size)]
    if problems:
        raise ConfigError(list({problem.reason: problem for problem in problems}.values()))


def _problems(model: nn.Module, found: Sequence[Experts], size: int) -> Iterator[ConfigProblem]:
    if not found:
        yield ConfigProblem(KEY, size, *_nothing_found(model))
    for experts in found:
        if experts.count % size:
            divisors = ", ".join(str(number) for number in range(1, experts.count + 1) if experts.count % number == 0)
            reason = f"{experts.name} has {experts.count} experts, which {size} ranks cannot have equally many of."
            yield ConfigProblem(KEY, size, reason, f"Use one of {divisors}.")
    inside = {experts.name for experts in found}
    for name, module in model.named_modules():
        adapts = type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer")
        if (adapts and any(other.startswith(f"{name}.") for other in inside)) or (
            name in inside and hasattr(module, "parametrizations")
        ):
            reason = f"{name} has an adapter ({type(module).__name__}), whose parts for each expert cannot be spread."
            remedy = "Leave experts out of the adapter's target_parameters and target_modules, or remove the section."
            yield ConfigProblem(KEY, size, reason, remedy)


def _nothing_found(model: nn.Module) -> tuple[str, str]:
    """Return (reason, remedy) for a model without experts that can be spread."""
    for name, module in model.named_modules():
        if _count(module) > 1 and "expert" in name.rpartition(".")[2].lower():
            reason = (
                f"{name} ({type(module).__name__}) is not called with rows, the experts of each, and their weights: "
                "there is nothing to send to the ranks that have an expert."
            )
            return reason, "Remove the section; tensor_parallel divides such experts by columns."
    reason = (
        f"{type(model).__name__} has no module of experts with parameters [experts, ...] that is called with rows, the "
        "experts of each, and their weights."
    )
    return reason, "Remove the section; if the model is one of transformers, version 5 keeps its experts in one module."


def _count(module: nn.Module) -> int:
    """Return the number of experts in a module's own parameters; 0 if they are no experts."""
    own = [param for param in module._parameters.values() if param is not None]
    numbers = {param.shape[0] if param.dim() > 1 else 0 for param in own}
    inner = sum(1 for _ in module.parameters()) - len({id(param) for param in own})
    return numbers.pop() if len(numbers) == 1 and not inner and any(param.dim() == 3 for param in own) else 0


def _takes_routes(module: nn.Module) -> bool:
    """True if the forward's arguments are hidden states, indices and weights."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(parameters) != _ROUTED or any(parameter.kind > parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return False
    _, index, weights = (parameter.name for parameter in parameters)
    return ("ind" in index or "expert" in index) and ("weight" in weights or "score" in weights)


def arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module of experts: hidden states, indices, weights."""
    return tuple(inspect.signature(type(module).forward).parameters)[1 : 1 + _ROUTED]


def is_eager(module: nn.Module) -> bool:
    """True if the module adds up experts one after the other, by number, in the dtype of the rows."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager")
