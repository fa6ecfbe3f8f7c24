"""The router's clock. It is the event loop's, so that a loop whose time is virtual runs a router
in virtual time."""

from __future__ import annotations

import asyncio
import time

import uvloop


def now() -> float:
    """Seconds that never go back; only differences mean anything."""
    loop = asyncio.get_running_loop()
    # uvloop counts milliseconds, and stands still for a turn of its loop. The clock is the same.
    return time.monotonic() if isinstance(loop, uvloop.Loop) else loop.time()
