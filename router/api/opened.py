"""Request that was opened for a client, with the stream of its output."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.trace_context import TraceContext
from router.requests.stream import Source


@dataclass(frozen=True, slots=True)
class Opened:
    """Open request with its output, from the offsets that the client asked for.

    ``request_id`` is the id that the client uses. The owner of this value must close ``pieces``;
    until then the request has a reader. ``trace`` is None if the request is not traced, or if
    another router owns it. ``is_new`` is true if this call created the request, and false if it
    already existed.
    """

    request_id: str
    trace: TraceContext | None
    pieces: Source
    is_new: bool = False
