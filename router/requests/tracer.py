"""Interface to distributed tracing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from everlift.trace_context import TraceContext
from router.requests.request import LiveRequest


class Tracer(Protocol):
    def begin_span(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        """Return the span of a request whose call has this metadata; None: it is not traced."""
        ...

    def wants(self, trace: TraceContext | None) -> bool:
        """Return whether ``ended`` is to be called for a request of this span."""
        ...

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None:
        """Note a request that was rejected ``elapsed_s`` after its call."""
        ...

    async def ended(self, live: LiveRequest) -> None:
        """Note a request that has ended, in the ledger too."""
        ...


class _NoTraces:
    def begin_span(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        return None

    def wants(self, trace: TraceContext | None) -> bool:
        return False

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None: ...

    async def ended(self, live: LiveRequest) -> None: ...


#: For a router without traces.
NO_TRACES = _NoTraces()
