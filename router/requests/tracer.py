"""Interface of distributed tracing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from everlift.trace_context import TraceContext
from router.requests.request import LiveRequest


class Tracer(Protocol):
    """Recorder of distributed traces of a router's requests."""

    def start_span(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        """Return the trace context for the span of a call with this metadata.

        The span is a child of the client's span if the metadata contains a trace context.
        Otherwise the span starts a new trace, or None is returned if traces are not exported.
        ``NO_TRACES`` returns None in both cases.
        """
        ...

    def is_recorded(self, trace: TraceContext | None) -> bool:
        """Return whether ``ended`` must be called for a request with this trace context."""
        ...

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None:
        """Record a request that was rejected ``elapsed_s`` seconds after its call."""
        ...

    async def ended(self, live: LiveRequest) -> None:
        """Record a request whose end is stored in the ledger."""
        ...


class _NoTraces:
    def start_span(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        return None

    def is_recorded(self, trace: TraceContext | None) -> bool:
        return False

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None: ...

    async def ended(self, live: LiveRequest) -> None: ...


#: Tracer of a router that records no traces.
NO_TRACES = _NoTraces()
