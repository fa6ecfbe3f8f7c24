"""Which gateways have not told yet all that waits with them, and whether that matters. Pure.

On a new line a gateway tells what waits in the queue's order, in parts. What it will still tell
goes behind what it told last, its mark. So the head of the queue may leave as soon as no gateway
that is still telling has its mark before it:

    told by A   a1 a2 a3 | ...         mark a3
    told by B   b1 | ...               mark b1: of these four, a1 and b1 may leave if a1 < b1
    told by C   c1 c2 (complete)       no mark: nothing more can come

A gateway is waited for, whether it has to come yet or falls silent while it tells, for so long and
no longer: the order of the queue is not worth that it stands still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.admission.request import Key


@dataclass(slots=True)
class _Telling:
    mark: Key | None
    heard: float


class RollCall:
    """``patience_s`` is how long a gateway may keep all others waiting. Times are in seconds."""

    def __init__(self, now: float, patience_s: float) -> None:
        self._patience_s = patience_s
        self._began = now
        self._telling: dict[str, _Telling] = {}
        self._came: set[str] = set()
        #: not told yet by the ledger: None
        self._living: frozenset[str] | None = None

    def living(self, gateways: Iterable[str]) -> None:
        """Those that the ledger knows to be alive. Who is not among them is not waited for."""
        self._living = frozenset(gateways)

    def is_gathering(self, now: float) -> bool:
        """Whether somebody may still have to come."""
        if now - self._began >= self._patience_s:
            return False
        return self._living is None or not self._living <= self._came

    def connect(self, gateway: str, now: float) -> None:
        """It begins to tell."""
        self._came.add(gateway)
        self._telling[gateway] = _Telling(None, now)

    def disconnect(self, gateway: str) -> None:
        self._telling.pop(gateway, None)

    def told(self, gateway: str, key: Key, now: float) -> None:
        """The key of something that waits there. One before its mark is news, not roll call."""
        telling = self._telling.get(gateway)
        if telling is not None:
            telling.heard = now
            telling.mark = key if telling.mark is None else max(telling.mark, key)

    def complete(self, gateway: str) -> None:
        """It has told everything."""
        self._telling.pop(gateway, None)

    def dismiss(self) -> None:
        """The queue has another order by now: nobody's mark says anything."""
        self._telling.clear()

    def is_over(self, now: float) -> bool:
        """Whether there is nobody to wait for."""
        return not self._telling and not self.is_gathering(now)

    def allows(self, key: Key, now: float) -> bool:
        """Whether nothing that goes before ``key`` may still be told."""
        if self.is_gathering(now):
            return False
        return all(
            telling.mark is not None and key <= telling.mark
            for telling in self._telling.values()
            if now - telling.heard < self._patience_s
        )
