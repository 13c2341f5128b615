"""Reserve: which host has which place in a job. A host that replaces a lost one gets its place, and so its ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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

    def missing(self, alive: Collection[str]) -> list[str]:
        """Return the hosts to be tried again, if any place is free: those who have one first."""
        if all(name in alive for name in self.names):
            return []
        return [name for name in (*self.names, *self.reserve) if name not in alive]
