"""TLS to the ledger's servers: one context for all connections, made again when its files change.

redis-py makes a context for each connection: tens of milliseconds of the event loop's time, as it
loads the system's authorities, and trusts them beside the one that is named.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import Connection
from redis.asyncio.sentinel import SentinelManagedConnection

from router.ledger.config import LedgerConfig


class Tls:
    """Server certificates are verified, and that they are of the host that we connect to."""

    def __init__(self, config: LedgerConfig) -> None:
        self._config = config
        self._files = [it for it in (config.tls_ca, config.tls_cert, config.tls_key) if it]
        self._written: list[int] = []
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """Raises OSError for files that cannot be read, ssl.SSLError for what they hold."""
        written = [os.stat(path).st_mtime_ns for path in self._files]
        if self._context is None or written != self._written:
            self._context, self._written = self._make(), written
        return self._context

    def _make(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._config.tls_ca or None)
        if self._config.tls_cert:
            context.load_cert_chain(self._config.tls_cert, self._config.tls_key)
        return context


class TlsConnection(Connection):
    def __init__(self, *, tls: Tls, **settings: Any) -> None:
        self._tls = tls
        super().__init__(**settings)

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._tls.context()}


class SentinelTlsConnection(SentinelManagedConnection, TlsConnection):
    """To the primary that sentinels name."""
