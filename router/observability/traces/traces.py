"""Sampling of requests for tracing, and export of their traces when they end."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable

from everlift import logs
from everlift.errors import LedgerUnavailable, UnknownRequest
from everlift.trace_context import TRACEPARENT, TRACESTATE, TraceContext
from router.ledger.base import Ledger
from router.observability.traces.exporter import Exporter
from router.observability.traces.spans import refusal_span, request_spans
from router.requests.request import LiveRequest

log = logs.get_logger(__name__)


class Traces:
    """Tracer of one router, which exports the trace of a request when it ends.

    A request that arrives with a trace context is traced if the context's sampled flag is set. Of
    the other requests, the fraction ``sample`` is traced. ``uniform`` returns random numbers from 0
    to 1. Without an exporter, no request is traced.
    """

    def __init__(
        self,
        ledger: Ledger,
        exporter: Exporter | None = None,
        sample: float = 1.0,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._exporter = exporter
        self._sample = sample
        self._uniform = uniform

    def start_span(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
        headers: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
        for key, value in metadata:
            if key in headers and isinstance(value, str):
                headers[key].append(value)
        parent = TraceContext.parse(*map(",".join, headers.values()))
        if parent is not None:
            return parent.child(_new_span_id())
        if self._exporter is None:
            return None
        return TraceContext(secrets.token_hex(16), _new_span_id(), self._uniform() < self._sample)

    async def ended(self, live: LiveRequest) -> None:
        if self._exporter is None:
            return
        try:
            entry = await self._ledger.get(live.request_id)
            events = await self._ledger.events(live.request_id)
        except (LedgerUnavailable, UnknownRequest) as error:
            log.info("trace dropped", request_id=live.request_id, cause=str(error))
            return
        self._exporter.export(
            request_spans(live.request, entry, events, live.journal, _new_span_id)
        )

    def is_recorded(self, trace: TraceContext | None) -> bool:
        return self._exporter is not None and trace is not None and trace.is_sampled

    def refused(
        self, trace: TraceContext | None, elapsed_s: float, slug: str, x_request_id: str
    ) -> None:
        if self._exporter is not None and trace is not None and trace.is_sampled:
            now = time.time()
            self._exporter.export([refusal_span(trace, now - elapsed_s, now, slug, x_request_id)])

    def close(self) -> None:
        """Send the queued spans. This blocks, so do not call it in the event loop's thread."""
        if self._exporter is not None:
            self._exporter.close()


def _new_span_id() -> str:
    return secrets.token_hex(8)
