"""A request that was opened for a client, with the stream of its output."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.trace_context import TraceContext
from router.requests.stream import Source


@dataclass(frozen=True, slots=True)
class Opened:
    """A known request and its pieces from the offsets that the client asked for.

    ``request_id`` is the client's name for it. The owner of this value closes ``pieces``; until
    then the request has a reader. ``is_new``: this call submitted the request.
    """

    request_id: str
    trace: TraceContext | None
    pieces: Source
    is_new: bool = False
