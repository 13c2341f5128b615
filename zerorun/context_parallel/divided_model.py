"""A Hugging Face model whose sequences are divided inside: forwards are replaced in place, and put back.

[Note: where the sequence is divided]
The model gets the whole batch, and makes masks, positions and rotary tables from it. The hidden states [batch, sequence,
width] are cut at the first block. Blocks get rows of hidden states and tables, and the whole mask; what attends in them
exchanges rows (attention.py). When the model that holds the blocks returns, rows are joined, unless labels tell that the
loss follows: then the head has only this rank's rows, and the loss is summed over ranks (shard_loss.py).

A sequence that is shorter than there are ranks is not divided: each rank computes all of it.

In training each rank draws numbers of its own inside a block. Between blocks all ranks draw the same, because a model may
decide there which of them to leave out (layerdrop).

A block is told by a keyword how long the sequence is, not by the state of its model: what is recomputed in the backward
gets the same keyword again, whatever the model has been given in the meantime. Where the model itself recomputes blocks,
hooks run again with them, and know the forward by what the block is given for whole sequences: these tensors are the same.
So whatever depends on more than this is done outside of blocks, when their model returns.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ModelError
from ..log import info_once
from ..plan.replaced_forwards import ReplacedForward, UnavailableOutput
from ..tensor_parallel.axis import Axis
from ..tensor_parallel.random import Streams, any_trains
from ..tensor_parallel.sequence import with_hidden
from .attention import AttentionSeam, RunningBlock, running
from .sequence_rows import SEQUENCE, Rows

LENGTH = "whole_sequence_length"  # the keyword by which a block is told


@dataclass(frozen=True)
class Way:
    """How the sequences of a model are divided. ``path``: of its list of blocks.

    ``joins_early``: what runs after the last block needs whole sequences. ``divides_loss``: the loss is the common one of
    causal models. ``tiles``: nothing comes between head and loss, so that logits need not exist. ``in_evaluation``: unless
    it is true, ranks have data of their own in evaluation, and sequences are not divided.
    """

    path: str
    joins_early: bool = False
    divides_loss: bool = True
    tiles: bool = True
    in_evaluation: bool = True

    def divides(self, module: nn.Module) -> bool:
        """True if sequences are divided in the mode in which ``module`` is."""
        return self.in_evaluation or module.training


_NO_CACHE = (
    "a forward whose sequence ranks have divided returns no keys and values for the next one. Remedy: call the model with "
    "use_cache=True and without gradients (torch.no_grad), or give it past_key_values: then it runs whole on every rank."
)


class OwnForward(ReplacedForward):
    """A forward on rows, inside the module's hooks."""

    def __init__(self, module: nn.Module, division: Division) -> None:
        super().__init__(module)
        self.division = division

    __reduce__ = object.__reduce__  # copies have the hooks of the division, too


