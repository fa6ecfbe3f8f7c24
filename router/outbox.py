"""Messages that wait to be sent on a stream, merged into few messages of limited size."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

#: Maximum size of a merged message in bytes, far below the size limit of a stream's messages.
_MERGED_BYTES = 1 << 20
#: Larger additions are sent alone, because merging copies them.
_COPIED_BYTES = 1 << 16


class Outbox(Generic[M]):
    """Queue of the messages to send on one stream; ``first`` is sent before all others.

    On the client side of a stream, call ``close`` when the stream ends, because gRPC continues to
    read the iterator of a broken stream. On the server side, close the generator ``messages``.
    """

    def __init__(self, first: M) -> None:
        self._messages = deque([first])
        self._num_bytes = first.ByteSize()
        self._changed = asyncio.Event()
        self._changed.set()
        self._is_closed = False

    def add(self, message: M, *, is_large: bool = False) -> None:
        """Queue a message to be sent; small ones are merged into the last unsent message.

        If ``is_large`` is True, the message is sent alone, and its size is not computed, because
        computing it serialises the message. Small messages are merged with MergeFrom: repeated
        fields are appended, other fields that are set in ``message`` replace older values, and the
        fields of submessages are merged likewise. The outbox takes over ``message``, which must not
        be changed afterwards. After ``close`` this has no effect.
        """
        if self._is_closed:
            return
        num_bytes = _MERGED_BYTES if is_large else message.ByteSize()
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
