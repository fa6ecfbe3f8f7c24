"""TLS to the ledger's servers: one context for all connections, made again when its files change.

redis-py makes a context for each connection: tens of milliseconds of the event loop's time, as it
loads the system's authorities, and trusts them beside the one that is named.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import Connection
from redis.asyncio.sentinel import SentinelManagedConnection

from everlift import certificates
from everlift.reloaded import Reloaded
from everlift.settings import SettingsError
from everlift.tls import Tls
from router.ledger.config import LedgerConfig, LedgerSetupError


def context(config: LedgerConfig) -> Reloaded[ssl.SSLContext]:
    """Server certificates are verified, and that they are of the host that we connect to. Raises
    LedgerSetupError for files that are of no use."""
    try:
        return certificates.client_context(Tls(config.tls_ca, config.tls_cert, config.tls_key))
    except SettingsError as error:
        raise LedgerSetupError(f"the ledger's tls_ca, tls_cert or tls_key: {error}") from None


class TlsConnection(Connection):
    def __init__(self, *, tls: Reloaded[ssl.SSLContext], **settings: Any) -> None:
        self._tls = tls
        super().__init__(**settings)

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._tls.current()}


class SentinelTlsConnection(SentinelManagedConnection, TlsConnection):
    """To the primary that sentinels name."""
