"""Reports of what followed the last explanation: the end's way into the ledger, and the client.

If that took much of the request's time, the ledger is told again.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from router.ledger.base import Ledger
from router.ledger.entry import Entry, Explained
from router.requests.request import LiveRequest

#: Of a request's seconds, and as a part of them: what is less is not told.
_LEAST_S, _LEAST_PART = 1e-3, 0.01
#: Requests between two calls of the ledger: of others it knows no more than before.
_MOST = 1000


class Deliveries:
    """Reports of deliveries; ``tell`` is called from time to time with all new ones."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._untold: list[Explained] = []
        #: for as long as somebody else holds them: what has ended is its readers'
        self._read: WeakValueDictionary[str, LiveRequest] = WeakValueDictionary()

    def track(self, live: LiveRequest) -> None:
        """Track a request that a client reads."""
        self._read[live.request_id] = live

    def going_on(self, entry: Entry) -> LiveRequest | None:
        """Return the request of this entry, where it has ended here and a client still reads it."""
        live = self._read.get(entry.request_id)
        if live is None or live.arrived != entry.arrived:
            return None
        return live if live.has_untold_end and live.has_readers else None

    def note_delivered(self, live: LiveRequest) -> None:
        """Note that a client of the request has left or has everything."""
        journal, entry = live.journal, live.entry
        if not live.has_untold_end or not journal.is_delivered:
            return
        live.has_untold_end = False
        is_much = journal.behind_s > max(_LEAST_S, _LEAST_PART * journal.total_s)
        if is_much and len(self._untold) < _MOST:
            packed = live.packed_explanation(journal.heard)
            self._untold.append(Explained(entry.request_id, entry.gateway, entry.arrived, packed))

    async def flush(self) -> None:
        """Write the reports; those that fail are dropped. Raises LedgerUnavailable."""
        untold, self._untold = self._untold, []
        if untold:
            await self._ledger.explain(untold)
