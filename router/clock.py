"""The router's clock. It is the event loop's, so that a loop whose time is virtual runs a router
in virtual time."""

from __future__ import annotations

import asyncio


def now() -> float:
    """Seconds that never go back; only differences mean anything."""
    return asyncio.get_running_loop().time()
