"""The routers that a client may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from everlift.errors import Unreachable
from everlift.transport import GRPC, Transport
from everlift.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from everlift.v1.inference_pb2_grpc import InferenceAsyncStub


Metadata = tuple[tuple[str, str], ...]


def authorization(api_key: str | None) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class Routers:
    """One router is current, until it fails and the next one takes its place."""

    def __init__(
        self,
        targets: Sequence[str],
        transport: Transport = GRPC,
        api_key: str | None = None,
    ) -> None:
        if not targets:
            raise ValueError("at least one router address is needed")
        self._targets = tuple(targets)
        self._transport = transport
        #: what goes with every call
        self.metadata = authorization(api_key)
        self._current = 0
        self.is_closed = False
        self._open: dict[tuple[str, object], tuple[grpc.aio.Channel, InferenceAsyncStub]] = {}

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def current(self) -> str:
        return self._targets[self._current]

    def stub(self) -> InferenceAsyncStub:
        """Of the current router. Connects at the first call. Raises Unreachable when closed."""
        if self.is_closed:
            raise Unreachable("the client is closed")
        # What runs on a channel of older credentials ends there.
        place = self.current, self._transport.credentials
        if place not in self._open:
            channel = self._transport.channel(self.current)
            self._open[place] = channel, inference_pb2_grpc.InferenceStub(channel)
        return self._open[place][1]

    def failed(self, target: str) -> None:
        """``target`` did not answer; of the many calls that may say so only the first counts."""
        if target == self.current:
            self._current = (self._current + 1) % len(self._targets)

    async def close(self) -> None:
        self.is_closed = True
        for channel, _ in self._open.values():
            await channel.close()
        self._open.clear()
