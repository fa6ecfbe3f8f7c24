"""Free ports for servers whose port must be known before they start."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress

#: Below the kernel's range of ephemeral ports.
_FIRST, _END = 20_000, 32_768


def free_port() -> int:
    """Return a free port that no other test is likely to take.

    None of the last thousands is returned again, because its owner may be about to restart.
    Parallel test processes draw from disjoint sets of ports.
    """
    while True:
        port = next(_ports)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _own() -> Iterator[int]:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(_FIRST + number, _END, processes)
    # The start is not drawn from ``random``, which hypothesis and tests seed alike in all
    # processes.
    place = secrets.randbelow(len(ports))
    while True:
        yield ports[place]
        place = (place + 1) % len(ports)


_ports = _own()
