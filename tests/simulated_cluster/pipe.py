"""Pipe, one direction of a simulated call, and the status with which a call ends."""

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

#: Most unread messages in one direction of a call.
_WINDOW = 64


@dataclass(slots=True)
class Status:
    """Status with which a call ended."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()


#: Messages to a server, the last of which is None, and from a server, the last of which is a
#: Status.
Sent: TypeAlias = bytes | None
Received: TypeAlias = bytes | Status


class Pipe(Generic[T]):
    """Messages from one process to another: one end puts them, the other gets them."""

    def __init__(
        self, network: Network, link: Link, writer: VirtualLoop, reader: VirtualLoop
    ) -> None:
        self._network = network
        self._link = link
        self._writer, self._reader = writer, reader
        self._under_way: deque[T] = deque()
        self._arrived: deque[T] = deque()
        self._unread = 0
        self._has_capacity = asyncio.Event()
        #: set when a message arrives
        self.has_come = asyncio.Event()

    async def put(self, item: T) -> None:
        """Put a message; wait while the other end does not read."""
        while self._unread >= _WINDOW:
            self._has_capacity.clear()
            await self._has_capacity.wait()
        self.put_last(item)

    def put_last(self, item: T) -> None:
        """Put a message without waiting for the other end."""
        if not self._writer.is_dead:
            self._unread += 1
            self._under_way.append(item)
            self._network.send(self._link, self._reader, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._under_way.popleft())
        self.has_come.set()

    def __bool__(self) -> bool:
        """Return whether a message has arrived."""
        return bool(self._arrived)

    def take(self) -> T:
        self._unread -= 1
        self._writer.call_soon(self._has_capacity.set)
        return self._arrived.popleft()

    async def get(self) -> T:
        while not self._arrived:
            self.has_come.clear()
            await self.has_come.wait()
        return self.take()
