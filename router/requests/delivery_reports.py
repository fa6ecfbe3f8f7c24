"""Updates of stored time breakdowns: they add the time after a request's last token.

The explanation (time breakdown) that the ledger stores with a request's end lacks the time in which
the end is stored and delivered to the client. This time is reported later, and only if it is a
considerable part of the request's time.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from router.ledger.base import Ledger
from router.ledger.entry import Entry, Explained
from router.requests.request import LiveRequest

#: Times below this number of seconds, or below this fraction of the request's total time, are not
#: reported.
_MIN_S, _MIN_FRACTION = 1e-3, 0.01
#: Maximum number of reports between two flushes. For further requests the ledger keeps the
#: explanation that it has.
_MAX_REPORTS = 1000


class Deliveries:
    """Collector of delivery reports; ``flush`` must be called regularly to write new reports.

    A delivery report is a request's time breakdown that includes the delivery to its client.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reports: list[Explained] = []
        #: tracked requests by id; the references are weak because ended requests live as long as
        #: their readers
        self._tracked: WeakValueDictionary[str, LiveRequest] = WeakValueDictionary()

    def track(self, live: LiveRequest) -> None:
        """Track a request from now on, because a client reads it."""
        self._tracked[live.request_id] = live

    def in_delivery(self, entry: Entry) -> LiveRequest | None:
        """Return the request of a ledger entry if this router still delivers its output, else None.

        This is so if the request ended at this router, a client still has an open stream of it
        here, and ``note_delivered`` has not found the delivery complete.
        """
        live = self._tracked.get(entry.request_id)
        if live is None or live.arrived != entry.arrived:
            return None
        return live if live.has_unreported_end and live.has_readers else None

    def note_delivered(self, live: LiveRequest) -> None:
        """Add a report for a request if it has ended and its client has read everything.

        Call it whenever a reader of the request has left. Requests with a short delivery get no
        report.
        """
        journal, entry = live.journal, live.entry
        if not live.has_unreported_end or not journal.is_delivered:
            return
        live.has_unreported_end = False
        is_considerable = journal.after_last_token_s > max(_MIN_S, _MIN_FRACTION * journal.total_s)
        if is_considerable and len(self._reports) < _MAX_REPORTS:
            packed = live.packed_explanation(journal.last_event_at)
            self._reports.append(Explained(entry.request_id, entry.gateway, entry.arrived, packed))

    async def flush(self) -> None:
        """Write the new reports to the ledger.

        Raises LedgerUnavailable; these reports are then lost.
        """
        reports, self._reports = self._reports, []
        if reports:
            await self._ledger.explain(reports)
