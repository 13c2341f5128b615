"""Guards: what a script may not do with parameters that the engine manages, found out where a pass begins."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from ..distributed.device import on_host
from ..errors import ModelError, ReleasedParameterError, StepError
from ..log import listed, warn_once
from ..plan.parameter_kinds import repacking
from .flat_group import FlatGroup, edited, shows_copy
from .gathers import ExecutionTrace
from .placeholders import AWAY, ReadWatch, storage_key, tensors_in
from .unit import Unit

# On a GPU, where reading placeholders waits for the device, only so many forwards look for writes to them.
_LOOKED_AT = 10
LOOKING_STEPS = 3  # which look for writes to whole parameters: that takes about as long as an update
_MASK = "_mask"  # what torch.nn.utils.prune adds to the name of a parameter, for its buffer
_BY_COPY = (
    "do it before initialize(), or copy values with param.data.copy_(...) inside zerorun.zero.GatheredParameters(param, "
    "modifier_rank=0)"
)


class AddedParameters:
    """Finds parameters that ``module`` has got since: no engine trains them.

    Modules tell of whatever they are given, all of the process. So a step looks through ``module`` only after that.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = {id(param) for param in module.parameters()}
        self._may_be_more = False
        self._added: list[tuple[str, ref[nn.Parameter]]] = []

    def watched(self) -> Iterator[RemovableHandle]:
        """Hooks, to be removed in the end; they do not keep the module alive."""
        note = WeakMethod(self._note)

        def registered(*of_what: Any) -> None:
            if (known := note()) is not None:
                known()

        yield register_module_parameter_registration_hook(registered)
        yield register_module_module_registration_hook(registered)

    def _note(self) -> None:
        self._may_be_more = True

    def refuse_trained(self) -> None:
        """Raise StepError if one of them has a gradient: this step does not use it."""
        if self._may_be_more:
            self._look()
        if self._trained():
            self._look()  # nobody tells what has been taken out of the module since
        trained = self._trained()
        if trained:
            raise StepError(
                f"the model has changed since initialize(): there is a gradient of {listed(trained, 1)}, which is new. "
                "What is new is neither trained nor saved. Weights are those before this step. Remedy: make a new engine "
                "after changing parameters, as by adding an adapter; or add all adapters before initialize(), and let "
                "their parameters require a gradient there. If the script trains it with an optimizer of its own, let that "
                "step, and call its zero_grad(), before engine.step()."
            )

    def _look(self) -> None:
        self._may_be_more = False
        named = self._module.named_parameters()
        self._added = [(name, ref(param)) for name, param in named if id(param) not in self._known]

    def _trained(self) -> list[str]:
        found = ((name, param()) for name, param in self._added)
        return [repr(n) for n, p in found if p is not None and p.requires_grad and p.grad is not None]


