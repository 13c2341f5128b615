"""Optimizers from the config, by DeepSpeed's names, and what ZeRO needs to know about any optimizer.

Every name but ``Lion``, ``Lamb``, ``AdamSAGE``, ``Sophia`` and ``Muon`` stands for a ``torch.optim`` class; some of these
are replaced by single-pass updates, and Adafactor by one that works on parts of parameters.
DeepSpeed's deviations from torch are reproduced here by parameters: type ``Adam`` means decoupled weight decay, and the
default ``weight_decay`` of AdamW is 0.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zerorun.distributed.device import CPU, GPU
from zerorun.errors import ConfigError, ConfigProblem, ModelError, did_you_mean
from zerorun.log import warn_once
from zerorun.ops import single_pass
from zerorun.ops.single_pass import SinglePassOptimizer
from zerorun.ops.state_format import BLOCK, is_scale

from .adafactor import Adafactor
from .lamb import Lamb
from .muon import Muon
from .optimizer_needs import Needs, WatchedSettings, copy_over, overrides_of, try_needs
from .parameter_parts import PartsOptimizer

# The update of an element depends only on that element's gradient and state (and on step counts), so these optimizers can
# work on any 1-D piece of a parameter. Types are compared exactly: a subclass may update differently.
ELEMENTWISE: frozenset[type] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        single_pass.Adam,
        single_pass.Adam8bit,
        single_pass.Adagrad,
        single_pass.Lion,
        single_pass.SGD,
        single_pass.AdamSAGE,
        single_pass.Sophia,
    }
)

# The update needs sums over all of a parameter, which ranks make together: see parameter_parts.py.
BY_SUMS: frozenset[type] = frozenset({Adafactor, Lamb})

# The update depends on all of a parameter, and on nothing of others.
BY_MATRICES: frozenset[type] = frozenset({torch.optim.Adafactor, torch.optim.Muon, Muon})

# Classes with a fused kernel, and the device types on which it is used. The CPU kernels (torch 2.13) round the last
# (numel mod 16) elements of an fp32 tensor differently from the rest, by up to one unit in the last place. So cuts at
# multiples of 16 elements give the same bits as no cut; for other cuts, that takes ``"fused": false`` in optimizer.params.
_FUSED: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: (CPU, GPU),
    torch.optim.AdamW: (CPU, GPU),
    torch.optim.SGD: (CPU, GPU),
    torch.optim.Adagrad: (CPU,),
}

# Class -> (the optimizer that updates tensors in a single pass, the parameters of the class that it supports).
_SINGLE_PASS: dict[type, tuple[type[SinglePassOptimizer], frozenset[str]]] = {
    torch.optim.Adam: (single_pass.Adam, frozenset({"lr", "betas", "eps", "weight_decay"})),
    torch.optim.AdamW: (single_pass.Adam, frozenset({"lr", "betas", "eps", "weight_decay"})),
    torch.optim.Adagrad: (
        single_pass.Adagrad,
        frozenset({"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}),
    ),
    torch.optim.SGD: (single_pass.SGD, frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov"})),
}

# Keywords of torch's classes -> the values with which they ask for nothing that a single-pass update would not do.
_ASKS_NOTHING: dict[str, tuple[bool | None, ...]] = {
    **dict.fromkeys(("amsgrad", "maximize", "foreach", "capturable", "differentiable"), (None, False)),
    "fused": (None, True),
}

# Where DeepSpeed's defaults differ from those of the class.
_DEFAULTS: dict[type, dict[str, Any]] = {
    single_pass.Lion: {"lr": 1e-3, "betas": (0.9, 0.999)},
}

_DECAY_OF_TORCH = 0.01  # torch.optim.AdamW's, by default

# Spellings of our Adam in 8 bits: bitsandbytes', and those of other trainers' options.
EIGHT_BIT = ("adam8bit", "adamw8bit", "adam_8bit", "adamw_8bit", "adamw_bnb_8bit")

_UNUSABLE: dict[type, tuple[str, str]] = {
    torch.optim.LBFGS: (
        "evaluates the model several times in one step and takes dot products over all parameters.",
        "Use AdamW, or run LBFGS without zerorun.",
    ),
    torch.optim.SparseAdam: (
        "needs sparse gradients, but gradients are reduced as dense slices of flat buffers.",
        "Use Adam, and embeddings with sparse=False.",
    ),
}


def build_optimizer(type: str, params: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make the optimizer that ``optimizer.type`` and ``optimizer.params`` of the config describe, over ``groups``.

    ``groups`` are torch parameter groups of tensors, usually 1-D fp32 shards; a group's own settings take precedence.
    Raises :class:`ConfigError` with keys ``optimizer.type`` and ``optimizer.params.<name>``, all problems at once.
    """
    optimizer_class, kwargs = resolve_optimizer(type, params)
    if not groups:
        raise ModelError("there are no parameters to optimize. Give the model a parameter with requires_grad=True.")
    groups = [{**group, "params": as_list(group["params"])} for group in groups]
    if _can_pass_once(optimizer_class, kwargs, groups):
        optimizer_class, kwargs = _pass_once(optimizer_class, kwargs)
    elif _can_fuse(optimizer_class, kwargs, groups):
        kwargs = {**kwargs, "fused": True}
    try:
        return optimizer_class(groups, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(_constructor_problems(optimizer_class, kwargs, error)) from error


def resolve_optimizer(type: str, params: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and its keywords, with DeepSpeed's names, defaults and extra parameters translated."""
    optimizer_class = _lookup(type)
    kwargs = {**_DEFAULTS.get(optimizer_class, {}), **params}
    problems = []
    if "max_grad_norm" in params:
        reason, remedy = "clipping is not the optimizer's.", "Remove it and set the top-level gradient_clipping."
        problems.append(ConfigProblem("optimizer.params.max_grad_norm", params["max_grad_norm"], reason, remedy))
    if optimizer_class is torch.optim.AdamW:
        optimizer_class, kwargs = _translate_adam(type, kwargs)
    if optimizer_class is torch.optim.Adafactor and "foreach" not in kwargs:
        optimizer_class = Adafactor
    if optimizer_class is single_pass.Adam8bit:
        kwargs = _translate_adam8bit(type, kwargs)
    allowed = _keywords(optimizer_class)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(optimizer_class))
    problems += [
        _unknown_param(optimizer_class, key, value, allowed)
        for key, value in kwargs.items()
        if key not in allowed and key != "max_grad_norm" and not takes_all
    ]
    if problems:
        raise ConfigError(problems)
    kwargs = {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    return optimizer_class, kwargs


def needs_of(
    optimizer: torch.optim.Optimizer | None, type: str, params: dict[str, Any], groups: list[dict[str, Any]]
) -> Needs:
    """What ``optimizer``, or the one that ``type`` and ``params`` of the config describe, needs of the parameters.

    Classes that are not known are tried; a class attribute ``elementwise = True`` spares them that. With ``elementwise =
    False``, also of the object, it needs matrices at least, as it does with overrides: their parameters get tensors of
    their own. ``groups``: the settings of its parameter groups. Raises ConfigError as ``build_optimizer``.
    """
    kind = resolve_optimizer(type, params)[0] if optimizer is None else optimizer.__class__
    known = _known_needs(kind)
    says_no = getattr(kind if optimizer is None else optimizer, "elementwise", None) is False
    least = Needs.MATRICES if says_no or overrides_of(optimizer) else Needs.ELEMENTS
    if known is not None:
        return max(least, known)

    def make(members: list[list[Tensor]]) -> torch.optim.Optimizer:
        if optimizer is not None:
            return copy_over(optimizer, members)
        made = [{**settings, "params": own} for settings, own in zip(settings_of(groups), members, strict=True)]
        return build_optimizer(type, params, made)

    return max(least, try_needs(make, len(groups)))


def _known_needs(kind: type) -> Needs | None:
    """What optimizers of this very class need; None if only a trial can tell."""
    if kind in ELEMENTWISE or vars(kind).get("elementwise", False):
        return Needs.ELEMENTS
    if kind in BY_SUMS or vars(kind).get("by_sums", False):
        return Needs.SUMS
    return Needs.MATRICES if kind in BY_MATRICES else None


def watched(optimizer: torch.optim.Optimizer, divided_for: Needs) -> WatchedSettings | None:
    """What sees to it that ``optimizer`` does not come to need more; None if its class is known."""
    return WatchedSettings(optimizer, divided_for) if _known_needs(type(optimizer)) is None else None


def parts_kind(
    optimizer: torch.optim.Optimizer | None, type: str, params: dict[str, Any], needs: Needs
) -> type[PartsOptimizer] | None:
    """Return the class of the optimizer, as for ``needs_of``, if it works on parts of parameters; None if it does not."""
    kind = resolve_optimizer(type, params)[0] if optimizer is None else optimizer.__class__
    return kind if needs is Needs.SUMS and issubclass(kind, PartsOptimizer) else None


def takes_curvature(optimizer: torch.optim.Optimizer | None, type: str) -> bool:
    """True if ``optimizer``, or the one that is called ``type``, needs curvatures besides gradients."""
    kind = _lookup(type) if optimizer is None else optimizer.__class__
    return issubclass(kind, single_pass.Sophia)


def settings_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What parameter groups say beside their parameters."""
    own = ("params", "param_names")
    return [{key: value for key, value in group.items() if key not in own} for group in groups]


def refuse_unusable(optimizer: torch.optim.Optimizer) -> None:
    """Raise :class:`ModelError` for an optimizer that cannot work on shards at all (LBFGS, SparseAdam, Sophia)."""
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "update_hessian", None)):
        raise ModelError(
            f"optimizer {name} takes its curvature from gradients in update_hessian(), outside of step(), where it has "
            "none here: they are reduced, averaged and clipped just before step(). It would only follow the sign of its "
            'momentum. Remedy: set "optimizer": {"type": "Sophia", "params": {"lr": ..., "rho": ..., "bs": ...}} in the '
            "configuration, and call engine.backward(loss, curvature=True) with zerorun.sampled_labels(logits) in place of "
            "update_hessian()."
        )
    for unusable, (reason, remedy) in _UNUSABLE.items():
        if isinstance(optimizer, unusable):
            raise ModelError(f"optimizer {name} {reason} Remedy: {remedy}")


def warn_of_kept_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Warn if ``optimizer`` keeps parameters outside of its groups: what it steps in an engine are other tensors."""
    members = {id(param) for group in optimizer.param_groups for param in group["params"]}

    def has_some(value: Any, depth: int) -> bool:
        if id(value) in members or (type(value) is int and value in members):
            return True
        if depth and isinstance(value, dict):
            return any(has_some(entry, depth - 1) for both in value.items() for entry in both)
        return depth > 0 and isinstance(value, (list, tuple, set)) and any(has_some(entry, depth - 1) for entry in value)

    own = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    kept = [name for name, value in own.items() if has_some(value, 3)]
    if kept:
        warn_once(
            f"optimizer {type(optimizer).__name__} keeps parameters, or their id(), in {' and '.join(map(repr, kept))}. "
            "What it steps here are other tensors, with parts of parameters, and these it does not find there. If it looks "
            "for them, updates are not those of one process. Remedy: give settings of single parameters by groups."
        )


def split_state(optimizer: torch.optim.Optimizer, parameter: Tensor, lengths: list[int]) -> list[Tensor]:
    """Replace one 1-D parameter of an optimizer that needs only elements by consecutive views, and return the views.

    ``lengths`` of a parameter whose state is in blocks are whole blocks, but for the last. The views take the parameter's
    place in its group. The gradient and state tensors of its shape are split into views of
    the same storage, step counts (0-dim tensors) are cloned, and Python values are copied. Stepping all pieces is then the
    same as stepping the whole, and a piece without a gradient keeps its value, its state and its step count.
    """
    if parameter.dim() != 1 or sum(lengths) != parameter.numel() or min(lengths, default=0) < 0:
        raise ValueError(f"cannot cut a tensor of shape {tuple(parameter.shape)} into lengths {lengths}")
    group, index = _find(optimizer, parameter)
    state = optimizer.state.get(parameter, {})
    in_blocks = [-(-length // BLOCK) for length in lengths]
    parts = {
        key: list(value.split(in_blocks)) if is_scale(key, state) else _cut(key, value, parameter, lengths)
        for key, value in state.items()
    }
    pieces = list(parameter.detach().split(lengths))
    if isinstance(optimizer, SinglePassOptimizer):
        optimizer.inherit(parameter, pieces)
    grads = parameter.grad.split(lengths) if parameter.grad is not None else None
    for number, piece in enumerate(pieces):
        piece.requires_grad_(parameter.requires_grad)
        if grads is not None:
            piece.grad = grads[number]
        if state:
            optimizer.state[piece] = {key: values[number] for key, values in parts.items()}
    optimizer.state.pop(parameter, None)
    group["params"][index : index + 1] = pieces
    if "param_names" in group:
        name = group["param_names"][index]
        group["param_names"][index : index + 1] = [f"{name}[{number}]" for number in range(len(pieces))]
    return pieces


def _cut(key: str, value: Any, parameter: Tensor, lengths: list[int]) -> list[Any]:
    """Return one state entry of ``parameter``, cut for each of its pieces."""
    if not isinstance(value, Tensor):
        return [value] * len(lengths)
    if value.dim() == 0:
        return [value.clone() for _ in lengths]
    if value.shape != parameter.shape:
        raise ModelError(f"optimizer state {key!r} has shape {tuple(value.shape)}, not that of its parameter.")
    return list(value.split(lengths))


def _find(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[dict[str, Any], int]:
    for group in optimizer.param_groups:
        for index, candidate in enumerate(group["params"]):
            if candidate is parameter:
                return group, index
    raise ValueError("the tensor is not a parameter of this optimizer")


def _lookup(name: str) -> type[torch.optim.Optimizer]:
    """Return the class for ``optimizer.type``: one of ours or torch's, whatever the case, or ``package.module.Class``.

    ``Adam`` gives AdamW: see :func:`_translate_adam`.
    """
    if "." in name:
        return _imported(name)
    classes: dict[str, type[torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    classes |= {"lion": single_pass.Lion, "lamb": Lamb, "muon": Muon, "adam": torch.optim.AdamW}
    classes |= {"adamsage": single_pass.AdamSAGE, "sophia": single_pass.Sophia, "sophiag": single_pass.Sophia}
    classes |= dict.fromkeys(EIGHT_BIT, single_pass.Adam8bit)
    return classes[name.lower()]


def _imported(name: str) -> type[torch.optim.Optimizer]:
    """Import the user's class ``package.module.Class``. Raises ConfigError."""
    module, _, attribute = name.rpartition(".")
    remedy = "Write it as Python would import it: from package.module import Class is package.module.Class."
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        reason = f"it cannot be imported: {type(error).__name__}: {error}."
        raise ConfigError([ConfigProblem("optimizer.type", name, reason, remedy)]) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        reason = "it is not a subclass of torch.optim.Optimizer."
        raise ConfigError([ConfigProblem("optimizer.type", name, reason, remedy)])
    return found


def _translate_adam(name: str, kwargs: dict[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Drop DeepSpeed's own Adam parameters; type ``Adam`` is torch's Adam only with ``adam_w_mode: false``."""
    decoupled = kwargs.get("adam_w_mode", True)
    if name.lower() == "adamw" and not decoupled:
        warn_once("optimizer AdamW: adam_w_mode false has no effect; type Adam with it has coupled weight decay")
        decoupled = True
    if kwargs.get("set_grad_none") is False:
        warn_once(f"optimizer {name}: set_grad_none has no effect; the engine owns the gradients")
    own = ("torch_adam", "adam_w_mode", "set_grad_none", "bias_correction")
    kept = {key: value for key, value in kwargs.items() if key not in own}
    # With torch_adam DeepSpeed makes torch.optim.AdamW, which decays by default.
    kept.setdefault("weight_decay", _DECAY_OF_TORCH if kwargs.get("torch_adam") and decoupled else 0.0)
    if not kwargs.get("bias_correction", True):  # torch's classes always correct the bias
        kept = {key: value for key, value in kept.items() if value not in _ASKS_NOTHING.get(key, ())}
        return single_pass.Adam, {**kept, "decoupled_weight_decay": decoupled, "bias_correction": False}
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), kept


def _translate_adam8bit(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Let ``adam_w_mode`` decide on the kind of decay, as for ``Adam``."""
    kept = {key: value for key, value in kwargs.items() if key not in ("adam_w_mode", "torch_adam", "set_grad_none")}
    if "adamw" not in name.lower():
        kept["decoupled_weight_decay"] = kwargs.get("adam_w_mode", True)
    return kept


_signature = cache(inspect.signature)


def _parameters(optimizer_class: Any) -> list[inspect.Parameter]:
    """Those of the constructor but for the first, the parameters to optimize."""
    return list(_signature(optimizer_class).parameters.values())[1:]


def _keywords(optimizer_class: type[torch.optim.Optimizer]) -> list[str]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [parameter.name for parameter in _parameters(optimizer_class) if parameter.kind not in variadic]


def _unknown_param(optimizer_class: Any, key: str, value: object, allowed: list[str]) -> ConfigProblem:
    reason = f"{optimizer_class.__name__} has no such parameter."
    remedy = f"{did_you_mean(key, allowed)} Allowed: {', '.join(allowed)}.".lstrip()
    return ConfigProblem(f"optimizer.params.{key}", value, reason, remedy)


def _can_fuse(optimizer_class: Any, kwargs: dict[str, Any], groups: list[dict[str, Any]]) -> bool:
    """True if torch has a fused kernel for every tensor and the user asked for no other implementation."""
    if any(key in source for source in (kwargs, *groups) for key in ("fused", "foreach", "differentiable")):
        return False
    if optimizer_class is torch.optim.SGD and any(source.get("momentum") for source in (kwargs, *groups)):
        return False  # the kernel fails if only some tensors have had a first step, as with parameters used later
    devices = _FUSED.get(optimizer_class, ())
    return bool(devices) and all(t.device.type in devices and t.is_floating_point() for t in _tensors(groups))


def _tensors(groups: list[dict[str, Any]]) -> list[Tensor]:
    items = [item for group in groups for item in group["params"]]
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _can_pass_once(optimizer_class: Any, kwargs: dict[str, Any], groups: list[dict[str, Any]]) -> bool:
    """True if the class has a single-pass update that supports all the given parameters and tensors."""
    if optimizer_class not in _SINGLE_PASS or _beyond_single_pass(optimizer_class, kwargs, groups):
        return False
    return all(t.dtype in (torch.float32, torch.bfloat16) and t.is_contiguous() for t in _tensors(groups))


def _beyond_single_pass(optimizer_class: Any, kwargs: dict[str, Any], groups: list[dict[str, Any]]) -> list[str]:
    """The keywords with which more is asked than a single-pass update can. Groups may have keys that mean nothing to it."""
    once, known = _SINGLE_PASS[optimizer_class]
    others = {*_keywords(optimizer_class), *_keywords(once)} - known
    asked = [(key, value) for source in (kwargs, *groups) for key, value in source.items() if key in others]
    return sorted({key for key, value in asked if value not in _ASKS_NOTHING.get(key, ())})


def keys_in_the_way(type: str, params: dict[str, Any], groups: list[dict[str, Any]]) -> list[str]:
    """The keywords but for which the optimizer of the config would update in a single pass."""
    optimizer_class, kwargs = resolve_optimizer(type, params)
    return _beyond_single_pass(optimizer_class, kwargs, groups) if optimizer_class in _SINGLE_PASS else []


def _pass_once(optimizer_class: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    decoupled = {"decoupled_weight_decay": optimizer_class is torch.optim.AdamW}
    once, known = _SINGLE_PASS[optimizer_class]
    kwargs = {key: value for key, value in kwargs.items() if key in known}
    return once, {**kwargs, **(decoupled if once is single_pass.Adam else {})}


def as_list(params: Any) -> list[Any]:
    """Return ``params`` of a group as a list. Torch accepts one tensor, or any iterable of tensors or (name, tensor)."""
    return [params] if isinstance(params, Tensor) else list(params)


def _constructor_problems(optimizer_class: Any, kwargs: dict[str, Any], error: Exception) -> list[ConfigProblem]:
    """Find the parameters that the class refuses, by passing it each parameter alone, and those it cannot do without."""
    problems = []
    allowed = ", ".join(_keywords(optimizer_class))
    required = [found.name for found in _parameters(optimizer_class) if found.default is inspect.Parameter.empty]
    given = {key: kwargs[key] for key in required if key in kwargs}
    for key, value in kwargs.items():
        try:
            optimizer_class([torch.zeros(1, 1)], **given | {key: value})
        except (TypeError, ValueError, RuntimeError) as refusal:
            reason = f"{optimizer_class.__name__} refused it: {refusal}."
            remedy = f"Correct the value. Allowed parameters: {allowed}."
            problems.append(ConfigProblem(f"optimizer.params.{key}", value, reason, remedy))
    if problems:
        return problems
    reason = f"it cannot be built over these parameters: {error}."
    remedy = "Use another optimizer, or correct optimizer.params together."
    return [ConfigProblem("optimizer.type", optimizer_class.__name__, reason, remedy)]
