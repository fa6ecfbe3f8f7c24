"""Reserved ports can be released and used again by their router, and by no other process."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from cluster.local.router_ports import ReservedPorts
from router.config import RouterConfig


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    ports = ReservedPorts()
    yield ports
    ports.close()


def any_port(host: str = "127.0.0.1", port: int = 0) -> RouterConfig:
    return RouterConfig(
        host=host, internal_host=host, http_host="", metrics_host=host, port=port, http_port=0
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"])
def test_reserved_ports_allow_repeated_listening(ports: ReservedPorts, host: str) -> None:
    router = ports.of(any_port(host))
    assert len({router.port, router.internal_port, router.metrics_port, 0}) == 4
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(3):
        with socket.create_server((host, router.port), family=family) as server:
            client = socket.create_connection(server.getsockname()[:2])
            accepted, _ = server.accept()
            client.close()
            accepted.close()


def test_reserved_ports_leave_fixed_and_unused_ports_unchanged(ports: ReservedPorts) -> None:
    router = ports.of(any_port(port=1234))
    assert (router.port, router.http_port) == (1234, 0)
    assert router.internal_port > 0


def test_reserved_ports_stay_reserved_until_closed(ports: ReservedPorts) -> None:
    port = ports.of(any_port()).port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    ports.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
