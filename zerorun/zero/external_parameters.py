"""External parameters, by DeepSpeed's names: those that modules outside of their unit use.

At stage 3 a parameter has its values while its unit runs. A registered one is moved into the root unit, which has them from
the beginning of a forward to the end of its backward (see [Note: choosing units]). One that is used elsewhere and was not
registered reads as NaN there, and an error names it.
"""

from __future__ import annotations

from torch import nn

from ..errors import ModelError
from ..plan.units import EXTERNAL_MARK
from .sharded_model import find


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Let ``module`` use ``parameter``, which another module has, in its forward. Call it before ``initialize()``.

    Raises TypeError for anything but a module and a parameter, and ModelError for a parameter that an engine has already
    put into a unit which is not always there.
    """
    _check(module, parameter)
    found = find(parameter)
    if found is not None and not found[1].unit.resident:
        raise ModelError(
            f"register_external_parameter(...): {found[1].name!r} is in the unit {found[1].unit.name!r} already, and has "
            "its values only while that runs. Remedy: call it before initialize(), in the module's constructor for example."
        )
    setattr(parameter, EXTERNAL_MARK, True)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back ``register_external_parameter``. After ``initialize()`` the parameter stays where it is."""
    _check(module, parameter)
    setattr(parameter, EXTERNAL_MARK, False)


def _check(module: nn.Module, parameter: nn.Parameter) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        found = f"{type(module).__name__} and {type(parameter).__name__}"
        raise TypeError(f"external parameters are given as a module and a parameter that it uses, not {found}.")
