"""OTLP collector that keeps the traces that it receives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector(service.TraceServiceServicer):
    endpoint: str = ""
    exports: list[pb.ExportTraceServiceRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        self.exports.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.ExportTraceServiceResponse()

    @property
    def resources(self) -> list[dict[str, object]]:
        return [
            attributes(resource.resource)
            for export in self.exports
            for resource in export.resource_spans
        ]

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def trace(self, trace_id: str) -> dict[str, list[Span]]:
        """Return the spans of a trace by name, ordered by their start, outer ones first."""
        spans = [span for span in self.spans if span.trace_id.hex() == trace_id]
        spans.sort(key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))
        names = dict.fromkeys(span.name for span in spans)
        return {name: [span for span in spans if span.name == name] for name in names}


def attributes(holder: Any) -> dict[str, object]:
    """Return the attributes of a span or a resource."""
    return {each.key: _value(each.value) for each in holder.attributes}


def _value(value: Any) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    server, collector = grpc.aio.server(), Collector()
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
