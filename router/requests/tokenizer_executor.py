"""Work that would hold the event loop up, done beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Characters of text. So many take the tokenizer 1.2 ms, a thread 0.1 ms to be reached; 100,000
#: would hold all streams up for 41 ms.
_INLINE = 4096


async def with_text(length: int, work: Callable[[], T]) -> T:
    """What ``work`` answers, whose time goes with a text of ``length`` characters or tokens. It
    must not hold Python's lock all the while."""
    return work() if length <= _INLINE else await asyncio.to_thread(work)
