"""Messages between neighbouring stages: any nest of tensors and plain values, with shapes that may change every time.

[Note: what is sent]
A message is a header of two numbers, then the description of the value if it differs from that of the previous message, and
then the raw memory of the tensors. In the steady state only the header and the tensors are sent. Sends never block: what is
sent is kept until it has left, and no longer, so a stage keeps no more activations than its schedule says. Messages of one
sort between the same two ranks arrive in order. A description is data (see wire.py): it names the containers, and the
receiver builds them only from classes that it has loaded and that torch's pytree knows how to build.

[Note: receiving ahead]
A message can travel only once the receiver has provided a buffer for it. If the receiver did so only when it needs the
value, the stage would stand idle for the whole transfer. So ``expect`` provides buffers for the next message while the
stage computes: for one message of each sender and sort, beyond what the schedule keeps. The buffers for tensors rest on a
guess: that this message is like the last one. The guess is made only if the last message was like the one before it, which
both ends know. If it was wrong, the sender fills these buffers with zeros before it goes on. NCCL needs no such help: its
receives wait on the GPU's queue, and tensors have a link of their own for each direction and sort (see connect.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

from ..distributed.device import on_host
from ..distributed.transport.connect import Link
from ..distributed.transport.message_waits import Waiter
from ..distributed.transport.transport import Transport
from ..distributed.wire import decode, encode, is_namedtuple, loaded_class, path_of
from ..errors import MessageError, PipelineError
from ..watch.board import OF_STAGES

# Two sorts, because both may travel in both directions between the same two ranks: a pipeline may have only two.
ACTIVATIONS, GRADIENTS = "activations", "gradients"
Key = tuple[int, str]  # the rank at the other end, the sort
# Counts the PointToPoint objects of each process group, whose ranks make them in the same order, for tags that agree.
_p2ps: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
_SAME, _BROKEN = 0, -1  # first number of a header; any other is a description's length in bytes
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, Enum)
_LEAF = _pytree.tree_structure(None)


@dataclass(frozen=True)
class _Described:
    """A tensor of a message. ``wants_gradient``: the receiver must send its gradient back."""

    shape: torch.Size
    dtype: torch.dtype
    wants_gradient: bool


@dataclass(frozen=True)
class _Description:
    """A value without its tensors' elements. ``leaves``: plain values, and a _Described for each tensor."""

    tree: _pytree.TreeSpec
    leaves: list[Any]

    def tensors(self) -> list[_Described]:
        """Return the descriptions of the tensors, in the order in which they are sent."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Described)]


@dataclass
class _TensorPlace:
    """The buffers for one tensor of a message. ``landing``: where it arrives, ``tensor`` itself or a host buffer.

    ``arrival``: None if the program need not wait, because the device does or the tensor is empty.
    """

    tensor: torch.Tensor
    landing: torch.Tensor
    arrival: Future[None] | None


@dataclass
class _Expected:
    """A message that may be on its way. ``guess``: buffers for tensors like those of the last one; None if not guessed."""

    header: _TensorPlace
    guess: list[_TensorPlace] | None


def links_of(stages: int, chunks: int) -> list[Link]:
    """Return all links of a pipeline. With several chunks per stage, the last stage exchanges messages with the first."""
    pairs = [(stage, stage + 1) for stage in range(stages - 1)] + ([(stages - 1, 0)] if chunks > 1 else [])
    return [link for a, b in pairs for link in ((a, b, ACTIVATIONS), (b, a, GRADIENTS))]


class PointToPoint:
    """Sends and receives between this rank and others of the pipe axis.

    ``wait(message, label, peer)`` waits for a message from or to rank ``peer`` of the world.
    """

    def __init__(
        self,
        transport: Transport,
        wait: Callable[[Future[None], str, int], None],
        device: torch.device,
        links: Mapping[Link, Transport] | None = None,
    ) -> None:
        """``transport`` carries host memory. ``links``: transports for the links of ``links_of``, which carry tensors of
        ``device`` directly; without them, these go through host memory."""
        self._transport, self._wait, self._device, self._links = transport, wait, device, links or {}
        # Tags of its own: after an error, messages still on their way must not reach the next engine.
        first = 2 * next(_p2ps.setdefault(transport.joined, itertools.count()))
        self._tags = {ACTIVATIONS: first, GRADIENTS: first + 1}
        self._last_sent: dict[Key, bytes] = {}
        self._sent_alike: set[Key] = set()  # the last message was like the one before it
        self._last_received: dict[Key, _Description] = {}
        self._received_alike: set[Key] = set()
        self._expected: dict[Key, _Expected] = {}
        self._last_leaving: dict[Key, Future[None]] = {}
        self._leaving: dict[Key, Waiter] = defaultdict(Waiter)
        self._arriving: dict[Key, Waiter] = defaultdict(Waiter)
        self._on_links: list[tuple[dist.Work, torch.Tensor]] = []  # still being sent

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, value: Any, peer: int, sort: str) -> None:
        """Begin to send ``value``. Raises PipelineError, here and at the receiver, if a part of it cannot be sent."""
        key = peer, sort
        try:
            described, tensors = describe(value)
        except PipelineError as error:
            self._announce(_BROKEN, str(error).encode(), key)
            self.finish()
            raise
        if self._last_sent.get(key) == described:
            self._post(torch.tensor([_SAME, 0]), key)
            self._sent_alike.add(key)
        else:
            self._announce(len(described), described, key)
            self._last_sent[key] = described
        for tensor in tensors:
            # Bytes are sent, so what a view only notes is carried out: conjugates and signs.
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).to(self._device)
            if tensor.grad_fn is None and flat.data_ptr() == tensor.data_ptr():  # a buffer: a layer may change it next time
                flat = flat.clone()
            if flat.numel():
                self._count(flat, key)
                self._post_tensor(flat, key)

    def _announce(self, number: int, content: bytes, key: Key) -> None:
        """Send a header that says this message is not like the last one, and its ``content``."""
        self._post(torch.tensor([number, len(content)]), key)
        if key in self._sent_alike and not self._links:
            self._sent_alike.discard(key)
            for last in read_description(self._last_sent[key]).tensors():  # the receiver has buffers for these
                if last.shape.numel():
                    flat = torch.zeros(last.shape.numel(), dtype=last.dtype)
                    self._count(flat, key)
                    self._post(flat, key)
        self._post(torch.frombuffer(bytearray(content), dtype=torch.uint8), key)

    def _count(self, flat: torch.Tensor, key: Key) -> None:
        self._transport.statistics.count(f"{OF_STAGES}{key[1]}", flat.numel() * flat.element_size())

    def _post_tensor(self, flat: torch.Tensor, key: Key) -> None:
        if not self._links:
            self._post(flat.to("cpu"), key)
            return
        link = self._links[self._transport.rank, key[0], key[1]]
        work = link.send(flat, 1 - link.rank, 0)  # unlike gloo's, it tells when it is done
        self._on_links = [(w, kept) for w, kept in self._on_links if not w.is_completed()] + [(work, flat)]

    def _post(self, flat: torch.Tensor, key: Key) -> None:
        work = self._transport.send(flat, key[0], self._tags[key[1]])
        self._last_leaving[key] = self._leaving[key].begin(work, flat)

    def finish(self) -> None:
        """Wait until everything has left."""
        for (peer, sort), last in self._last_leaving.items():
            self._wait(last, f"{sort} to pipeline stage {peer}", self._transport.names[peer])
        self._last_leaving.clear()
        for work, _ in self._on_links:
            work.wait()
        self._on_links.clear()

    # -- receiving -----------------------------------------------------------------------------------------------

    def expect(self, peer: int, sort: str) -> None:
        """Provide buffers for the next message, so that it can travel. It must come, and be received, before ``finish``."""
        key = peer, sort
        if not self._links and key not in self._expected:
            self._expected[key] = self._make_room(key)

    def receive(self, peer: int, sort: str) -> Any:
        """Return the next message. Tensors whose gradient the sender wants require grad.

        Raises PipelineError if the sender could not send the value, or if the description cannot be read.
        """
        key = peer, sort
        expected = self._expected.pop(key, None) or self._make_room(key)
        number, length = self._arrived(expected.header, key).tolist()
        if number == _SAME:
            self._received_alike.add(key)
        else:
            self._received_alike.discard(key)
            for place in expected.guess or ():
                self._arrived(place, key)
            expected.guess = None
            content = bytes(self._arrived(self._host_place(torch.empty(length, dtype=torch.uint8), key), key).numpy())
            if number == _BROKEN:
                raise PipelineError(content.decode())
            self._last_received[key] = read_description(content)
        places = iter(self._places(key) if expected.guess is None else expected.guess)
        described = self._last_received[key]
        return _pytree.tree_unflatten([self._fill(leaf, places, key) for leaf in described.leaves], described.tree)

    def _make_room(self, key: Key) -> _Expected:
        header = self._host_place(torch.empty(2, dtype=torch.int64), key)
        guesses = key in self._received_alike and not self._links
        return _Expected(header, self._places(key) if guesses else None)

    def _places(self, key: Key) -> list[_TensorPlace]:
        """Begin to receive the tensors of a message like the last one."""
        device, tensors = self._device, self._last_received[key].tensors()
        return [self._place(torch.empty(like.shape, dtype=like.dtype, device=device), key) for like in tensors]

    def _place(self, tensor: torch.Tensor, key: Key) -> _TensorPlace:
        """Begin to receive the next tensor of this sort into ``tensor``."""
        if not tensor.numel():
            return _TensorPlace(tensor, tensor, None)
        if self._links:
            link = self._links[key[0], self._transport.rank, key[1]]
            link.receive(tensor.view(-1), 1 - link.rank, 0).wait()  # later work on the device waits; the program does not
            return _TensorPlace(tensor, tensor, None)
        return self._host_place(tensor, key)

    def _host_place(self, tensor: torch.Tensor, key: Key) -> _TensorPlace:
        """Begin to receive the next tensor of this sort into ``tensor``, through host memory if it is not there."""
        landing = tensor if on_host(tensor) else torch.empty_like(tensor, device="cpu")
        work = self._transport.receive(landing.view(-1), key[0], self._tags[key[1]])
        return _TensorPlace(tensor, landing, self._arriving[key].begin(work, landing))

    def _arrived(self, place: _TensorPlace, key: Key) -> torch.Tensor:
        if place.arrival is not None:
            self._wait(place.arrival, f"{key[1]} from pipeline stage {key[0]}", self._transport.names[key[0]])
        return place.tensor if place.landing is place.tensor else place.tensor.copy_(place.landing)

    def _fill(self, leaf: Any, places: Iterator[_TensorPlace], key: Key) -> Any:
        if not isinstance(leaf, _Described):
            return leaf
        return self._arrived(next(places), key).requires_grad_(leaf.wants_gradient)


def describe(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return (description of ``value``, its tensors in order). Raises PipelineError for what cannot be sent."""
    leaves, tree = _pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(map(_objection, leaves)):
        raise _unsendable(value)
    # a list stands for a tensor: leaves are never lists
    described = [[t.dtype, *t.shape, t.requires_grad] if isinstance(t, torch.Tensor) else t for t in leaves]
    try:
        return encode([_told(tree), described]), tensors
    except MessageError as error:
        raise PipelineError(f"a layer passes the next stage a value that cannot be sent: {error}") from error


