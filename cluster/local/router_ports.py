"""Ports of the routers on one machine, which stay the same when a router is restarted."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace

from pydantic import ValidationError

from everlift import settings
from everlift.errors import SettingsError
from router.config import RouterConfig, overlapping


class ReservedPorts:
    """Reservation of a router's ports on this host, also while the router is not running.

    Each reservation is a socket that is bound to the port and does not listen. While it exists, the
    kernel assigns the port to no process that asks for any free port. The router can listen on the
    port nevertheless, because it uses SO_REUSEADDR.
    """

    def __init__(self) -> None:
        self._sockets = ExitStack()

    def of(self, router: RouterConfig) -> RouterConfig:
        """Reserve a free port for each port 0 of ``router``; return ``router`` with these ports.

        Other ports stay as they are and are not reserved. Port 0 stays 0 if its host is empty,
        because nothing listens there. Raises OSError if a port cannot be reserved.
        """
        return replace(
            router,
            port=router.port or self._reserve(router.host),
            internal_port=router.internal_port or self._reserve(router.internal_host),
            http_port=router.http_port or self._reserve(router.http_host),
            metrics_port=router.metrics_port or self._reserve(router.metrics_host),
        )

    def _reserve(self, host: str) -> int:
        if not host:
            return 0
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        reserved = self._sockets.enter_context(socket.socket(family, kind))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        reserved.bind(address)
        port: int = reserved.getsockname()[1]
        return port

    def close(self) -> None:
        """Release the ports."""
        self._sockets.close()


def consecutive(router: RouterConfig, count: int) -> list[RouterConfig]:
    """Return the configurations of ``count`` routers on one machine.

    The first router has the configured ports, and each further router the next higher ones. Port 0
    stays 0. Raises SettingsError if two routers would listen on the same port, or if a port would
    exceed 65535.
    """
    try:
        routers = [_with_ports_from(router, index) for index in range(count)]
    except ValidationError as error:
        cause = settings.to_settings_error(RouterConfig, error)
        raise SettingsError(f"router: {cause}; {count} routers take {count} ports each") from None
    for first, one in enumerate(routers):
        for other in routers[first + 1 :]:
            _check(one, other, count)
    return routers


def _with_ports_from(router: RouterConfig, index: int) -> RouterConfig:
    def own(port: int) -> int:
        return port + index if port else 0

    return replace(
        router,
        port=own(router.port),
        internal_port=own(router.internal_port),
        http_port=own(router.http_port),
        metrics_port=own(router.metrics_port),
    )


def _check(one: RouterConfig, other: RouterConfig, count: int) -> None:
    if (pair := overlapping(one, other)) is not None:
        first, second = (f"router.{listener.setting}" for listener in pair)
        raise SettingsError(
            f"{first} and {second} overlap at port {pair[0].port}: {count} routers on one machine "
            f"take {count} consecutive ports from each port that is set"
        )