class ScriptGuard:
    """Finds what a script does with parameters that would be lost, or is not what it seems.

    ``held``: ids of parameters inside a GatheredParameters block; ``joined``: id -> name of those of them that tensor ranks
    divide, and that are whole there. ``state_dict_allowed``: though it has placeholders, which whoever asks puts full
    values for; ``placeholders_shown``: to the script, too. ``added``: what the module has got since. ``written``: id ->
    name of the parameters that the last ``take_writes`` has found.
    """

    def __init__(self, module: nn.Module, units: list[Unit], device: torch.device) -> None:
        self.held: set[int] = set()
        self.joined: dict[int, str] = {}
        self._frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        self.state_dict_allowed = self.placeholders_shown = False
        self.added = AddedParameters(module)
        self._units, self._on_cpu = units, on_host(device)
        self._copies = [group for unit in units for group in unit.trainable if shows_copy(group)]
        self._passes = 0
        self.is_lenient = False
        self._counted, self._looks = 0, 0  # writes that torch has counted, and looks for edits, that found nothing
        trained = [group for unit in units for group in unit.trainable]
        self._trained = [pair for group in trained for pair in zip(group.names, group.params, strict=True)]
        groups = [group for unit in units for group in unit.flat_groups]
        named = [pair for group in groups for pair in zip(group.names, group.params, strict=True)]
        self._named = [(name, param) for name, param in named if not param.is_inference()]
        self._versions = self._versions_now()
        self.written: dict[int, str] = {}

    def watched(self) -> Iterator[RemovableHandle]:
        """Hooks, to be removed in the end; they do not keep the module alive."""
        yield from self.added.watched()
        refuse = WeakMethod(self._refuse_mask)

        def registered(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
            if name.endswith(_MASK) and (known := refuse()) is not None:
                known(module, name.removesuffix(_MASK))

        yield register_module_buffer_registration_hook(registered)

    def _refuse_mask(self, module: nn.Module, name: str) -> None:
        """Raise ReleasedParameterError for a mask of torch.nn.utils.prune that was made from a placeholder's NaN.

        A given mask needs no values, but ``prune.global_unstructured`` gives those that it has made from them.
        """
        pruned = module._parameters.get(f"{name}_orig")
        for group in (group for unit in self._units for group in unit.flat_groups):
            if pruned is not None and storage_key(pruned) == storage_key(group.marks):
                found = next(known for known, param in zip(group.names, group.params, strict=True) if param is pruned)
                raise ReleasedParameterError(
                    f"parameter {found!r} is pruned where only a placeholder (NaN) of it is on this rank, so its mask "
                    "would hide any elements. It is as before. Remedy: prune in a block of "
                    "zerorun.zero.GatheredParameters(params), with all parameters that are pruned together."
                )

    def own_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of ``module`` with the parameters and buffers themselves, as they are, by their own names.

        A ``state_dict`` of the module's class may leave weights out, as that of TRL's value heads does with adapters.
        """
        self.state_dict_allowed = True
        try:
            return nn.Module.state_dict(module, keep_vars=True)
        finally:
            self.state_dict_allowed = False

    def show_placeholders(self) -> None:
        """Let the script have state dicts with placeholders. Whoever calls this sees to it that they are not saved."""
        self.placeholders_shown = True

    def be_lenient(self) -> None:
        """Warn of what a script does in vain, and do not raise, as where it was made for DeepSpeed."""
        self.is_lenient = True

    def take_in_replaced(self, units: Sequence[Unit]) -> list[tuple[FlatGroup, int]]:
        """Take in the values of tensors that a script has put into the place of frozen ones; return all other such places.

        Momentum encoders give their weights new tensors in each step.
        """
        replaced = (found for unit in units for found in unit.replaced())
        return [
            (group, entry)
            for group, entry in replaced
            if id(group.params[entry]) not in self.held and not group.take_in(entry)
        ]

    def refuse_replaced(self) -> None:
        """Raise ModelError if a parameter has another tensor than the engine's. A frozen one that is always here may."""
        for group, entry in self.take_in_replaced(self._units):
            instead = "its dtype is what it was, so leave out the call, or the option"
            if group.params[entry].dtype != group.plan.dtype:
                instead = "to compute in 16 bits, set bf16 or fp16 in the configuration"
            raise ModelError(
                f"parameter {group.names[entry]!r} was given another tensor after initialize(), by param.data = ... or "
                "by a call like model.half() or model.to(...), which Trainer makes for bf16_full_eval and "
                f"fp16_full_eval; its optimizer does not know. Remedy: {_BY_COPY}; {instead}."
            )

    def refuse_edits(self, *, surely: bool = False) -> None:
        """Raise ReleasedParameterError if a script has written in place to parameters that have masters beside them.

        It looks in the first steps, and later after writes that torch counts, of which ``param.data.mul_()`` is none; with
        ``surely`` in any case. Raises SwapError if masters could not be written to a disk.
        """
        if not self._copies:
            return
        counted = sum([sum([param._version % AWAY for param in group.params]) for group in self._copies])
        if not surely and self._looks >= LOOKING_STEPS and counted == self._counted:
            return
        for link in {unit.link for unit in self._units}:
            link.flush()  # masters that are still on the way to a disk
        found = [(group, entry) for group in self._copies for entry in edited(group)]
        names = [repr(group.names[entry]) for group, entry in found if id(group.params[entry]) not in self.held]
        if names:
            problem = (
                f"{len(names)} parameters were written to in place since the last step: {listed(sorted(names), 3)}. They "
                "are copies of masters, which do not know of it: the next step brings the old values back, and a "
                "save has both. Remedy: write in a block of zerorun.zero.GatheredParameters(params, modifier_rank=0), or "
                "load values by load_state_dict(). For a layer that does it in its forward, as nn.Embedding with max_norm, "
                "train in fp32 without offload."
            )
            if not self.is_lenient:
                raise ReleasedParameterError(problem)
            warn_once(problem)
        self._looks, self._counted = self._looks + 1, counted

    def refuse_written(self, unit: Unit) -> None:
        """Raise ModelError if the forward of ``unit`` has written to its own weights, which are gone with the slot.

        An embedding with max_norm does so, of which there is a warning.
        """
        names = [name for group in unit.flat_groups for name in group.written]
        for group in unit.flat_groups if names else ():
            group.written.clear()
        modules = (part for module in unit.modules for part in module.modules()) if names else ()
        if names and not any(getattr(part, "max_norm", None) is not None for part in modules):
            problem = (
                f"the forward of unit {unit.name!r} has written to {listed(sorted(map(repr, {*names})), 3)}, parameters of "
                "its own. At stage 3 they are there for as long as it runs, and what it has written is lost. Remedy: make "
                "what forwards change a buffer; or write between steps, in zerorun.zero.GatheredParameters(params, "
                "modifier_rank=0); or use stage 2 in fp32."
            )
            if not self.is_lenient:
                raise ModelError(problem)
            warn_once(problem)

    def _versions_now(self) -> dict[int, int]:
        return {id(param): param._version % AWAY for _, param in self._named}

    def forget_writes(self, param: nn.Parameter) -> None:
        """What was written to ``param`` on this rank, all ranks have now."""
        if id(param) in self._versions:
            self._versions[id(param)] = param._version % AWAY

    def take_writes(self) -> int:
        """How many writes in place to parameters torch has counted since the last call; ``param.data.mul_()`` is none."""
        before, self._versions = self._versions, self._versions_now()
        self.written = {}
        if before == self._versions:
            return 0
        self.written = {id(p): name for name, p in self._named if before[id(p)] != self._versions[id(p)]}
        return sum(self._versions.values()) - sum(before.values())

    def frozen_since(self) -> list[str]:
        """Names of the parameters that are trained, and that the script has frozen, for a while or for good."""
        return [name for name, param in self._trained if not param.requires_grad]

    def look(self) -> None:
        """Raise ModelError or ReleasedParameterError if a parameter has values that the shards do not have."""
        self.refuse_replaced()
        self._passes += 1
        if self._on_cpu or self._passes <= _LOOKED_AT:
            for name in (name for unit in self._units for name in unit.overwritten()):
                raise ReleasedParameterError(
                    f"parameter {name!r} was written to where only a placeholder of it is on this rank, so the values are "
                    f"lost. Remedy: {_BY_COPY}."
                )

    def refuse_joined(self) -> None:
        """Raise ModelError if a pass would run divided layers with whole parameters: each rank would compute all."""
        if self.joined:
            raise ModelError(
                f"a forward inside a block of GatheredParameters(...) that has {listed(sorted(self.joined.values()))}: "
                "tensor ranks divide these parameters, and cannot run with all of each. Remedy: leave the block before."
            )

    def refuse_thawed(self) -> None:
        """Parameters that were frozen when room for gradients and optimizer states was made would never be updated."""
        thawed = [repr(name) for name, param in self._frozen if param.requires_grad]
        if thawed:
            raise StepError(
                f"parameter {listed(thawed, 1)} requires a gradient now, and was frozen when initialize() was called: it "
                "has no optimizer state and would never change. Weights are those before this step. Remedy: let every "
                "parameter that is ever trained require a gradient when initialize() is called, and freeze it after that "
                "with requires_grad_(False) for as long as it is not trained."
            )

    def refuse_repacked(self, unit: Unit) -> None:
        """Raise if a layer has packed its frozen weight anew: what it says of the bytes is not true of those here."""
        for group, entry in unit.replaced() if any(group.plan.packed for group in unit.flat_groups) else ():
            param = group.params[entry]
            if repacking(param) and id(param) not in self.held:
                raise ModelError(
                    f"the layer of parameter {group.names[entry]!r}, a {type(param).__name__}, gave it another tensor in "
                    "its forward, which would be lost, and may have changed its scales to fit: "
                    f"{repacking(param)}. Remedy: set that before initialize(), and build the model anew."
                )


class ReadGuard:
    """Watches the first pass of each kind for reads of placeholders: see [Note: the watch] of placeholders.py.

    ``watches``: False if there are none, or nobody is to look.
    """

    def __init__(self, module: nn.Module, units: list[Unit], device: torch.device, *, watches: bool) -> None:
        self._module, self._on_cpu = module, on_host(device)
        self._units, self._shares = units, any(not unit.resident for unit in units)
        self._watches = watches
        self._watch: ReadWatch | None = None  # that is on, in the thread ``_thread``
        self._thread = 0
        self._watched: set[Hashable] = set()  # kinds of passes
        self._seen_nan: set[Hashable] = set()

    @property
    def is_watching(self) -> bool:
        """True in the thread of the pass that is watched. Another one, in which a script runs a block, has other modes."""
        return self._watch is not None and self._thread == get_ident()

    def begin(self, key: Hashable) -> None:
        """A pass of the kind ``key`` begins."""
        kind = (key, self._module.training)
        if self._watches and self._watch is None and kind not in self._watched:
            self._watched.add(kind)
            sharing = (unit for unit in self._units if not unit.resident)
            self._watch = ReadWatch((g.marks, g.names, unit.name) for unit in sharing for g in unit.flat_groups)
            self._watch.__enter__()
            self._thread = get_ident()

    def end(self) -> None:
        """The outermost forward is over."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)

    def look_at(self, output: Any, trace: ExecutionTrace) -> None:
        """Watch the next pass of this kind, too, once, if an evaluation gives NaN: it may have come from a placeholder."""
        kind = (trace.key, self._module.training)
        if trace.with_gradients or not self._shares or not self._on_cpu or kind in self._seen_nan:
            return
        if any(bool(tensor.sum().isnan()) for tensor in tensors_in(output) if tensor.is_floating_point()):
            self._seen_nan.add(kind)
            self._watched.discard(kind)
