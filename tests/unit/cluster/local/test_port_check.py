"""Check of ports before a start: a port in use is reported with the process that holds it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from cluster.errors import ClusterFailed
from cluster.local import port_check
from router.config import RouterConfig
from tests.support.free_port import free_port

FREE = RouterConfig(port=0, http_port=0)


def test_port_check_accepts_free_ports() -> None:
    port_check.check([FREE, replace(FREE, port=free_port())])


def test_port_check_names_a_taken_port_and_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ClusterFailed) as caught:
            port_check.check([FREE, replace(FREE, http_port=port)])
    message = str(caught.value)
    assert f"router.http_port: 127.0.0.1:{port} is in use by process {os.getpid()} (" in message
    assert "or set router.http_port to another port" in message


def test_port_check_ignores_closed_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as accepted:
            accepted.close()
    port_check.check([replace(FREE, port=port)])
