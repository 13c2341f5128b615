"""Meeting: chooses where the workers of a job meet, an address and a port of the first host, and reserves the port."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from zerorun.errors import LaunchError

from .facts import bound_socket, interface_of
from .job_plan import Rendezvous, on_one_host
from .remote import Node, OwnNode, RemoteNode


class Meeting:
    """``address`` and ``port``: the user's choice, or None. ``await_answer`` waits until nodes have given an answer."""

    def __init__(
        self, address: str | None, port: int | None, await_answer: Callable[[Sequence[RemoteNode], str], None]
    ) -> None:
        self._chosen, self._port, self._await = address, port, await_answer
        self._holder: socket.socket | None = None

    def arrange(self, nodes: Sequence[Node]) -> Rendezvous:
        """Choose an address and a free port of the first of ``nodes``, and let every host try to reach them."""
        first = nodes[0]
        if len(nodes) == 1:
            return on_one_host(first.name, self._chosen, self._reserve(first))
        address = self._chosen or _address_of(first, nodes)
        port = self._reserve(first, listen=True)
        remote = [node for node in nodes if isinstance(node, RemoteNode)]
        for node in remote:
            node.ask("probe", "probed", address=address, port=port)
        try:
            self._await(remote, "probed")
        except LaunchError as error:
            remedy = "Remedy: let the hosts reach each other, or name an address by --master-addr."
            raise LaunchError(f"{error}\n{remedy}") from None
        found = {node.name: node.answers["probed"]["interface"] for node in remote}
        if self._holder is not None:
            self._holder.shutdown(socket.SHUT_RDWR)  # no longer listens, but keeps the port
            found[first.name] = interface_of(address)
        return Rendezvous(address, port, {name: interface for name, interface in found.items() if interface})

    def _reserve(self, first: Node, *, listen: bool = False) -> int:
        self.release()
        if isinstance(first, RemoteNode):
            first.ask("reserve", "reserved", port=self._port, listen=listen)
            self._await([first], "reserved")
            return int(first.answers["reserved"]["port"])
        self._holder = bound_socket(self._port)
        if listen:
            self._holder.listen(1024)
        return int(self._holder.getsockname()[1])

    def release(self) -> None:
        """Give the port back."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None


def _address_of(first: Node, nodes: Sequence[Node]) -> str:
    address = first.facts.get("address")
    if isinstance(first, OwnNode):  # as the others see it, if they can tell
        seen = [node.facts.get("launcher_address") for node in nodes]
        address = next((value for value in seen if value), address)
    if not address:
        raise LaunchError(f"host {first.name!r} has no address but loopback. Remedy: give --master-addr.")
    return str(address)
