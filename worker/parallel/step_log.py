"""Step log, which rank 0 sends to the other ranks, over a TCP connection to each.

An entry contains the input of one step (such as sequences to start or abort), so that every rank
makes the same plan. Waiting for an entry is not a collective, so it is not limited by the timeout
of collectives while the worker is idle.

    rank r -> rank 0    StepLogHello, once; then heartbeats, whether or not its engine is in a step
    rank 0 -> rank r    StepLog, one per step

Each StepLogHello and StepLog follows its length in four bytes, big-endian. A heartbeat is a single
byte without a length. If the connection ends, both ranks end.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Self

from everlift import logs
from everlift.v1 import session_pb2

log = logs.get_logger(__name__)

_LENGTH = struct.Struct(">I")
#: Maximum size of a StepLogHello in bytes. An unknown client that announces more is rejected.
_MAX_HELLO = 1024
_HEARTBEAT = b"b"
#: Maximum number of heartbeats, of one byte each, that are read at once.
_MAX_HEARTBEATS = 4096
#: Seconds to connect, and seconds for a client to send its StepLogHello.
_HELLO_S = 5.0


class ChannelBroken(Exception):
    """Raised if ranks cannot connect, or a connection between them is lost; none can continue."""


class StepLogListener:
    """Listener of rank 0 for the other ranks, which need its ``address`` to connect.

    The address contains a secret token. ``fingerprint`` identifies the model's files and must be
    the same on all ranks.
    """

    def __init__(self, host: str, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self.address = f"{host}:{self._server.getsockname()[1]}/{self._token}"

    def accept(self, ranks: int, timeout_s: float) -> StepLogWriter:
        """Wait until ranks 1 to ``ranks`` - 1 have connected, and return the writer to them.

        Raises ChannelBroken if they do not connect within ``timeout_s`` seconds, if one has another
        model, or if the listener is closed. Receiving the hello of a connected client may extend
        the wait: each read from its socket waits for up to ``_HELLO_S`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        sockets: dict[int, socket.socket] = {}
        with ExitStack() as unless_complete:
            while len(sockets) < ranks - 1:
                sock = unless_complete.enter_context(self._next_connection(deadline))
                rank = self._admit(sock, ranks)
                if rank is None or rank in sockets:
                    sock.close()
                else:
                    sockets[rank] = sock
            unless_complete.pop_all()
        return StepLogWriter([sockets[rank] for rank in sorted(sockets)])

    def close(self) -> None:
        """Close the listener; an ``accept`` that waits in another thread raises ChannelBroken."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _next_connection(self, deadline: float) -> socket.socket:
        self._server.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            sock, _ = self._server.accept()
        except (TimeoutError, BlockingIOError):
            raise ChannelBroken("not all ranks have connected in time") from None
        except OSError as error:
            raise ChannelBroken(f"no rank can connect any more: {error}") from None
        return sock

    def _admit(self, sock: socket.socket, ranks: int) -> int | None:
        sock.settimeout(_HELLO_S)
        try:
            hello = session_pb2.StepLogHello.FromString(_receive(sock, _MAX_HELLO))
        except Exception as error:  # an unknown client may send anything
            log.warning("connection refused: unknown rank", error=type(error).__name__)
            return None
        knows = hmac.compare_digest(hello.token.encode(), self._token.encode())
        if not knows or not 0 < hello.rank < ranks:
            log.warning("connection refused: unknown rank", rank=hello.rank)
            return None
        if hello.fingerprint != self._fingerprint:
            raise ChannelBroken(f"rank {hello.rank} has another model than rank 0")
        _prepare(sock)
        return hello.rank


class StepLogWriter:
    """Rank 0's end of the connections to all other ranks."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets

    def descriptors(self) -> list[int]:
        """Return the file descriptors of the open connections, in the order of ranks from 1.

        A descriptor becomes readable when its rank sends a heartbeat or is gone.
        """
        return [sock.fileno() for sock in self._sockets if sock.fileno() >= 0]

    def read_heartbeats(self, rank: int) -> bool:
        """Read the heartbeats of a rank that have arrived; return whether it is still connected.

        Returns at once, also if none has arrived.
        """
        try:
            return bool(self._sockets[rank - 1].recv(_MAX_HEARTBEATS, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def write(self, entry: session_pb2.StepLog) -> None:
        """Send an entry to all other ranks. Raises ChannelBroken if a connection is lost."""
        for rank, sock in enumerate(self._sockets, 1):
            try:
                _send(sock, entry.SerializeToString())
            except OSError as error:
                raise ChannelBroken(f"rank {rank} is gone: {error}") from error

    def interrupt(self) -> None:
        """Break the connections, which makes the other ranks end.

        A ``write`` that waits in another thread then raises ChannelBroken.
        """
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class StepLogReader:
    """Connection of rank ``rank`` to rank 0; iteration yields the entries of the step log."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket = sock
        self._has_stopped = False

    @classmethod
    def connect(cls, address: str, rank: int, fingerprint: str) -> Self:
        """Connect to rank 0's listener at ``address``, and return the reader.

        ``fingerprint`` identifies the model's files. Raises ChannelBroken if the listener cannot be
        reached.
        """
        place, _, token = address.rpartition("/")
        host, _, port = place.rpartition(":")
        hello = session_pb2.StepLogHello(token=token, rank=rank, fingerprint=fingerprint)
        try:
            sock = socket.create_connection((host, int(port)), timeout=_HELLO_S)
        except OSError as error:
            raise ChannelBroken(f"rank 0 cannot be reached: {error}") from error
        _prepare(sock)
        # A connection that breaks here is noticed by the next read.
        with suppress(OSError):
            _send(sock, hello.SerializeToString())
        return cls(sock, rank)

    def __iter__(self) -> Iterator[session_pb2.StepLog]:
        """Yield the entries as they arrive. Raises ChannelBroken when the connection ends."""
        while True:
            try:
                data = _receive(self._socket)
            except OSError as error:
                raise ChannelBroken(f"rank 0 is gone: {error}") from error
            entry = session_pb2.StepLog.FromString(data)
            self._has_stopped = entry.stop
            yield entry

    def send_heartbeat(self) -> None:
        """Send a heartbeat to rank 0.

        May be called while another thread reads. Never waits, and ignores a broken connection,
        which the reading thread notices.
        """
        with suppress(OSError):
            self._socket.send(_HEARTBEAT, socket.MSG_DONTWAIT)

    def is_cut_off(self) -> bool:
        """Return whether the connection has ended and the last entry read is not a stop entry.

        The result may be true although entries that arrived earlier, even a stop entry, are still
        unread. May be called while another thread reads; never waits.
        """
        if self._has_stopped:
            return False
        ends = select.poll()
        ends.register(self._socket, select.POLLRDHUP)
        return bool(ends.poll(0))

    def interrupt(self) -> None:
        """Break the connection; an iteration in another thread raises ChannelBroken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _prepare(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, limit: int = 1 << 32) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    if length > limit:
        raise ConnectionError(f"a message has {length} bytes, more than {limit}")
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        count = sock.recv_into(view[filled:])
        if not count:
            raise ConnectionError("the other end has closed the connection")
        filled += count
    return bytes(data)
