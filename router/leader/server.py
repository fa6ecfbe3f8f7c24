"""Leader's side of the message streams from the routers, which are called gateways here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Protocol, TypeAlias

from everlift.v1 import session_pb2
from router.outbox import Outbox

Send: TypeAlias = Callable[[session_pb2.LeaderMessage], None]


class Listener(Protocol):
    """Receiver of the messages on routers' streams; its methods must not block."""

    def connected(self, gateway: str) -> None: ...

    def disconnected(self, gateway: str) -> None: ...

    def receive(self, gateway: str, message: session_pb2.GatewayMessage) -> None: ...


class LeaderServer:
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._sends: dict[str, Send] = {}
        self._receive_lock = asyncio.Lock()

    @property
    def gateways(self) -> list[str]:
        return list(self._sends)

    def send(self, gateway: str, message: session_pb2.LeaderMessage) -> None:
        """Send a message to the router ``gateway``; ignored if the router is not connected.

        A disconnected router sends all its requests again when it reconnects. If it is dead, its
        requests are found by a search in the ledger (sweep.py).
        """
        send = self._sends.get(gateway)
        if send is not None:
            send(message)

    def disconnect_all(self) -> None:
        """Disconnect every router, with a message that it must find the next leader."""
        for gateway in self.gateways:
            self.redirect(gateway)

    async def serve_stream(
        self, messages: AsyncIterator[session_pb2.GatewayMessage]
    ) -> AsyncGenerator[session_pb2.LeaderMessage, None]:
        """Serve a router's stream: handle ``messages``, and yield the leader's messages to send.

        The iteration ends when ``messages`` ends, or when the leader disconnects the router. The
        last message that is yielded has ``resigned`` set in both cases. A stream whose first
        message does not name its router is closed at once, with only such a last message.
        """
        first = await anext(messages, session_pb2.GatewayMessage())
        gateway, outbox = first.router_id, Outbox(session_pb2.LeaderMessage())
        if not gateway:
            yield session_pb2.LeaderMessage(resigned=True)
            return
        send = outbox.add
        self.connect(gateway, send)
        reader = asyncio.create_task(self._read(gateway, send, first, messages))
        # When the gateway's messages end, close the stream; the gateway then opens another one.
        reader.add_done_callback(lambda _: send(session_pb2.LeaderMessage(resigned=True)))
        try:
            async with aclosing(outbox.messages()) as answers:
                async for message in answers:
                    yield message
                    if message.resigned:
                        return
        finally:
            reader.cancel()
            self.disconnect(gateway, send)

    async def _read(
        self,
        gateway: str,
        send: Send,
        first: session_pb2.GatewayMessage,
        messages: AsyncIterator[session_pb2.GatewayMessage],
    ) -> None:
        await self._receive(gateway, send, first)
        async for message in messages:
            await self._receive(gateway, send, message)

    async def _receive(self, gateway: str, send: Send, message: session_pb2.GatewayMessage) -> None:
        async with self._receive_lock:
            # Messages on a replaced stream are outdated.
            if self._sends.get(gateway) is send:
                self._listener.receive(gateway, message)
            await asyncio.sleep(0)

    def connect(self, gateway: str, send: Send) -> None:
        """Register the stream of the router ``gateway`` in place of an older one, which is closed.

        ``send`` puts a message on the stream; it must not block.
        """
        self.redirect(gateway)
        self._sends[gateway] = send
        self._listener.connected(gateway)

    def disconnect(self, gateway: str, send: Send) -> None:
        if self._sends.get(gateway) is send:
            self._forget(gateway)

    def redirect(self, gateway: str) -> None:
        """Disconnect a router, with a message that it must find the leader again.

        The leader may be the same one.
        """
        self.send(gateway, session_pb2.LeaderMessage(resigned=True))
        self._forget(gateway)

    def _forget(self, gateway: str) -> None:
        if self._sends.pop(gateway, None) is not None:
            self._listener.disconnected(gateway)
