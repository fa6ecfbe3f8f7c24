"""Request that was opened for a client, with the stream of its output."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.trace_context import TraceContext
from router.requests.stream import Source


@dataclass(frozen=True, slots=True)
class Opened:
    """Request with the stream of its output, from the offsets that the client asked for.

    ``request_id`` is the id that the client uses. ``pieces`` is the stream, whose elements are
    messages with new output. The receiver of this object must close the stream; until then the
    client counts as connected. ``trace`` is None if
    the request is not traced, or if another router owns it. ``is_new`` is true if the call created
    the request, and false if it already existed.
    """

    request_id: str
    trace: TraceContext | None
    pieces: Source
    is_new: bool = False
