"""Reserve: which host has which place in a job, and how lost hosts come back. A replacement gets place and ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .remote import RemoteNode

ANSWER_S = 30.0  # until a host that is tried again has greeted and is prepared
FIRST_S, _LONGEST_S = 1.0, 60.0  # until a lost host is tried; each failure doubles it


@dataclass
class Try:
    """Of a lost host. ``at``: when it is due, or has taken too long; ``delay``: seconds until the next one after it."""

    at: float
    delay: float = FIRST_S
    node: RemoteNode | None = None  # while it goes on


class HostPlaces:
    """Those of a job on the first of the hosts ``names``; the last ``spares`` of them are in reserve."""

    def __init__(self, names: Sequence[str], spares: int) -> None:
        self.names, self.reserve = list(names[: len(names) - spares]), list(names[len(names) - spares :])

    def fill(self, alive: Collection[str]) -> list[tuple[str, str]]:
        """Give the places of hosts that are not ``alive`` to some in reserve, and return (lost host, its replacement)."""
        replaced = []
        for index, name in enumerate(self.names):
            spare = next((spare for spare in self.reserve if spare in alive), None)
            if name not in alive and spare is not None:
                self.reserve[self.reserve.index(spare)] = name  # it may come back, and is in reserve then
                self.names[index] = spare
                replaced.append((name, spare))
        return replaced

    def lost(self, alive: Collection[str]) -> list[str]:
        """Return the hosts that are not ``alive``: those who have a place first."""
        return [name for name in (*self.names, *self.reserve) if name not in alive]

    def missing(self, alive: Collection[str]) -> list[str]:
        """Return the hosts without which a place is free, or that could have it."""
        return [] if all(name in alive for name in self.names) else self.lost(alive)


class Returning:
    """Connects to lost hosts while the job goes on without them, so that the reserve is full when the next one is lost.

    ``connect`` opens the line to a host, or raises OSError; ``problems`` are why one that has greeted cannot take part, and
    ``about`` is what it is told of the job. A host that fails is tried again later, without a word.
    """

    def __init__(
        self,
        connect: Callable[[str], RemoteNode],
        problems: Callable[[RemoteNode], Sequence[str]],
        about: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._connect, self._problems, self._about = connect, problems, about
        self._tries: dict[str, Try] = {}  # by host

    def tick(self, now: float, lost: Sequence[str]) -> list[RemoteNode]:
        """Try the hosts ``lost`` as they are due, and return the nodes that have become ready. The caller ticks nodes."""
        for name in lost:
            due = self._tries.setdefault(name, Try(now + FIRST_S))
            if due.node is None and now >= due.at:
                self._begin(due, name, now)
        ready = [due.node for due in self._tries.values() if due.node is not None and self._is_ready(due.node, due, now)]
        for node in ready:
            del self._tries[node.name]
        return ready

    @property
    def nodes(self) -> list[RemoteNode]:
        """Those that are being tried."""
        return [due.node for due in self._tries.values() if due.node is not None]

    def give_up(self, names: Collection[str]) -> None:
        """End the tries of these hosts: somebody else connects to them."""
        for node in self.nodes:
            if node.name in names:
                node.close()
        self._tries = {name: due for name, due in self._tries.items() if name not in names}

    def _begin(self, due: Try, name: str, now: float) -> None:
        due.at, due.delay = now + ANSWER_S, min(2 * due.delay, _LONGEST_S)
        try:
            node = due.node = self._connect(name)
        except OSError:
            due.at = now + due.delay
            return
        node.on_hello = lambda: self._greet(node)

    def _greet(self, node: RemoteNode) -> None:
        problems = self._problems(node)
        if problems:
            node.trouble = problems[0]
        else:
            node.ask("job", "ready", **self._about())

    def _is_ready(self, node: RemoteNode, due: Try, now: float) -> bool:
        if node.lost is None and (node.trouble or now >= due.at):
            node.lose(node.trouble or "it does not answer")
        if node.lost is not None:
            due.node, due.at = None, now + due.delay
        return node.lost is None and "ready" in node.answers
