"""Free ports for a router that is started again and again, and has to be found where it was."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

from router.config import RouterConfig


class KeptPorts:
    """Of this host. While a router is away the kernel would give its ports to whoever connects
    somewhere: a socket that is bound to one, and does not listen, is in a listener's way as little
    as SO_REUSEADDR says, and in all others' way."""

    def __init__(self) -> None:
        self._kept = ExitStack()

    def of(self, router: RouterConfig) -> RouterConfig:
        """With a port wherever it is to be any free one. Raises OSError."""
        return replace(
            router,
            port=router.port or self._keep(router.host),
            internal_port=router.internal_port or self._keep(router.internal_host),
            http_port=router.http_port or self._keep(router.http_host),
            metrics_port=router.metrics_port or self._keep(router.metrics_host),
        )

    def _keep(self, host: str) -> int:
        """0 where it listens nowhere."""
        if not host:
            return 0
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        kept = self._kept.enter_context(socket.socket(family, kind))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            kept.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        kept.bind(address)
        port: int = kept.getsockname()[1]
        return port

    def close(self) -> None:
        """They are anybody's again."""
        self._kept.close()
