"""Activation checkpointing of the repeated blocks of an unmodified model: their forwards are replaced, and put back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..log import info_once, warn_once
from ..plan.replaced_forwards import ReplacedForward, between_graphs, compiled_by, compiler, uncompiled
from .checkpointed_call import Selection, run
from .host_pool import HostPool


@dataclass(frozen=True)
class Recompute:
    """The settings of the section ``activation_checkpointing``. ``every_n`` counts blocks."""

    policy: str = "none"  # none, full, every_n or selective
    every_n: int = 2
    pool: HostPool | None = None  # cpu_checkpointing

    def selection(self) -> Selection | None:
        return Selection() if self.policy == "selective" else None


class BlockForward(ReplacedForward):
    """The forward of a block, inside the module's hooks."""

    def __init__(self, module: nn.Module, owners: Sequence[nn.Module], settings: Recompute, caches: Caches) -> None:
        super().__init__(module)
        self._owners, self._caches = owners, caches
        self._pool, self._selection = settings.pool, settings.selection()

    @between_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(compiler(), args, kwargs)

    @uncompiled
    def _run(self, compiler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block, whose forward ``compiler`` compiles, if the script does so."""
        inner = compiled_by(compiler, self.inner)
        if not self.module.training or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if any(owner.gradient_checkpointing for owner in self._owners):
            _yield_to_the_model()
            return inner(*args, **kwargs)
        if self._caches.in_use((args, kwargs)):
            return inner(*args, **kwargs)
        args, kwargs = self._caches.without((args, kwargs))
        if self._selection is not None and compiler is not None:
            _do_not_compile()
            inner = self.inner
        return run(inner, args, kwargs, self._pool, self._selection, self.module)


def _yield_to_the_model() -> None:
    warn_once(
        "activation_checkpointing.policy has no effect while the model's own gradient checkpointing is on. Remedy: call "
        "model.gradient_checkpointing_disable(), or remove the key."
    )


def _do_not_compile() -> None:
    warn_once(
        'blocks are not compiled in training, because activation_checkpointing.policy is "selective": it keeps results of '
        'single operations, which a compiled block does not show. Remedy: use "full" or "every_n", or do not compile.'
    )


class Caches:
    """The caches of keys and values that Hugging Face models fill for generation, also in training if use_cache is left on.

    A block that runs twice would add to a cache twice. A cache that was empty when the first block got it is of no use to
    the forward, so blocks run without it. A cache with contents (a trained prefix) must be read, so such a forward is not
    recomputed.
    """

    def __init__(self) -> None:
        self._was_empty: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def in_use(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        """True if a cache with contents is among the arguments."""
        args, kwargs = given
        for value in (*args, *kwargs.values()):
            if _is_cache(value) and not self._was_empty.setdefault(value, value.get_seq_length() == 0):
                info_once("a forward with filled past_key_values is not recomputed: its blocks would add to them twice.")
                return True
        return False

    def without(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with None in place of each cache, and use_cache=False."""
        args, kwargs = given
        found = any(_is_cache(value) for value in (*args, *kwargs.values()))
        if not found and not kwargs.get("use_cache"):
            return given
        info_once("use_cache has no effect in training with activation checkpointing; past_key_values stay empty.")
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return args, kwargs


def _is_cache(value: Any) -> bool:
    """True for transformers' Cache classes, without importing them."""
    kinds = type(value).__mro__
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in kinds)


class CheckpointedBlocks:
    """Replaces the forwards of blocks, and is the handle that puts them back."""

    def __init__(self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], settings: Recompute) -> None:
        step = settings.every_n if settings.policy == "every_n" else 1
        caches = Caches()
        self._forwards = []
        for name, block in blocks[::step]:
            self._forwards.append(BlockForward(block, _owners(model, name), settings, caches))
        if not blocks:
            warn_once("activation_checkpointing.policy has no effect: the model has no repeated blocks.")

    def remove(self) -> None:
        """Put the original forwards back."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def _owners(model: nn.Module, name: str) -> list[nn.Module]:
    """Return those of the block and the modules around it that have Hugging Face's switch for checkpointing."""
    found, module = [model], model
    for part in name.split("."):
        module = module.get_submodule(part)
        found.append(module)
    return [module for module in found if isinstance(getattr(module, "gradient_checkpointing", None), bool)]