def read_description(content: bytes) -> _Description:
    """Read a description made by ``describe``. Raises PipelineError if it is none, or needs a class that is not loaded."""
    try:
        tree, leaves = decode(content)
        described = [_Described(torch.Size(e[1:-1]), e[0], e[-1]) if isinstance(e, list) else e for e in leaves]
        found = _Description(_tree(tree), described)
    except (MessageError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PipelineError(f"a message from another pipeline stage cannot be read: {error}") from error
    if found.tree.num_leaves != len(leaves):
        raise PipelineError("a message from another pipeline stage cannot be read: it has too few or too many values.")
    return found


def _told(tree: _pytree.TreeSpec) -> list[Any]:
    """Return a tree as data: [module of the container's class, its name, what else pytree needs to make it, its elements].

    A leaf is []. All named tuples are one kind of container; what else pytree needs is then the path of their class.
    """
    if tree.type is None:
        return []
    given = list(path_of(tree.context)) if tree.type is namedtuple else tree.context
    return [tree.type.__module__, tree.type.__qualname__, given, [_told(element) for element in tree.children()]]


def _tree(told: list[Any]) -> _pytree.TreeSpec:
    if not told:
        return _LEAF
    module, name, given, elements = told
    kind = _known_container(module, name)
    if kind is namedtuple:
        given = loaded_class(*given)
        if not is_namedtuple(given):
            raise ValueError(f"{given} is no class of named tuples")
    return _pytree.TreeSpec(kind, given, [_tree(element) for element in elements])


def _known_container(module: str, name: str) -> Any:
    """Return the class of this module and name among those that pytree makes. Raises ValueError if there is none."""
    for kind in _pytree.SUPPORTED_NODES:
        if kind.__qualname__ == name and kind.__module__ == module:
            return kind
    raise ValueError(
        f"it holds a {module}.{name}, which this rank has not imported, or not registered with torch.utils._pytree. "
        "Remedy: import the same modules on all ranks."
    )


def _objection(leaf: Any) -> tuple[str, str] | None:
    """Return (what cannot be sent, the remedy), or None if ``leaf`` can be sent."""
    if isinstance(leaf, torch.Tensor):
        return None if leaf.layout == torch.strided else (f"a tensor of layout {leaf.layout}", "send it dense.")
    if isinstance(leaf, _PLAIN):
        return None
    remedy = "send tensors, numbers, strings and None, in dicts, lists and tuples"
    if is_dataclass(leaf):
        remedy += ", or let torch.export.register_dataclass() know the class on all ranks"
    return f"a {type(leaf).__module__}.{type(leaf).__qualname__}", f"{remedy}."


def _unsendable(value: Any) -> PipelineError:
    """Return the error that names the first part of ``value`` that cannot be sent, and where it is."""
    path, leaf = next((path, leaf) for path, leaf in _pytree.tree_leaves_with_path(value) if _objection(leaf))
    what, remedy = _objection(leaf) or ("", "")
    where = _pytree.keystr(path) or "the value itself"
    return PipelineError(f"a layer gives the next stage {what} (at {where}), which cannot be sent. Remedy: {remedy}")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a value in the order in which they are sent."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
