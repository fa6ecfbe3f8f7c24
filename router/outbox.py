"""What waits for a stream to take it: additions merge into one message until then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


class Outbox(Generic[M]):
    """Belongs to one stream and is closed with it: gRPC goes on asking a dead stream's iterator."""

    def __init__(self, first: M) -> None:
        self._message = first
        self._changed = asyncio.Event()
        self._changed.set()
        self._is_closed = False

    def add(self, message: M) -> None:
        """Repeated fields are appended, others replaced. After the close it changes nothing."""
        if self._is_closed:
            return
        self._message.MergeFrom(message)
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[M]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_closed:
                return
            message, self._message = self._message, type(self._message)()
            yield message
