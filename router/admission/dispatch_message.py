"""What a gateway is told of a dispatch that the ledger has let happen. Pure."""

from __future__ import annotations

from everlift.v1 import session_pb2
from router.ledger.entry import Entry


def dispatched(
    entry: Entry,
    overtaken: int = 0,
    predicted_ttft_s: float | None = None,
    predicted_tpot_s: float | None = None,
    stay: session_pb2.Stay | None = None,
) -> session_pb2.Dispatched:
    """``overtaken``: times that others left the queue before it that came later. None is predicted
    where nothing is known; there is no ``stay`` of what never came into the queue."""
    return session_pb2.Dispatched(
        request_id=entry.request_id,
        worker_id=entry.worker,
        epoch=entry.epoch,
        attempt=entry.attempts,
        moves=entry.moves,
        overtaken=overtaken,
        predicted_ttft_s=predicted_ttft_s,
        predicted_tpot_s=predicted_tpot_s,
        stay=stay,
    )
