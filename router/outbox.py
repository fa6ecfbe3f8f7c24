"""Messages that wait for a stream: additions merge into few messages of limited size."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

#: Far below what a stream takes, so that no number of additions breaks it.
_MERGED_BYTES = 1 << 20
#: To merge is to copy: what is bigger goes alone.
_COPIED_BYTES = 1 << 16


class Outbox(Generic[M]):
    """Belongs to one stream and is closed with it: gRPC goes on asking a dead stream's iterator."""

    def __init__(self, first: M) -> None:
        self._messages = deque([first])
        self._num_bytes = first.ByteSize()
        self._changed = asyncio.Event()
        self._changed.set()
        self._is_closed = False

    def add(self, message: M) -> None:
        """Add a message: repeated fields are appended, others replaced.

        After the close it changes nothing. ``message`` is the outbox's own from then on.
        """
        if self._is_closed:
            return
        num_bytes = message.ByteSize()
        fits = num_bytes <= _COPIED_BYTES and self._num_bytes + num_bytes <= _MERGED_BYTES
        if self._messages and fits:
            self._num_bytes += num_bytes
            self._messages[-1].MergeFrom(message)
        else:
            self._num_bytes = num_bytes
            self._messages.append(message)
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def messages(self) -> AsyncGenerator[M, None]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._messages and not self._is_closed:
                yield self._messages.popleft()
            if self._is_closed:
                return
