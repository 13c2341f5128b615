"""The section ``fp8``: which layers become torchao's Float8Linear, in place, and how they become linear layers again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..config.fields import ConfigNote
from ..config.sections import Fp8
from ..distributed.device import CPU, gpus_have_fp8
from ..errors import ConfigError, ConfigProblem
from ..pipeline.pipelined import Pipelined
from ..plan.float8_layers import MULTIPLE, casts_of, counts_tokens, is_float8, refuse_odd_tokens
from ..plan.parameter_kinds import PLAIN, kind_of, own_weight
from .matrix_roles import matrices_of_blocks


class Float8Layers:
    """The linear layers that multiply in fp8 because the configuration says so."""

    def __init__(self, layers: Mapping[str, nn.Linear], section: Fp8, device_type: str) -> None:
        """Give ``layers`` torchao's class, in place: hooks, names and parameters stay.

        Raises ConfigError if there is no torchao, or if the device has no fp8; no layer is changed then.
        """
        self._layers, self._added = dict(layers), dict[str, set[str]]()
        self._counting: list[RemovableHandle] = []
        if not layers:
            return
        kind, recipe = _torchao()
        config = replace(recipe(section.recipe), emulate=_emulates(section, device_type))
        for name, layer in self._layers.items():
            more = {key: value for key, value in vars(kind.from_float(layer, config)).items() if key not in vars(layer)}
            self._added[name] = set(more)
            vars(layer).update(more)
            layer.__class__ = kind

    def refuse_odd_parts(self) -> None:
        """Raise ConfigError for a layer of which this rank has a part that kernels cannot take."""
        _refuse_odd(self._layers)

    def count_tokens(self, model: nn.Module) -> None:
        """From now on refuse inputs of layers in ``model``, also of those swapped by hand, that kernels cannot take."""
        self._counting += [m.register_forward_pre_hook(refuse_odd_tokens) for m in model.modules() if counts_tokens(m)]

    def remove(self) -> None:
        """Turn them into ordinary linear layers again, which they must be whole for."""
        while self._counting:
            self._counting.pop().remove()
        for name, added in self._added.items():
            for key in added:
                del vars(self._layers[name])[key]
            self._layers[name].__class__ = nn.Linear
        self._added.clear()


def float8_layers(model: nn.Module, section: Fp8) -> dict[str, nn.Linear]:
    """Return the linear layers of repeated blocks, as ``section`` asks; none if ``model`` has Float8Linear already.

    Raises ConfigError if there are none, for names that match nothing, and for sides that kernels cannot take.
    """
    swapped = any(map(is_float8, model.modules()))
    if section.enabled and section.enable_fsdp_float8_all_gather:
        _refuse_rows(section, exact=bool(casts_of(model)) if swapped else section.recipe == "tensorwise")
    if not section.enabled or swapped:
        return {}
    matrices = matrices_of_blocks(model)
    found = {name: m for name, m in model.named_modules() if _is_ordinary(m) and id(own_weight(m)) in matrices}
    kept = {name: layer for name, layer in found.items() if not any(part in name for part in section.filter_fqns)}
    if not isinstance(model, Pipelined):
        _refuse_nothing(section, found, kept)
    _refuse_odd(kept)
    return kept  # type: ignore[return-value]


def described(model: nn.Module, section: Fp8, layers: Mapping[str, nn.Linear], device_type: str) -> ConfigNote | None:
    """Say what multiplies in fp8, and how; None if the section is off."""
    if not section.enabled:
        return None
    how = "; fp8 is emulated: products are of fp32 values rounded to fp8" if _emulates(section, device_type) else ""
    if layers:
        return ConfigNote("fp8.enabled", f"{len(layers)} linear layers multiply in fp8{how}.")
    count = sum(map(is_float8, model.modules()))
    return ConfigNote("fp8.enabled", f"the model has {count} layers of Float8Linear already, which are left as they are.")


def _is_ordinary(layer: nn.Module) -> bool:
    """False also for subclasses, which compute in ways of their own, or whose weight is used without calling them."""
    weight = own_weight(layer)
    return type(layer) is nn.Linear and weight is not None and kind_of(weight) == PLAIN


def _emulates(section: Fp8, device_type: str) -> bool:
    """True if fp8 is emulated, as on CPUs. Raises ConfigError for a GPU that has no fp8, unless emulation is asked for."""
    if section.emulate or device_type == CPU:
        return True
    if gpus_have_fp8():
        return False
    reason = "this GPU has no fp8: NVIDIA's have it from compute capability 8.9 on (Ada, Hopper)."
    raise ConfigError([ConfigProblem("fp8.enabled", True, reason, 'Remove the section, or try it with "emulate": true.')])


def _torchao() -> tuple[Any, Any]:
    """Return Float8Linear, and the function that makes its configuration from a recipe's name."""
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        reason = f"it needs torchao, which cannot be imported ({error})."
        raise ConfigError(
            [ConfigProblem("fp8.enabled", True, reason, "Install it: pip install 'zerorun[fp8]', or pip install torchao.")]
        ) from None
    return Float8Linear, Float8LinearConfig.from_recipe_name


def _refuse_rows(section: Fp8, *, exact: bool) -> None:
    if not exact:
        reason = "with scales of rows, a weight is cast by rows in forward and by columns in backward: no code is both."
        remedy = 'Remove the key, or use "recipe": "tensorwise".'
        raise ConfigError([ConfigProblem("fp8.enable_fsdp_float8_all_gather", True, reason, remedy)])


def _refuse_nothing(section: Fp8, found: Iterable[str], kept: Iterable[str]) -> None:
    names = list(found)
    lost = [part for part in section.filter_fqns if not any(part in name for name in names)]
    if names and lost:
        reason = f"{lost[0]!r} is in no name of a linear layer that would multiply in fp8."
        remedy = f"Write a part of a name such as {names[0]!r}, or remove it."
        raise ConfigError([ConfigProblem("fp8.filter_fqns", list(section.filter_fqns), reason, remedy)])
    if not list(kept):
        left = "filter_fqns leaves all out" if names else "the model has no linear layer in repeated blocks"
        remedy = "Remove the section, or call torchao's convert_to_float8_training(model) before initialize()."
        raise ConfigError([ConfigProblem("fp8.enabled", True, f"nothing would multiply in fp8: {left}.", remedy)])


def _refuse_odd(layers: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for layers with a side that is no multiple of MULTIPLE."""
    shapes = {name: weight.shape for name, layer in layers.items() if (weight := own_weight(layer)) is not None}
    odd = {name: shape for name, shape in shapes.items() if any(side % MULTIPLE for side in shape)}
    if odd:
        name, shape = next(iter(odd.items()))
        others = f", and {len(odd) - 1} others have one like it" if len(odd) > 1 else ""
        reason = f"fp8 needs sides that are multiples of {MULTIPLE}; of {name!r} a rank has {list(shape)}{others}."
        last = ", ".join(f'"{name}"' for name in sorted({name.rpartition(".")[2] for name in odd}))
        remedy = f'Let such layers multiply in 16 bits, by "filter_fqns": [{last}].'
        raise ConfigError([ConfigProblem("fp8.enabled", True, reason, remedy)])
