"""Limit of the lines that a router has in progress at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

#: Seconds after which a waiting line reads the size again.
_RECHECK_S = 0.5


class Window:
    """Limit of concurrent lines, shared by all batches of a router.

    ``size`` returns the limit, which may change. Tenants with a running batch have equal shares of
    the limit, rounded up to whole lines. A tenant whose lines wait for its quota therefore does not
    block other tenants. More lines than the limit may be in progress because of the rounding, and
    while shares become smaller.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        self._size_of = size
        #: numbers of running batches and of lines in progress, by tenant
        self._batches: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @property
    def size(self) -> int:
        return self._size_of()

    @property
    def _share(self) -> int:
        return max(-(-self.size // max(len(self._batches), 1)), 1)

    @contextmanager
    def batch(self, tenant: str) -> Iterator[None]:
        """Context manager inside which a batch of ``tenant`` has lines in progress."""
        self._batches[tenant] += 1
        try:
            yield
        finally:
            self._batches[tenant] -= 1
            self._batches += Counter()
            self._freed.set()

    async def acquire(self, tenant: str) -> None:
        """Wait until a line of ``tenant`` may start, and count it."""
        while self._used[tenant] >= self._share:
            self._freed.clear()
            # Not wait_for, which before Python 3.12 may ignore a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECHECK_S):
                    await self._freed.wait()
        self._used[tenant] += 1

    def release(self, tenant: str) -> None:
        """Count the end of a line of ``tenant``."""
        self._used[tenant] -= 1
        self._used += Counter()
        self._freed.set()
