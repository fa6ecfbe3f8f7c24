"""Limit of the lines that a router has in progress at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Seconds after which a waiting line reads the size again.
_RECHECK_S = 0.5


class Window:
    """Limit of concurrent lines, shared by all batches of a router.

    ``size`` returns the limit, which may change.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        self._size_of = size
        self._used = 0
        self._freed = asyncio.Event()

    @property
    def size(self) -> int:
        return self._size_of()

    async def acquire(self) -> None:
        """Wait until a line may start, and count it."""
        while self._used >= self.size:
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), _RECHECK_S)
            except TimeoutError:
                continue
        self._used += 1

    def release(self) -> None:
        """Count the end of a line."""
        self._used -= 1
        self._freed.set()
