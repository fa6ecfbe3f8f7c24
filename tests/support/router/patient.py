"""Clients that wait for what a busy machine starts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everlift.client.client import AsyncClient

#: Three times the client's own default: a machine that runs three tests at once was seen to need
#: more than that to start a router.
RECONNECT_S = 90.0


def client(addresses: str | Sequence[str], **settings: Any) -> AsyncClient:
    """Return a client that waits for the start of a router."""
    return AsyncClient(addresses, **{"reconnect_s": RECONNECT_S} | settings)
