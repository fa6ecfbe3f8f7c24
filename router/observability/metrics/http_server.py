"""HTTP server for Prometheus and probes: GET /metrics, /ready and /live, in the event loop.

Metrics are collected in the event loop's thread. Only that thread changes their values, so that all
values are from the same time. They are encoded in another thread, because encoding takes so long
that it would delay tokens. Each connection gets one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from everlift import logs
from everlift.address import join_host_port
from router.requests.manager import Requests

log = logs.get_logger(__name__)

METRICS, READY, LIVE = "/metrics", "/ready", "/live"
_MOST_CONNECTIONS = 16
#: Seconds in which a request must arrive and its answer must be received.
_TIMEOUT_S = 5.0
MAX_HEAD_BYTES = 8192


class MetricsServer:
    """Server of metrics and probes; ``address`` is empty until it listens.

    /ready succeeds if ``readiness`` is set and its ``accepts_requests`` is true: this router then
    accepts new requests.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.readiness: Requests | None = None
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, host: str, port: int) -> None:
        """Listen for scrapes, unless the host is empty. Raises OSError if the port is taken."""
        if not host:
            return
        self._server = await asyncio.start_server(self.connected, host, port, limit=MAX_HEAD_BYTES)
        bound = self._server.sockets[0].getsockname()[1]
        self.address = join_host_port(host, bound)

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)
            await self._server.wait_closed()

    async def expose(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the encoded text of all metrics.

        ``accept`` is the value of the HTTP header Accept, which selects the encoding.
        """
        encode, content_type = encoder(accept)
        return content_type, await asyncio.to_thread(encode, _Collected(self._registry))

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a connection, or close it if there are too many."""
        if len(self._answering) >= _MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(await self._answer_next(reader))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            log.debug("metrics request failed or timed out")
        finally:
            # A closed transport still waits for a peer that does not read its answer.
            writer.transport.abort()

    async def _answer_next(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return await self._answer(head.decode("latin-1"))

    async def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in (METRICS, READY, LIVE):
            return _response(HTTPStatus.NOT_FOUND)
        if method != "GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET\r\n")
        if path == METRICS:
            return await self._metrics(lines)
        is_well = path == LIVE or (self.readiness is not None and self.readiness.accepts_requests)
        return _response(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, lines: list[str]) -> bytes:
        try:
            content_type, body = await self.expose(_accept(lines))
        except Exception:
            log.exception("metrics could not be collected")
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, f"Content-Type: {content_type}\r\n", body)


class _Collected:
    """Snapshot of all metrics, collected when the object is created.

    The library adds gauges with the creation times of counters and histograms. They are left out,
    because the catalogue does not have them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = list(registry.collect())
        for family in self._families:
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Return the encoder of metrics for this Accept header, and the content type of its result.

    An invalid header selects the default encoding.
    """
    try:
        return choose_encoder(accept)
    except TypeError:
        # The library fails on a version that is not a number, as in ``version=latest``.
        return choose_encoder("")


def _accept(lines: list[str]) -> str:
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.lower() == "accept"), "")


def _response(status: HTTPStatus, headers: str = "", body: bytes = b"") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n{headers}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
