"""A port that nobody listens on, for what must know its port before it starts."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress

#: Below those that the kernel gives to whoever connects, or listens on any port, meanwhile.
_FIRST, _END = 20_000, 32_768


def free_port() -> int:
    """None of the last thousands, whose owner may be about to start again, and none of those that
    tests in the processes beside this one take."""
    while True:
        port = next(_ports)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _own() -> Iterator[int]:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(_FIRST + number, _END, processes)
    # hypothesis and tests seed ``random``, side by side to the same numbers.
    place = secrets.randbelow(len(ports))
    while True:
        yield ports[place]
        place = (place + 1) % len(ports)


_ports = _own()