class Division:
    """The division of one model's sequences over the ranks of ``axis``, and what of it a running forward must know.

    ``in_stages``: the model is cut into pipeline stages, which send each other rows.
    """

    def __init__(self, axis: Axis, method: str, way: Way, *, in_stages: bool) -> None:
        self.axis, self.method, self.way, self.in_stages = axis, method, way, in_stages
        self.streams = Streams(axis.rank)
        self.rows: Rows | None = None  # of the latest sequence; None if it was not divided
        self.targets: torch.Tensor | None = None  # of the whole sequence, if the loss is to be divided
        self.ignored = -100  # among targets
        self.in_tiles = False
        self._decoding = self._entered = False  # the blocks' model runs; a block of it has begun
        self._whole = 0  # how long the latest sequence was that was not divided
        self._rows_of = WeakIdKeyDictionary()  # measure of a sequence (see _measure_in) -> its rows; None if not divided

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self  # copies of a model talk to the same ranks

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """While the model that holds the blocks runs. The first block that is called gets whole hidden states."""
        self.rows, self._decoding, self._entered = None, True, False
        try:
            yield
        finally:
            self._decoding = False
            self.streams.leave()

    @contextmanager
    def with_loss(self, targets: torch.Tensor, ignored: int, *, in_tiles: bool) -> Iterator[None]:
        """While a model runs that is given labels. ``targets`` [batch, sequence]: the token that each one is to predict."""
        self.targets, self.ignored, self.in_tiles = targets, ignored, in_tiles
        try:
            yield
        finally:
            self.targets, self.in_tiles = None, False

    @property
    def kept(self) -> Rows | None:
        """The rows of hidden states that have left the blocks' model without being joined; None if they were joined."""
        return self.rows if self.targets is not None else None

    def own_targets(self) -> torch.Tensor:
        """The targets of this rank's rows [batch, own rows]. Raises ModelError if there are more or fewer than tokens."""
        assert self.rows is not None
        assert self.targets is not None
        if self.targets.shape[SEQUENCE] != self.rows.length:
            raise ModelError(
                f"labels of {self.targets.shape[SEQUENCE]} tokens for a sequence of {self.rows.length}: the loss cannot be "
                "divided. Remedy: leave labels out, and compute the loss from the logits, which are then whole."
            )
        return self.rows.cut(self.targets)

    def forget(self) -> None:
        """Nothing is divided in the forward that begins."""
        self.rows = None

    def enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``block`` gets instead: rows of the hidden states, if they are whole, and the length."""
        hidden, (measure, length) = _hidden(block, args, kwargs), _measure_in(kwargs)
        if self._decoding and not self._entered:
            if measure is None and self.in_stages:
                raise ModelError(
                    f"{type(block).__name__} is given neither positions nor a mask, so that a pipeline stage cannot tell "
                    "how long the sequence is. Remedy: remove sequence_parallel_size, or pipeline."
                )
            self._begin(length or hidden.shape[SEQUENCE])
        if self._decoding or not _in_backward():
            rows = self.rows if self._decoding else None
            if measure is not None and block.training:
                self._rows_of[measure] = rows
        else:
            rows = self._rows_again(block, hidden, measure)
        if rows is None:
            self._whole = hidden.shape[SEQUENCE]
            return None
        if any_trains((block,)):
            self.streams.enter(hidden.device)
        if hidden.shape[SEQUENCE] == rows.length:  # whole; or one rank has all rows
            args, kwargs = with_hidden(rows.cut(hidden), args, kwargs)
        return args, {**kwargs, LENGTH: rows.length}

    def _begin(self, length: int) -> None:
        self.rows, self._entered = Rows(length, self.axis) if length >= self.axis.size else None, True

    def _rows_again(self, block: nn.Module, hidden: torch.Tensor, measure: torch.Tensor | None) -> Rows | None:
        """The rows of the forward of which the model recomputes ``block``; None if it was not divided."""
        if measure is not None:
            return self._rows_of.get(measure)
        if hidden.shape[SEQUENCE] in ((self._whole,) if self.rows is None else (self.rows.length, self.rows.count)):
            return self.rows
        raise ModelError(
            f"{type(block).__name__} is recomputed after its model has been given another sequence, and is given neither "
            "positions nor a mask by which to tell how long its own was. Remedy: give the model an attention_mask, or use "
            "activation_checkpointing of the configuration in place of the model's own."
        )

    def leave_block(self, kwargs: Mapping[str, Any], output: Any) -> Any:
        """What the last block returns if what follows needs whole sequences, of which each rank uses its own rows."""
        if kwargs.get(LENGTH) is None:
            return output
        rows = Rows(kwargs[LENGTH], self.axis)
        if isinstance(output, tuple):
            return (rows.join(output[0], recut=True), *output[1:])
        return rows.join(output, recut=True)

    def leave_decoder(self, output: Any) -> Any:
        """What the model that holds the blocks returns: with whole sequences, or with rows if the loss follows."""
        if self.in_stages and self.targets is None:  # other stages have what follows
            return output
        if not self._entered and self.in_stages and self.targets is not None:  # this one has no blocks
            self._begin(self.targets.shape[SEQUENCE])
        rows = self.rows
        if rows is None:
            return output
        if not isinstance(output, Mapping) or not isinstance(output.get("last_hidden_state"), torch.Tensor):
            raise ModelError(
                f"a model that holds blocks returned {type(output).__name__} without last_hidden_state, which cannot be "
                "joined. Remedy: leave return_dict=False out."
            )
        early, last = self.way.joins_early, output["last_hidden_state"]
        whole = rows.joined(last) if early else None
        if output.get("past_key_values") is not None:
            output["past_key_values"] = UnavailableOutput(_NO_CACHE)  # type: ignore[index]
        if self.targets is None:
            whole = whole if whole is not None else rows.join(last)
            output["last_hidden_state"] = whole  # type: ignore[index]
        elif early:
            output["last_hidden_state"] = rows.cut(last)  # type: ignore[index]
        batch = last.shape[0]
        if output.get("router_logits"):
            found = [_joined_logits(logits, batch, rows) for logits in output["router_logits"]]
            output["router_logits"] = tuple(found)  # type: ignore[index]
        if output.get("hidden_states"):
            *inner, _ = output["hidden_states"]
            final = whole if whole is not None else rows.join(last)
            output["hidden_states"] = (*(rows.join(hidden) for hidden in inner), final)  # type: ignore[index]
        return output


def _joined_logits(logits: torch.Tensor, batch: int, rows: Rows) -> torch.Tensor:
    """Join the logits of a router, of [tokens of all sequences, experts] or [batch, own rows, experts]."""
    if logits.dim() == 3:
        return rows.join(logits)
    return rows.join(logits.reshape(batch, rows.count, logits.shape[-1])).reshape(-1, logits.shape[-1])


def _hidden(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found = args[0] if args else kwargs.get("hidden_states")
    if isinstance(found, torch.Tensor) and found.dim() == 3:
        return found
    raise ModelError(
        f"{type(block).__name__} gets no hidden states [batch, sequence, width], neither first nor by the name "
        "hidden_states. Remedy: remove sequence_parallel_size."
    )


def _measure_in(kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, int]:
    """Return what a block is given for whole sequences, and how long they are by that; None and 0 if there is nothing."""
    positions, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
    if isinstance(positions, tuple) and isinstance(positions[0], torch.Tensor):
        return positions[0], positions[0].shape[-2]
    for found in (kwargs.get("position_ids"), mask):
        if isinstance(found, torch.Tensor):
            return found, found.shape[-1]
    return None, 0


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class InBlock(OwnForward):
    """The forward of a block, on rows, if it is told the length of the sequence."""

    def __init__(self, module: nn.Module, division: Division) -> None:
        super().__init__(module, division)
        self._names = [*inspect.signature(self.inner).parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        length = kwargs.pop(LENGTH, None)
        if length is None:
            return self.inner(*args, **kwargs)
        rows = Rows(length, self.division.axis)
        args = (*args[:1], *(_own(name, arg, rows) for name, arg in zip(self._names[1:], args[1:], strict=False)))
        kwargs = {name: item if name == "hidden_states" else _own(name, item, rows) for name, item in kwargs.items()}
        block = RunningBlock(rows, self.division.method)
        with running(block):
            output = self.inner(*args, **kwargs)
        if not block.calls:
            raise ModelError(
                f"{type(self.module).__name__} does not attend by transformers' attention functions, so that it cannot be "
                "told that it has a part of the sequence. Remedy: remove sequence_parallel_size."
            )
        return output


def _own(name: str, value: Any, rows: Rows) -> Any:
    """Return what a block needs of an argument: its rows of tables and positions, all of a mask, and no cache."""
    if name in ("past_key_values", "past_key_value", "layer_past"):
        return None
    if name == "use_cache":
        return False
    if isinstance(value, tuple):
        return tuple(_own(name, item, rows) for item in value)
    if not isinstance(value, torch.Tensor) or "mask" in name:
        return value
    dim = {"position_embeddings": -2, "position_ids": -1, "cache_position": -1}.get(name, SEQUENCE)
    if value.dim() < (2 if dim in (SEQUENCE, -2) else 1) or value.shape[dim] != rows.length:
        return value
    return rows.view(value, dim)  # blocks share the whole


class InDecoder(OwnForward):
    """The forward of the model that holds the blocks. One that reads or fills a cache runs whole on each rank."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.inner).bind_partial(*args, **kwargs).arguments
        reads, fills = given.get("past_key_values") is not None, given.get("use_cache") and not torch.is_grad_enabled()
        if reads and self.module.training:
            info_once(
                "a forward that is given past_key_values, as in prefix tuning, is not divided: each rank runs it whole."
            )
        if reads or fills or not self.division.way.divides(self.module):
            self.division.forget()
            return self.inner(*args, **kwargs)
        with self.division.decoding():
            output = self.inner(*args, **kwargs)
        return self.division.leave_decoder(output)


