"""Rank 0's end of the socket to one grammar process, which has compiled its grammar.

Requests and replies are about matchers. A matcher is the state of one sequence in the grammar; its
number is chosen by rank 0.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections import deque
from contextlib import suppress

from everlift.errors import EngineFailed, EverliftError, InvalidGrammar
from worker.grammar.backlog import Account, Backlog
from worker.grammar.messages import CHUNK, Frames, Reply, Request, decode_reply, encode_request

#: A step waits for masks if the predicted work of all grammar processes is at most this many
#: seconds per core. Common grammars take a fraction of a millisecond per token, and a sequence that
#: skips a step decodes more slowly.
_BACKLOG_S = 0.005
_CORES = os.cpu_count() or 1


class Channel:
    """Connection to one grammar process: sends requests and stores replies until they are taken.

    A single thread must use it, except for methods that are documented as thread-safe. When the
    last reference to the channel is gone, the socket closes and the grammar process ends.
    """

    def __init__(
        self, sock: socket.socket, mask_budget_s: float, timeout_s: float, backlog: Backlog
    ) -> None:
        """Create the channel over a connected ``sock``.

        ``mask_budget_s`` is the CPU time, in seconds, that a mask may take. No wait takes longer
        than ``timeout_s`` seconds. Unanswered requests are part of ``backlog``.
        """
        sock.setblocking(False)
        self._sock = sock
        #: whether the grammar process has been abandoned: its remaining replies are not read
        self._is_abandoned = False
        self._frames = Frames()
        #: unread replies of every matcher in use
        self._replies: dict[int, deque[Reply]] = {}
        self._dropped: deque[int] = deque()
        self._mask_budget_s = mask_budget_s
        self._timeout_s = timeout_s
        #: monotonic time of the last transfer over the socket
        self._last_transfer_at = time.monotonic()
        self._backlog = backlog
        self._account = Account(backlog, mask_budget_s)
        weakref.finalize(self, sock.close)
        weakref.finalize(self, backlog.close, self._account)

    @property
    def is_lost(self) -> bool:
        """Return whether the grammar process has ended or the connection is closed. Thread-safe."""
        poll = select.poll()
        # No event is requested, because poll reports a closed peer in any case.
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def expect(self, matcher: int) -> None:
        """Announce a request about ``matcher`` that the caller will pass to ``send`` later.

        From now on, the backlog includes the predicted CPU time of the request.
        """
        self._account.record_request(matcher)

    def send(self, request: Request) -> None:
        """Send a request, for which ``expect`` must have been called.

        Raises EverliftError if the process has ended or does not read the request in time.
        """
        self._send_drops()
        self._replies.setdefault(request["matcher"], deque())
        self._send(encode_request(request))
        self._last_transfer_at = time.monotonic()

    def take_reply(self, matcher: int, waiting_since: float) -> bytes:
        """Wait for the next reply about ``matcher``, and return its body.

        Raises EngineFailed if the reply is a refusal: the sequence cannot follow the grammar.
        Raises InvalidGrammar after the timeout, or if the grammar process has ended, for example
        because it exceeded a limit. The timeout begins at ``waiting_since``, the monotonic time at
        which the caller began to wait for this or any other grammar process.
        """
        deadline = waiting_since + self._timeout_s
        while not self._replies[matcher]:
            if not self._receive() and not self._wait(select.POLLIN, deadline):
                # A process that has sent or received data since ``waiting_since`` is only slow. It
                # is kept.
                raise (
                    self._abandon() if self._last_transfer_at < waiting_since else self._too_slow()
                )
        reply = self._replies[matcher].popleft()
        if reply.is_refusal:
            raise EngineFailed(f"the output cannot follow the grammar: {reply.body.decode()}")
        return reply.body

    @property
    def is_busy(self) -> bool:
        """Return whether all grammar processes together have more work than a step may wait for."""
        return self._backlog.seconds > _BACKLOG_S * _CORES

    def has_reply(self, matcher: int) -> bool:
        """Return whether ``take_reply`` would return or raise without waiting."""
        try:
            while not self._replies[matcher]:
                if not self._receive():
                    return False
        except EverliftError:
            pass  # take_reply raises it again
        return True

    def close(self) -> None:
        """Close the connection, which ends the grammar process.

        Thread-safe; may be called more than once.
        """
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def drop_matcher(self, matcher: int) -> None:
        """Remove ``matcher``, about which no more replies are taken.

        The backlog excludes its requests from now on. The grammar process is notified when ``send``
        is called next. Thread-safe, because a finalizer calls it.
        """
        self._dropped.append(matcher)
        self._backlog.drop(self._account, matcher)

    def _send_drops(self) -> None:
        while self._dropped:
            matcher = self._dropped.popleft()
            self._replies.pop(matcher, None)
            self._send(encode_request({"do": "drop", "matcher": matcher}))

    def _send(self, data: bytes) -> None:
        """Send ``data``, and read replies meanwhile, so that the two ends cannot deadlock."""
        deadline = time.monotonic() + self._timeout_s
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self._sock.send(unsent) :]
            except BlockingIOError:
                if not self._wait(select.POLLIN | select.POLLOUT, deadline):
                    raise self._abandon() from None
                self._receive()
            except OSError:
                raise self._abandon() from None

    def _receive(self) -> bool:
        if self._is_abandoned:
            raise self._abandon()
        try:
            received = self._sock.recv(CHUNK)
            self._last_transfer_at = time.monotonic()
            for frame in self._frames.feed(received):
                reply = decode_reply(frame)
                if reply.matcher in self._replies:
                    self._replies[reply.matcher].append(reply)
                    self._account.record_reply(reply.matcher, reply.cpu_s)
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            raise self._abandon() from None
        return True

    def _wait(self, events: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _abandon(self) -> EverliftError:
        """Close the connection, drop all stored replies, and return the error to raise."""
        self._is_abandoned = True
        for replies in self._replies.values():
            replies.clear()
        self.close()
        self._account.cancel_all()
        return self._too_slow()

    def _too_slow(self) -> EverliftError:
        return InvalidGrammar(
            "the grammar takes too long to follow: more than "
            f"{self._mask_budget_s:g} s for one token, or too much memory"
        )
