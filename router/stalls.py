"""Whether this process goes on: who is frozen, or gets no time, hears nobody."""

from __future__ import annotations

import asyncio

from everlift import logs
from router.clock import now

log = logs.get(__name__)

#: The event loop is asked for a turn so often.
_LOOK_S = 0.1
#: The event loop stood still for so long: the process was frozen, or others had its core.
FREEZE_S = 0.5


async def report() -> None:
    """Logs each time that it stood still, until cancelled."""
    while True:
        due = now() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        if (late := now() - due) >= FREEZE_S:
            log.warning("stood still", seconds=round(late, 2))
