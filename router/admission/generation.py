"""Whether the ledger has been told again what its server may have lost. Pure.

A server that restarts or fails over may come back without its last second. Until every gateway has
told it again what it has in its hands, the ledger may take a request for one that waits although it
runs, or for one that nobody has: nothing is dispatched and nobody's requests are given away.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Said:
    generation: str
    since: float


class Generations:
    """``patience_s`` is how long a gateway that does not say the ledger's generation may keep all
    others waiting. Times are in seconds."""

    def __init__(self, generation: str, now: float, patience_s: float) -> None:
        self._patience_s = patience_s
        self._current = generation
        self._since = now
        self._said: dict[str, _Said] = {}

    def change(self, generation: str, now: float) -> None:
        self._current, self._since = generation, now

    def connect(self, gateway: str, now: float) -> None:
        self._said[gateway] = _Said("", now)

    def disconnect(self, gateway: str) -> None:
        self._said.pop(gateway, None)

    def said(self, gateway: str, generation: str, now: float) -> None:
        """The gateway has told everything again to the server of this generation."""
        if gateway in self._said:
            self._said[gateway] = _Said(generation, now)

    def agree(self, now: float) -> bool:
        """Whether all have said the current one, or have had their time."""
        return not self._current or all(
            said.generation == self._current or now >= self._until(said)
            for said in self._said.values()
        )

    def _until(self, said: _Said) -> float:
        return max(said.since, self._since) + self._patience_s
