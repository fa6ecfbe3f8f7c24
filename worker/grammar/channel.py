"""Rank 0's end of the socket to one grammar process, once its grammar is compiled."""

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

#: A step waits for what the processes have to do while it is no more than this on each core: common
#: grammars take a fraction of a millisecond a token, and who sits a step out decodes slower.
_BACKLOG_S = 0.005
_CORES = os.cpu_count() or 1


class Channel:
    """Requests go out at once, replies wait here until they are taken.

    Used by one thread, but for what says otherwise. With the last reference to it the socket
    closes, and the grammar process ends.
    """

    def __init__(
        self, sock: socket.socket, mask_budget_s: float, timeout_s: float, backlog: Backlog
    ) -> None:
        """Open the channel; no wait exceeds ``timeout_s``."""
        sock.setblocking(False)
        self._sock = sock
        #: the grammar process is: what it may still have said is not read
        self._is_given_up = False
        self._frames = Frames()
        #: of every matcher that somebody asks about
        self._replies: dict[int, deque[Reply]] = {}
        self._forgotten: deque[int] = deque()
        self._mask_budget_s = mask_budget_s
        self._timeout_s = timeout_s
        #: when something went over the socket last
        self._stirred = time.monotonic()
        self._backlog = backlog
        self._account = Account(backlog, mask_budget_s)
        weakref.finalize(self, sock.close)
        weakref.finalize(self, backlog.close, self._account)

    @property
    def is_lost(self) -> bool:
        """Return whether the grammar process is gone. Thread-safe."""
        poll = select.poll()
        # No event is asked for: that the other end is closed is told unasked.
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def expect(self, matcher: int) -> None:
        """Note that the grammar process will be asked about ``matcher``."""
        self._account.asked(matcher)

    def send(self, request: Request) -> None:
        """Send an expected request. Raises EverliftError when the grammar process is gone."""
        self._drop_forgotten()
        self._replies.setdefault(request["matcher"], deque())
        self._send(encode_request(request))
        self._stirred = time.monotonic()

    def take_reply(self, matcher: int, began: float) -> bytes:
        """Return the body of the next reply about ``matcher``.

        Raises EverliftError for a refusal, when the grammar process is gone, or where the reply is
        not here in time: the patience of whoever waits is counted from when it ``began`` to wait,
        for this grammar process or others, in monotonic time.
        """
        deadline = began + self._timeout_s
        while not self._replies[matcher]:
            if not self._receive() and not self._wait(select.POLLIN, deadline):
                # One that answers others meanwhile is behind with its work, and goes on.
                raise self._lost() if self._stirred < began else self._too_slow()
        reply = self._replies[matcher].popleft()
        if reply.is_refusal:
            raise EngineFailed(f"the grammar cannot be followed: {reply.body.decode()}")
        return reply.body

    @property
    def is_busy(self) -> bool:
        """Return whether the processes have more work than a step can wait for."""
        return self._backlog.seconds > _BACKLOG_S * _CORES

    def has_reply(self, matcher: int) -> bool:
        """Return whether ``take_reply`` would not wait."""
        try:
            while not self._replies[matcher]:
                if not self._receive():
                    return False
        except EverliftError:
            pass  # take says it again
        return True

    def close(self) -> None:
        """Close the channel. Thread-safe, and may be called again."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def drop_matcher(self, matcher: int) -> None:
        """Drop ``matcher``. Called in any thread, by the garbage collector."""
        self._forgotten.append(matcher)

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            matcher = self._forgotten.popleft()
            self._replies.pop(matcher, None)
            self._account.cancel(matcher)
            self._send(encode_request({"do": "drop", "matcher": matcher}))

    def _send(self, data: bytes) -> None:
        """Send a request; meanwhile read, since otherwise both ends could wait for each other."""
        deadline = time.monotonic() + self._timeout_s
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self._sock.send(unsent) :]
            except BlockingIOError:
                if not self._wait(select.POLLIN | select.POLLOUT, deadline):
                    raise self._lost() from None
                self._receive()
            except OSError:
                raise self._lost() from None

    def _receive(self) -> bool:
        if self._is_given_up:
            raise self._lost()
        try:
            received = self._sock.recv(CHUNK)
            self._stirred = time.monotonic()
            for frame in self._frames.feed(received):
                reply = decode_reply(frame)
                if reply.matcher in self._replies:
                    self._replies[reply.matcher].append(reply)
                    self._account.answered(reply.matcher, reply.cpu_s)
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            raise self._lost() from None
        return True

    def _wait(self, events: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _lost(self) -> EverliftError:
        """Give up the grammar process and all its pending requests."""
        self._is_given_up = True
        for replies in self._replies.values():
            replies.clear()
        self.close()
        self._account.forget_all()
        return self._too_slow()

    def _too_slow(self) -> EverliftError:
        return InvalidGrammar(
            "the grammar takes too long to follow: more than "
            f"{self._mask_budget_s:g} s for one token, or too much memory"
        )
