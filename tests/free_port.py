"""A port that nobody listens on, for what must know its port before it starts."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

#: Below those that the kernel gives to whoever connects, or listens on any port, meanwhile.
_FIRST, _END = 20_000, 32_768


def free_port() -> int:
    while True:
        # hypothesis and tests seed ``random``, side by side to the same numbers.
        port = _FIRST + secrets.randbelow(_END - _FIRST)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
