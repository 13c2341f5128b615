"""Views: a Hugging Face model as one of its parts sees it, with stand-ins for what lies in other parts.

[Note: the model's own forward runs on every part]
Every part calls the forward of the whole model, with the same keywords. So masks, positions and rotary tables are made
exactly as in the unsplit model, by its own code, and the last part uses the model's own head and loss.

    before   in all parts but the first, the modules before the blocks return a placeholder: the shape, not the values
    blocks   those of other parts pass their input on. A gate around the first local block replaces the placeholder by what
             was received; one around the last local block keeps what is to be sent
    after    in all parts but the last, the modules after the blocks pass their input on; their result is not used

Because the received value enters at the first local block, nothing that the model computes before its blocks (scaled
embeddings, added positions, dropout) can change it.

The model is put into a view only while a forward runs. Otherwise its tree holds all local modules under their own names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import PipelineError
from .pipelined import StageCut
from .pretrained_anatomy import Anatomy


@dataclass
class Crossing:
    """What goes into a part and what comes out, while it runs: hidden states [batch, length, width].

    ``length``: of whole sequences, of which ranks may have some rows each; None if it is not known.
    """

    received: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    running: bool = False
    length: int | None = None

    def shown(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what has no graph, and the shape that ``hidden`` would have with all rows."""
        if self.length is None or hidden.shape[1] >= self.length:
            return hidden.detach()
        return hidden.new_zeros(1).expand(hidden.shape[0], self.length, *hidden.shape[2:])


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


class Absent(nn.Module):
    """Stands in for a module of another part, and passes its input on. It has the plain attributes of that module."""

    is_elsewhere = True

    def __init__(self, original: nn.Module, crossing: Crossing, tuple_length: int | None = None) -> None:
        super().__init__()
        self._crossing = crossing
        plain = (str, int, float, bool, type(None))
        for name, value in vars(original).items():
            if not name.startswith("_") and name != "training" and isinstance(value, plain):
                setattr(self, name, value)
        self._length = tuple_length

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a module that is on another pipeline stage. Remedy: engine.state_dict() has all weights, and "
            "engine.topology.pipe_rank tells the stage."
        )

    def _running(self) -> Crossing:
        """Return the crossing. Raises PipelineError if the model is run as if it were whole."""
        if not self._crossing.running:
            raise PipelineError(
                "the model is cut into pipeline stages, of which other ranks have the rest: it runs in train_batch() and "
                "eval_batch() only. Remedy: to generate, or to run it by itself, export it and load it whole."
            )
        return self._crossing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._running()
        given = _first(args, kwargs)
        return given if self._length is None else (given, *(None,) * (self._length - 1))


class Placeholder(Absent):
    """Stands in for a module before the blocks. Its result has the shape of the hidden states; the values do not matter."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self._running().received
        assert received is not None  # the first part has no placeholders
        return self._crossing.shown(received)


class Gate(nn.Module):
    """Wraps the first or last local block: replaces its input by what was received, and keeps its output to be sent."""

    def __init__(self, inner: nn.Module, crossing: Crossing, *, takes: bool, gives: bool) -> None:
        super().__init__()
        self.inner = inner
        self._crossing, self._takes, self._gives = crossing, takes, gives

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)  # models read attributes of their blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._takes and args:
            args = (self._crossing.received, *args[1:])
        elif self._takes:
            kwargs["hidden_states"] = self._crossing.received
        output = self.inner(*args, **kwargs)
        if not self._gives:
            return output
        hidden = output[0] if isinstance(output, tuple) else output
        self._crossing.sent = hidden
        # What the model computes after this block is not used, so it needs no graph.
        shown = self._crossing.shown(hidden)
        return (shown, *output[1:]) if isinstance(output, tuple) else shown


@dataclass(frozen=True)
class _CrossingPlace:
    """Where a module is registered: ``holder[key]``. ``layer``: see ``Anatomy.layer_of``. ``absent``: its stand-in."""

    holder: dict[str, nn.Module | None]
    key: str
    layer: int
    absent: Absent


class Views:
    """All views of one model. ``cut`` counts layers: 0 for what comes before the blocks, the blocks, one for the rest."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, cut: StageCut) -> None:
        self._cut = cut
        self._last = anatomy.count + 1
        self._crossing = Crossing()
        self._blocks: dict[int, _CrossingPlace] = {}
        self._ends: list[_CrossingPlace] = []
        for module, layer in _split_modules(model, anatomy):
            for holder in model.modules():
                for key, child in holder._modules.items():
                    if child is module:
                        self._enter(_CrossingPlace(holder._modules, key, layer, self._absent(module, layer, anatomy)))

    def _absent(self, module: nn.Module, layer: int, anatomy: Anatomy) -> Absent:
        if layer == 0:
            return Placeholder(module, self._crossing)
        return Absent(module, self._crossing, anatomy.tuple_length if layer < self._last else None)

    def _enter(self, place: _CrossingPlace) -> None:
        if 0 < place.layer < self._last:
            self._blocks[place.layer] = place
        else:
            self._ends.append(place)

    def modules(self, layers: range) -> list[nn.Module]:
        """Return the modules that ``layers`` consist of."""
        places = (*self._ends, *self._blocks.values())
        found = [place.holder[place.key] for place in places if place.layer in layers]
        return [module for module in found if module is not None]

    def free(self) -> None:
        """Replace all modules that are in no local part by their stand-ins, so that their memory is freed."""
        local = set(self._cut.local_layers())
        for place in (*self._ends, *self._blocks.values()):
            if place.layer not in local:
                place.holder[place.key] = place.absent

    @contextlib.contextmanager
    def of(self, part: int, received: torch.Tensor | None, length: int | None = None) -> Iterator[Crossing]:
        """Put the model into the view of ``part``. Yields the Crossing that takes the hidden states to be sent.

        ``length``: of whole sequences, if it is known.
        """
        layers = self._cut.layers(part)
        places = (*self._ends, *self._blocks.values())
        whole = [place.holder[place.key] for place in places]
        self._crossing.received, self._crossing.length, self._crossing.running = received, length, True
        try:
            for place in places:
                if place.layer not in layers:
                    place.holder[place.key] = place.absent
            self._set_gates(layers)
            yield self._crossing
        finally:
            for place, module in zip(places, whole, strict=True):
                place.holder[place.key] = module
            self._crossing.received = self._crossing.sent = None
            self._crossing.running = False

    def _set_gates(self, layers: range) -> None:
        # If the part has no blocks, the gate goes around the stand-in of the nearest block.
        first = min(max(layers.start, 1), self._last - 1)
        final = max(min(layers.stop - 1, self._last - 1), 1)
        takes, gives = layers.start > 0, layers.stop <= self._last
        for layer in {first, final}:
            place = self._blocks[layer]
            inner = place.holder[place.key]
            assert inner is not None
            gate = Gate(inner, self._crossing, takes=takes and layer == first, gives=gives and layer == final)
            place.holder[place.key] = gate


def _split_modules(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[nn.Module, int]]:
    """Yield every module that only some parts need, with its layer. Others (rotary tables, masks) stay in all parts."""
    for layer, block in enumerate(model.get_submodule(anatomy.blocks).children(), 1):
        yield block, layer
    for names, layer in ((anatomy.before, 0), (anatomy.after, anatomy.count + 1)):
        for name in names:
            module = model.get_submodule(name)
            if isinstance(module, nn.Dropout) or any(True for _ in module.parameters()):
                yield module, layer
