"""Export of trace spans over OTLP."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from everlift.errors import SettingsError
from router.observability.traces.spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, TraceState

_SCOPE = "everlift"
#: Seconds for which a stopping router waits for its collector.
CLOSE_S = 2.0


class Exporter(Protocol):
    """Exporter of trace spans."""

    def export(self, spans: Iterable[Span]) -> None:
        """Queue spans for export, without waiting."""
        ...

    def close(self) -> None:
        """Send the queued spans, and block for at most ``CLOSE_S`` seconds."""
        ...


class OtlpExporter:
    """Exporter of spans over OTLP, in batches, from a thread of its own.

    While the collector is unavailable, spans that do not fit into the queue are dropped.
    """

    def __init__(self, exporter: SpanExporter, router_id: str) -> None:
        """Create the exporter around OpenTelemetry's ``exporter``."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        ours = Resource(
            {
                "service.name": _SCOPE,
                "service.version": version("everlift"),
                "service.instance.id": router_id,
            }
        )
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which the operator may set, override these
        # values.
        self._resource = ours.merge(OTELResourceDetector().detect())
        self._exporter = exporter
        self._scope = InstrumentationScope(_SCOPE, version("everlift"))
        self._processor = BatchSpanProcessor(exporter)

    def export(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._processor.on_end(self._readable(span))

    def close(self) -> None:
        # The processor's shutdown has no time limit, so a timer aborts an export that takes longer.
        breaking = threading.Timer(CLOSE_S, self._exporter.shutdown)
        breaking.start()
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        breaking.cancel()

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = span.context
        parent = _context(context.parent_id, span) if context.parent_id else None
        return ReadableSpan(
            span.name,
            _context(context.span_id, span),
            parent,
            self._resource,
            dict(span.attributes),
            [Event(name, timestamp=_nanoseconds(time)) for time, name in span.events],
            kind=SpanKind.SERVER if span.is_root else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET, span.error or None),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=self._scope,
        )


def otlp(endpoint: str, router_id: str) -> Exporter:
    """Return an exporter to the OTLP collector at ``endpoint`` over gRPC; https:// selects TLS.

    OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_HEADERS, set headers and certificates.
    Raises SettingsError if OpenTelemetry's exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SettingsError(
            "router.trace_endpoint: traces need OpenTelemetry's exporter:"
            " pip install 'everlift[traces]'"
        ) from None
    return OtlpExporter(OTLPSpanExporter(endpoint=endpoint), router_id)


def _context(span_id: str, span: Span) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    context = span.context
    return SpanContext(
        int(context.trace_id, 16),
        int(span_id, 16),
        is_remote=span_id != context.span_id,
        trace_flags=TraceFlags(context.is_sampled),
        trace_state=_state(context.state) if context.state else None,
    )


@lru_cache(maxsize=64)
def _state(state: str) -> TraceState:
    from opentelemetry.trace import TraceState

    return TraceState.from_header([state])


def _nanoseconds(time: float) -> int:
    return round(time * 1e9)