class DividedBlocks:
    """The blocks of one model, and the model that holds them, with other forwards; ``remove`` puts theirs back."""

    def __init__(self, decoder: nn.Module, all_blocks: list[nn.Module], division: Division) -> None:
        """``all_blocks``: of which other pipeline stages have some."""
        blocks = [block for block in all_blocks if not getattr(block, "is_elsewhere", False)]
        self._seam = AttentionSeam()
        self._forwards: list[OwnForward] = [InBlock(block, division) for block in blocks]
        self._forwards.append(InDecoder(decoder, division))
        self._handles: list[RemovableHandle] = []
        for block in blocks:
            enter, outside = functools.partial(_enter, division), functools.partial(_outside, division)
            self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(outside))
        if division.way.joins_early and blocks and blocks[-1] is all_blocks[-1]:
            self._handles.append(blocks[-1].register_forward_hook(functools.partial(_leave, division), with_kwargs=True))

    def remove(self) -> None:
        for own in self._forwards:
            own.remove()
        for handle in self._handles:
            handle.remove()
        self._seam.remove()


def _enter(division: Division, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return division.enter_block(block, args, kwargs)


def _outside(division: Division, *ignored: Any) -> None:
    division.streams.leave()


def _leave(division: Division, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return division.leave_block(kwargs, output)
