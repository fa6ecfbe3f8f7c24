"""Channel to a ledger's server: one connection that many calls share, with or without TLS.

All connections share one TLS context, which is created again when its files change. redis-py would
create one per connection, which takes tens of milliseconds of the event loop, because it loads the
system's certificate authorities. It would also trust these authorities in addition to the
configured one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import hiredis
from redis._parsers.base import BaseParser
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.exceptions import ConnectionError, InvalidResponse, RedisError, TimeoutError

from everlift import certificates
from everlift.errors import SettingsError
from everlift.reloaded import Reloaded
from everlift.tls import Tls
from router.ledger.config import LedgerConfig, LedgerSetupError


def context(config: LedgerConfig) -> Reloaded[ssl.SSLContext]:
    """Return the TLS context for connections to the ledger.

    The context is reloaded when its files change. It verifies the servers' certificates and host
    names. Raises LedgerSetupError if a certificate or key file is unusable.
    """
    try:
        return certificates.client_context(Tls(config.tls_ca, config.tls_cert, config.tls_key))
    except SettingsError as error:
        raise LedgerSetupError(f"the ledger's tls_ca, tls_cert or tls_key: {error}") from None


class TlsConnection(Connection):
    def __init__(self, *, tls: Reloaded[ssl.SSLContext], **settings: Any) -> None:
        self._tls = tls
        super().__init__(**settings)

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._tls.current()}


class SentinelTlsConnection(SentinelManagedConnection, TlsConnection):
    """TLS connection to the primary that the sentinels name."""


Argument = str | int | bytes

_NOTHING = object()
_READ_BYTES = 1 << 16
#: Delay of a timeout check, in seconds, from which the check is repeated.
_LATE_S = 0.1


class Channel:
    """Connection to a server, shared by concurrent calls, whose commands are pipelined.

    ``make_connection`` returns an unconnected connection. If answers are outstanding and nothing is
    received for ``timeout_s`` seconds, the connection is closed and the waiting calls fail. The
    next call opens a new one.
    """

    def __init__(self, make_connection: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self._make_connection = make_connection
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None

    async def send(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands and return their answers, in order.

        An error reply is an exception in the list. Raises RedisError when the server cannot be
        reached, or the connection fails before all answers have arrived; the commands may then have
        run or not.
        """
        wire = self._wire
        if wire is None or wire.is_closed:
            wire = await self._connected()
        return await wire.send(commands)

    async def _connected(self) -> _Wire:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._on_connected)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Wire:
        connection = self._make_connection()
        await connection.connect()  # type: ignore[no-untyped-call]
        return _Wire(connection, self._timeout_s)

    def _on_connected(self, connecting: asyncio.Task[_Wire]) -> None:
        self._connecting = None
        # Callers that were cancelled do not read the exception. It is read here, because asyncio
        # logs exceptions that are never read.
        if not connecting.cancelled() and connecting.exception() is None:
            self._wire = connecting.result()

    def retire(self) -> None:
        """Use a new connection from now on; calls in flight complete on the old one."""
        if self._wire is not None:
            self._wire.retire()
            self._wire = None

    def drop(self) -> None:
        """Close the connection, fail the calls in flight, and use a new connection from now on."""
        if self._wire is not None:
            self._wire.fail(ConnectionError("the connection was replaced by one to another server"))
            self._wire = None

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()


class _PendingCall:
    __slots__ = ("answers", "future", "missing", "sent_at")

    def __init__(self, missing: int, loop: asyncio.AbstractEventLoop) -> None:
        self.missing = missing
        self.answers: list[Any] = []
        self.future: asyncio.Future[list[Any]] = loop.create_future()
        self.sent_at = loop.time()


class _Wire:
    """Open connection, which assigns the answers to the pending calls in the order of sending."""

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        # Both are set while the connection is open.
        assert connection._reader is not None and connection._writer is not None
        self._reader, self._writer = connection._reader, connection._writer
        self._timeout_s = timeout_s
        self._pending: deque[_PendingCall] = deque()
        self._unsent: list[bytes] = []
        self._received_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._check_at = 0.0
        self._is_retired = False
        self.is_closed = False
        self._reading = self._loop.create_task(self._read())

    def send(self, commands: Sequence[Sequence[Argument]]) -> asyncio.Future[list[Any]]:
        # Packing comes first, because it may raise: a queued call without sent commands would
        # receive the answers of later ones.
        packed = [self._connection.pack_command(*arguments) for arguments in commands]
        call = _PendingCall(len(commands), self._loop)
        self._pending.append(call)
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent += chain.from_iterable(packed)
        if self._timer is None:
            self._schedule_check(self._timeout_s)
        return call.future

    def _write(self) -> None:
        if not self.is_closed:
            self._writer.writelines(self._unsent)
        self._unsent = []

    async def _read(self) -> None:
        answers = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=BaseParser.parse_error,
            notEnoughData=_NOTHING,
        )
        try:
            while data := await self._reader.read(_READ_BYTES):
                self._received_at = self._loop.time()
                answers.feed(data)
                while (answer := answers.gets()) is not _NOTHING:
                    self._answer(answer)
                if self._is_retired and not self._pending:
                    break
            self._settle(ConnectionError("the server closed the connection"))
        except (OSError, InvalidResponse) as error:
            self._settle(ConnectionError(type(error).__name__))
        finally:
            self._settle(ConnectionError("the connection was closed"))
            with suppress(RedisError):
                await self._connection.disconnect()

    def _answer(self, answer: Any) -> None:
        if not self._pending:
            raise InvalidResponse("the server sent an answer without a command")
        call = self._pending[0]
        call.answers.append(answer)
        call.missing -= 1
        if not call.missing:
            self._pending.popleft()
            if not call.future.done():
                call.future.set_result(call.answers)

    def _schedule_check(self, seconds: float) -> None:
        self._check_at = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._check_at, self._check_timeout)

    def _check_timeout(self) -> None:
        self._timer = None
        if not self._pending:
            return
        since = max(self._pending[0].sent_at, self._received_at)
        late_s = self._loop.time() - self._check_at
        remaining_s = since + self._timeout_s - self._loop.time()
        if remaining_s > 0:
            self._schedule_check(remaining_s)
        elif late_s >= _LATE_S:
            # This process stalled, so answers that arrived meanwhile may not have been read yet.
            self._schedule_check(_LATE_S)
        else:
            self.fail(TimeoutError("the server does not answer"))

    def retire(self) -> None:
        self._is_retired = True
        if not self._pending:
            self._reading.cancel()

    def fail(self, error: Exception) -> None:
        self._settle(error)
        self._reading.cancel()

    def _settle(self, error: Exception) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        calls, self._pending = self._pending, deque()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(error)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
