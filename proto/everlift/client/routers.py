"""Routers that a client may use, and the channels to them."""

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
    """Routers of a client. One is current until it fails, and then the next one becomes current."""

    def __init__(
        self,
        targets: Sequence[str],
        transport: Transport = GRPC,
        api_key: str | None = None,
    ) -> None:
        """Create the routers at the addresses ``targets``, without connecting to them.

        Raises ValueError if ``targets`` is empty, and SettingsError for an API key that no header
        can contain.
        """
        if not targets:
            raise ValueError("at least one router address is needed")
        self._targets = tuple(targets)
        self._transport = transport
        self._current = 0
        self._channels: dict[tuple[str, object], grpc.aio.Channel] = {}
        self.is_closed = False
        #: number of calls that wait for their next attempt
        self.num_waiting = 0
        #: metadata that is sent with every call
        self.metadata = _credentials(api_key)

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def current(self) -> str:
        return self._targets[self._current]

    def inference(self) -> InferenceAsyncStub:
        """Return a stub of the current router's Inference service.

        Raises Unreachable if the client is closed.
        """
        stub: InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel())
        return stub

    def admin(self) -> AdminAsyncStub:
        """Return a stub of the current router's Admin service.

        Raises Unreachable if the client is closed.
        """
        stub: AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel())
        return stub

    def chaos(self) -> ChaosAsyncStub:
        """Return a stub of the current router's Chaos service.

        Raises Unreachable if the client is closed.
        """
        stub: ChaosAsyncStub = chaos_pb2_grpc.ChaosStub(self._channel())
        return stub

    def report_failure(self, target: str) -> None:
        """Make the next router current, because ``target`` did not answer.

        Nothing changes if ``target`` is not current. If many calls report the same failure, only
        the first report therefore has an effect.
        """
        if target == self.current:
            self._current = (self._current + 1) % len(self._targets)

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Context manager: count a call in ``num_waiting`` while it waits for its next attempt."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        self.is_closed = True
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _channel(self) -> grpc.aio.Channel:
        if self.is_closed:
            raise Unreachable("the client is closed")
        # Calls on a channel with former credentials end there; new calls use another channel.
        key = self.current, self._transport.credentials
        if key not in self._channels:
            self._channels[key] = self._transport.channel(self.current)
        return self._channels[key]


def _credentials(api_key: str | None) -> Metadata:
    if api_key is None:
        return ()
    # The key is checked here, because gRPC would quote an invalid one in its error.
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise SettingsError("api_key must be ASCII without spaces or control characters")
    return (("authorization", f"Bearer {api_key}"),)
