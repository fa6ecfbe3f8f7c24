"""Pipe: one direction of a simulated call; and the status with which a call ends."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import grpc

from tests.simulated_cluster.clock import VirtualLoop
from tests.simulated_cluster.network import Link, Network

T = TypeVar("T")
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

#: Messages that may be under way in one direction of a call.
_WINDOW = 64


@dataclass(slots=True)
class Status:
    """Status with which a call ended."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()


#: What goes to a server, None after the last, and what comes from it, a Status after the last.
Sent: TypeAlias = bytes | None
Received: TypeAlias = bytes | Status


class Pipe(Generic[T]):
    """``put`` at one end, ``get`` at the other: two processes hold it."""

    def __init__(
        self, network: Network, link: Link, writer: VirtualLoop, reader: VirtualLoop
    ) -> None:
        self._network = network
        self._link = link
        self._writer, self._reader = writer, reader
        self._under_way: deque[T] = deque()
        self._arrived: deque[T] = deque()
        self._unread = 0
        self._has_room = asyncio.Event()
        #: set when something comes
        self.has_come = asyncio.Event()

    async def put(self, item: T) -> None:
        """Waits while the other end does not read."""
        while self._unread >= _WINDOW:
            self._has_room.clear()
            await self._has_room.wait()
        self.put_last(item)

    def put_last(self, item: T) -> None:
        """Without waiting for room."""
        if not self._writer.is_dead:
            self._unread += 1
            self._under_way.append(item)
            self._network.send(self._link, self._reader, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._under_way.popleft())
        self.has_come.set()

    def __bool__(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._arrived)

    def take(self) -> T:
        self._unread -= 1
        self._writer.call_soon(self._has_room.set)
        return self._arrived.popleft()

    async def get(self) -> T:
        while not self._arrived:
            self.has_come.clear()
            await self.has_come.wait()
        return self.take()
