"""The routers that a client may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import grpc

from everlift.errors import SettingsError, Unreachable
from everlift.transport import GRPC, Transport
from everlift.v1 import admin_pb2_grpc, chaos_pb2_grpc, inference_pb2_grpc

if TYPE_CHECKING:
    from everlift.v1.admin_pb2_grpc import AdminAsyncStub
    from everlift.v1.chaos_pb2_grpc import ChaosAsyncStub
    from everlift.v1.inference_pb2_grpc import InferenceAsyncStub

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Routers:
    """Known routers. One is current until it fails; then the next one is."""

    def __init__(
        self,
        targets: Sequence[str],
        transport: Transport = GRPC,
        api_key: str | None = None,
    ) -> None:
        """Create the addresses of a client.

        Raises ValueError without a target, SettingsError for a key that no header can hold.
        """
        if not targets:
            raise ValueError("at least one router address is needed")
        self._targets = tuple(targets)
        self._transport = transport
        self._current = 0
        self._open: dict[tuple[str, object], grpc.aio.Channel] = {}
        self.is_closed = False
        #: calls that wait for their next try
        self.num_waiting = 0
        #: goes with every call
        self.metadata = _credentials(api_key)

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def current(self) -> str:
        return self._targets[self._current]

    def inference(self) -> InferenceAsyncStub:
        """Stub of the current router. Raises Unreachable when closed."""
        stub: InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel())
        return stub

    def admin(self) -> AdminAsyncStub:
        """Stub of the current router. Raises Unreachable when closed."""
        stub: AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel())
        return stub

    def chaos(self) -> ChaosAsyncStub:
        """Stub of the current router. Raises Unreachable when closed."""
        stub: ChaosAsyncStub = chaos_pb2_grpc.ChaosStub(self._channel())
        return stub

    def failed(self, target: str) -> None:
        """Note that ``target`` did not answer; of many reports of it the first counts."""
        if target == self.current:
            self._current = (self._current + 1) % len(self._targets)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a call as waiting for its next try."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        self.is_closed = True
        for channel in self._open.values():
            await channel.close()
        self._open.clear()

    def _channel(self) -> grpc.aio.Channel:
        if self.is_closed:
            raise Unreachable("the client is closed")
        # What runs on a channel of older credentials ends there.
        place = self.current, self._transport.credentials
        if place not in self._open:
            self._open[place] = self._transport.channel(self.current)
        return self._open[place]


def _credentials(api_key: str | None) -> Metadata:
    if api_key is None:
        return ()
    # gRPC would quote it in its own error.
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise SettingsError("api_key must be ASCII without spaces and control characters")
    return (("authorization", f"Bearer {api_key}"),)
