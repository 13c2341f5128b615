"""Hooks of a script on ``module.load_state_dict()``, where weights come by another way, into the shards of ranks.

What comes after a load can run then, if the module's weights are whole; what comes before it, and would see a state dict,
cannot. Scripts are told of all that does not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys, _WrappedHook

from ..log import listed, warn_once
from ..plan.parameter_kinds import inside
from .init import part_of
from .runtime import ModuleHook
from .sharded_model import ShardedModel

_INSTALLED = {"site-packages", "dist-packages"}  # the folders of packages


def tell_of_hooks(model: nn.Module, how: str) -> None:
    """Warn of what the script would have run before modules take their values. ``how``: the call that loads."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        owner = next(kind for kind in type(module).__mro__ if "_load_from_state_dict" in vars(kind))
        if _is_own(owner):
            found.setdefault(f"{owner.__name__}._load_from_state_dict()", []).append(name)
        if any(_is_own(_inner(hook)) for hook in module._load_state_dict_pre_hooks.values()):
            found.setdefault(f"a hook before load_state_dict() of a {type(module).__name__}", []).append(name)
    for what, names in found.items():
        warn_once(
            f"{how}: {what} does not see the weights of {listed(list(map(repr, names)), 3)}, which are taken as they are "
            "stored. Remedy, if it changes names or values: load into a model without an engine by the model's own "
            "load_state_dict(), and call initialize() then."
        )


def run_hooks_after(model: nn.Module, how: str, sharded: ShardedModel | None) -> None:
    """Call what the script has registered by ``register_load_state_dict_post_hook``, in the order of torch.

    Where this rank has only parts of a module's weights, or placeholders, its hooks do not run, with a warning.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in _inside_out(model, set()):
        hooks = [hook for hook in module._load_state_dict_post_hooks.values() if not isinstance(hook, ModuleHook)]
        if hooks and _is_whole(module, sharded):
            for hook in hooks:
                hook(module, _IncompatibleKeys([], []))
        elif hooks:
            warn_once(
                f"{how}: module {names[id(module)]!r} ({type(module).__name__}) has a hook after load_state_dict(), which "
                "does not run here, where ranks have only parts of the weights. Remedy, if it is needed: call it after the "
                "load on all ranks, inside `with zerorun.zero.GatheredParameters(list(module.parameters()), "
                "modifier_rank=0):`."
            )


@contextmanager
def without_hooks_after(model: nn.Module) -> Iterator[None]:
    """In the block, ``load_state_dict()`` calls none of the script's hooks."""
    aside = [(module._load_state_dict_post_hooks, dict(module._load_state_dict_post_hooks)) for module in model.modules()]
    for hooks, kept in aside:
        for key, hook in kept.items():
            if not isinstance(hook, ModuleHook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, kept in aside:
            hooks.clear()
            hooks.update(kept)


def _inside_out(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """The modules, each once, after those inside of it."""
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _inside_out(child, seen)
        yield module


def _is_whole(module: nn.Module, sharded: ShardedModel | None) -> bool:
    """True if all weights in ``module`` can be read and changed here."""
    if sharded is None:
        return all(part_of(param) is None for param in module.parameters())
    held, shards = sharded.runtime.guard.held, sharded.parts.shards
    tensors = [tensor for param in module.parameters() for _, tensor in inside(param)]
    homes = [(tensor, sharded.homes[id(tensor)]) for tensor in tensors if id(tensor) in sharded.homes]
    if any(getattr(part, "is_elsewhere", False) for part in module.modules()):  # of another pipeline stage
        return False
    return all(id(tensor) in held or (home.unit.resident and id(tensor) not in shards) for tensor, home in homes)


def _inner(hook: Any) -> Any:
    """What the script has given, of what torch keeps of a hook."""
    while isinstance(hook, (_WrappedHook, partial)):
        hook = hook.hook if isinstance(hook, _WrappedHook) else hook.func
    return hook


def _is_own(what: Any) -> bool:
    """True for a class, a function or a callable of the script: installed packages know the names of their own files."""
    name = getattr(what, "__module__", None) or type(what).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:  # which builtins do not have either
        return name == "__main__"
    return name.partition(".")[0] != "zerorun" and not _INSTALLED.intersection(Path(file).parts)
