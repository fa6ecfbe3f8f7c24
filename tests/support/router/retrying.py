"""Clients that wait long enough for a router's start on a busy machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everlift.client.client import AsyncClient

#: Three times the client's default, which a router's start can exceed on a machine that runs three
#: tests at once.
RECONNECT_S = 90.0


def client(addresses: str | Sequence[str], **settings: Any) -> AsyncClient:
    """Return a client that waits for the start of a router."""
    return AsyncClient(addresses, **{"reconnect_s": RECONNECT_S} | settings)
