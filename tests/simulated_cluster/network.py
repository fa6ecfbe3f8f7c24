"""Network of a simulated cluster: gRPC's interface without sockets, in virtual time.

    channel -> call ==== requests ===>  handler of a server
                    <=== answers =====  and its status

Messages arrive after ``latency``, in order and serialised: two processes never share a message. A
link between two processes can be cut for a while. Messages that are sent meanwhile arrive when it
heals, unless that takes so long that both ends give up the connection.

A killed process breaks its calls. A frozen process answers nothing, which others notice as they
would with gRPC.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeVarTuple

from tests.simulated_cluster.clock import Clock, VirtualLoop

Ts = TypeVarTuple("Ts")

#: Seconds without a message after which a connection is given up (everlift.channels).
KEEPALIVE_S = 15.0

#: Two processes that may exchange messages.
Link = frozenset[VirtualLoop]


class Bound(Protocol):
    """Object that has an address."""

    @property
    def process(self) -> VirtualLoop: ...


class Connection(Protocol):
    """Connection that breaks when its link does."""

    @property
    def link(self) -> Link: ...

    def break_off(self, cause: str) -> None:
        """End the connection for both ends."""
        ...


class Network:
    """Network whose one-way ``latency`` is in seconds."""

    def __init__(self, clock: Clock, latency: float) -> None:
        self.clock = clock
        self.latency = latency
        self._ports = count(1)
        self._servers: dict[str, Bound] = {}
        self._closed_until: dict[Link, float] = {}
        self._calls: dict[Connection, None] = {}
        #: process that gives up silent connections
        self._keeper = clock.process("network")

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call back outside of every process of the cluster."""
        self._keeper.call_soon(callback, *args)

    # faults

    def cut(self, one: VirtualLoop, other: VirtualLoop, seconds: float) -> None:
        """Let nothing pass between the two processes, in either direction."""
        link, until = frozenset((one, other)), self.clock.now + seconds
        self._closed_until[link] = max(until, self._closed_until.get(link, 0.0))
        if seconds > KEEPALIVE_S:
            self._keeper.call_later(KEEPALIVE_S, self._give_up, link)

    def _give_up(self, link: Link) -> None:
        if self._closed_until[link] > self.clock.now:
            for call in tuple(self._calls):
                if call.link == link:
                    call.break_off("keepalive watchdog timeout")

    def reset(self, one: VirtualLoop, other: VirtualLoop) -> None:
        """Break every call between the two processes, at both ends."""
        for call in tuple(self._calls):
            if call.link == frozenset((one, other)):
                call.break_off("connection reset")

    def freeze(self, process: VirtualLoop, seconds: float) -> None:
        process.freeze(seconds)
        if seconds > KEEPALIVE_S:
            self._keeper.call_later(KEEPALIVE_S, self._silent, process)

    def _silent(self, process: VirtualLoop) -> None:
        if process.frozen_until > self.clock.now:
            for call in tuple(self._calls):
                if process in call.link:
                    call.break_off("keepalive watchdog timeout")

    def kill(self, process: VirtualLoop) -> None:
        process.kill()
        self.unbind_all(process)
        for call in tuple(self._calls):
            if process in call.link:
                self.send(call.link, self._keeper, call.break_off, "connection reset by peer")

    # interface of channels and servers

    def bind(self, address: str, server: Bound) -> int:
        """Bind the address, or a free port of its host; return the port, or 0 if it is taken."""
        host, _, port = address.rpartition(":")
        bound = int(port) or next(self._ports)
        if f"{host}:{bound}" in self._servers:
            return 0
        self._servers[f"{host}:{bound}"] = server
        return bound

    def unbind(self, server: Bound) -> None:
        for address in [a for a, s in self._servers.items() if s is server]:
            del self._servers[address]

    def unbind_all(self, process: VirtualLoop) -> None:
        """Remove all servers of the process."""
        for address in [a for a, s in self._servers.items() if s.process is process]:
            del self._servers[address]

    def find(self, address: str) -> Bound | None:
        return self._servers.get(address)

    def begin(self, call: Connection) -> None:
        self._calls[call] = None

    def end(self, call: Connection) -> None:
        self._calls.pop(call, None)

    def send(
        self,
        link: Link,
        to: VirtualLoop,
        arrive: Callable[..., object],
        *args: object,
    ) -> None:
        """Call ``arrive`` in the process ``to`` when a message that is sent now arrives."""
        to.call_at(self._arrival(link), self._arrive, link, to, arrive, args)

    def _arrival(self, link: Link) -> float:
        return max(self.clock.now, self._closed_until.get(link, 0.0)) + self.latency

    def _arrive(
        self,
        link: Link,
        to: VirtualLoop,
        arrive: Callable[..., object],
        args: tuple[object, ...],
    ) -> None:
        if self._closed_until.get(link, 0.0) > self.clock.now:
            self.send(link, to, arrive, *args)
        else:
            arrive(*args)
