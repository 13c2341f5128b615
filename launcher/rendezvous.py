"""What hosts are asked before workers begin, and where these meet: at an address and a port of the first host."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zerorun.errors import LaunchError

from .job_plan import Rendezvous, on_one_host
from .remote import Node, OwnNode, RemoteNode
from .this_host import bound_socket, interface_of

_ANSWER_SECONDS = 20.0  # until a host has answered a question


class Questions:
    """Waits for answers of agents. ``until`` runs the loop until something is true, or some seconds are over."""

    def __init__(self, until: Callable[[Callable[[], bool], float], bool]) -> None:
        self._until = until

    def wait(self, nodes: Sequence[RemoteNode], answer: str) -> None:
        """Return when each node has given ``answer``. Raises LaunchError with the troubles of those that do not."""
        refuse_all(self._troubles(nodes, answer).values())

    def prepare(self, nodes: Sequence[Node], job: Mapping[str, Any]) -> dict[str, str]:
        """Tell agents about the ``job``, and have them check what can be checked before anything is started.

        Return why some cannot take part, by the names of the nodes.
        """
        remote = [node for node in nodes if isinstance(node, RemoteNode)]
        for node in remote:
            node.ask("job", "ready", **job)
        return self._troubles(remote, "ready")

    def _troubles(self, nodes: Sequence[RemoteNode], answer: str) -> dict[str, str]:
        self._until(lambda: all(node.trouble or node.lost or answer in node.answers for node in nodes), _ANSWER_SECONDS)
        found = {}
        for node in nodes:
            if node.lost or answer not in node.answers:
                why = node.trouble or node.lost or f"no answer within {_ANSWER_SECONDS:.0f} s"
                found[node.name] = f"{node.name}: {why}"
            node.trouble = None
        return found


def refuse_all(problems: Collection[str]) -> None:
    """Raise LaunchError if there are ``problems`` of hosts."""
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise LaunchError("\n  ".join(["not all hosts can take part:", *list(problems)[:8], *more]))


class Meeting:
    """Chooses where workers meet, and reserves the port. ``address`` and ``port``: the user's choice, or None."""

    def __init__(self, address: str | None, port: int | None, questions: Questions) -> None:
        self._chosen, self._port, self._questions = address, port, questions
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
            self._questions.wait(remote, "probed")
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
            self._questions.wait([first], "reserved")
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
