"""A call that is made again while it has no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def first_answer(ask: Callable[[], Coroutine[Any, Any, T]], every_s: float) -> T:
    """What the first of the calls answers that has an end; every ``every_s`` there is one more.

    For calls of the ledger on which a lease hangs: each has a connection of its own, so that one
    that leads nowhere costs a part of the lease, and not the time after which it is given up.
    Raises what that first call does.
    """
    calls = [asyncio.create_task(ask())]
    try:
        while not (ended := [call for call in calls if call.done()]):
            await asyncio.wait(calls, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(call.done() for call in calls):
                calls.append(asyncio.create_task(ask()))
        return ended[0].result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
