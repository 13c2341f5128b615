"""Messages between neighbouring stages: any nest of tensors and plain values, with shapes that may change every time.

[Note: what is sent]
A message is a header of one number, then the description of the value, if it is another than that of the message before,
and then the tensors as they lie in memory. In the steady state that is the header and the tensors. Sends never block:
what is sent is kept until it has left, and no longer, so that a stage keeps no more activations than its schedule says.
Messages of one sort between the same two ranks arrive in order.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

from ..channel import Channel, Waiter
from ..errors import PipelineError

# Apart, because between the same two ranks both may travel either way: there may be no others.
ACTIVATIONS, GRADIENTS = "activations", "gradients"
_TAGS = {ACTIVATIONS: 1, GRADIENTS: 2}
_SAME, _BROKEN = 0, -1  # headers; else the bytes of a description
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice)


@dataclass(frozen=True)
class _Described:
    """A tensor of a message. ``wants_gradient``: the receiver must send its gradient back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool


class Courier:
    """Sends and receives between this rank and others of the pipe axis. ``wait``: how to wait for a message."""

    def __init__(self, channel: Channel, wait: Callable[[Future[None], str], None]) -> None:
        self._channel, self._wait = channel, wait
        self._last_sent: dict[tuple[int, str], bytes] = {}
        self._last_received: dict[tuple[int, str], Any] = {}
        self._last_leaving: dict[tuple[int, str], Future[None]] = {}
        self._waiters: dict[tuple[int, str], Waiter] = defaultdict(Waiter)
        self._receiver = Waiter()
        self._on_device: list[tuple[dist.Work, torch.Tensor]] = []  # on their way between GPUs

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, value: Any, peer: int, sort: str) -> None:
        """Begin to send ``value``. Raises PipelineError, here and at the receiver, if a part of it cannot be sent."""
        try:
            described, tensors = describe(value)
        except PipelineError as error:
            self._send_header(_BROKEN, str(error).encode(), peer, sort)
            self.finish()
            raise
        label = f"pipeline: {sort}"
        if self._last_sent.get((peer, sort)) == described:
            self._post(torch.tensor([_SAME, 0]), peer, sort)
        else:
            self._send_header(len(described), described, peer, sort)
            self._last_sent[peer, sort] = described
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            if flat.numel():
                self._channel.books.count(label, flat.numel() * flat.element_size())
                self._post(flat, peer, sort)

    def _send_header(self, number: int, content: bytes, peer: int, sort: str) -> None:
        self._post(torch.tensor([number, len(content)]), peer, sort)
        self._post(torch.frombuffer(bytearray(content), dtype=torch.uint8), peer, sort)

    def _post(self, flat: torch.Tensor, peer: int, sort: str) -> None:
        assert self._channel.group is not None
        if flat.is_cuda and not self._channel.nccl:  # ranks that share a GPU: through host memory
            flat = flat.cpu()
        work = self._channel.group.send([flat], peer, _TAGS[sort])
        if flat.is_cuda:  # which tells when it is done
            self._on_device = [(w, kept) for w, kept in self._on_device if not w.is_completed()] + [(work, flat)]
        else:
            self._last_leaving[peer, sort] = self._waiters[peer, sort].begin(work, flat)

    def finish(self) -> None:
        """Return when everything has left."""
        for (peer, sort), last in self._last_leaving.items():
            self._wait(last, f"{sort} to pipeline stage {peer}")
        self._last_leaving.clear()
        for work, _ in self._on_device:
            work.wait()
        self._on_device.clear()

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive(self, peer: int, sort: str) -> Any:
        """The next message. Tensors whose gradient the sender wants require it. Raises PipelineError if it was broken."""
        header = self._take(torch.empty(2, dtype=torch.int64), peer, sort)
        number, length = header.tolist()
        if number != _SAME:
            content = bytes(self._take(torch.empty(length, dtype=torch.uint8), peer, sort).numpy())
            if number == _BROKEN:
                raise PipelineError(content.decode())
            self._last_received[peer, sort] = pickle.loads(content)
        described = self._last_received[peer, sort]
        return _pytree.tree_map(lambda leaf: self._fill(leaf, peer, sort), described)

    def _fill(self, leaf: Any, peer: int, sort: str) -> Any:
        if not isinstance(leaf, _Described):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._channel.device)
        if tensor.numel():
            self._take(tensor.view(-1), peer, sort)
        return tensor.requires_grad_(leaf.wants_gradient)

    def _take(self, flat: torch.Tensor, peer: int, sort: str) -> torch.Tensor:
        assert self._channel.group is not None
        through_host = flat.is_cuda and not self._channel.nccl
        target = torch.empty_like(flat, device="cpu") if through_host else flat
        work = self._channel.group.recv([target], peer, _TAGS[sort])
        if target.is_cuda:  # what follows on this stream waits, not the program
            work.wait()
        else:
            self._wait(self._receiver.begin(work), f"{sort} from pipeline stage {peer}")
        return flat.copy_(target) if through_host else flat


def describe(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """(description of ``value``, its tensors in order). Raises PipelineError for what cannot be sent."""
    tensors: list[torch.Tensor] = []

    def slot(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided:
                raise _unsendable(path, f"a tensor of layout {leaf.layout}", "send it dense.")
            tensors.append(leaf)
            return _Described(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if not isinstance(leaf, _PLAIN):
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise _unsendable(path, f"a {kind}", "send tensors, numbers, strings and None, in dicts, lists and tuples.")
        return leaf

    return pickle.dumps(_pytree.tree_map_with_path(slot, value)), tensors


def _unsendable(path: Any, what: str, remedy: str) -> PipelineError:
    where = _pytree.keystr(path) or "the value itself"
    return PipelineError(f"a layer gives the next stage {what} (at {where}), which cannot be sent. Remedy: {remedy}")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a value in the order in which they are sent."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
