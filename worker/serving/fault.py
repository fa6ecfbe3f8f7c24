"""Faults that a worker injects into itself, if its configuration allows chaos.

KILL, PAUSE    the process of one rank is killed or paused: rank 0 when the worker receives the
               fault, another rank when it reads the step log
SLOW           rank 0 sleeps after each step, which delays all ranks
PARTITION      the streams to routers stall; their content arrives afterwards
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

from everlift.v1 import chaos_pb2

#: Sleeps $0 seconds and then resumes process $1, which cannot resume itself while it is stopped.
_WAKER = 'sleep "$0"; kill -CONT "$1"'


def strike(fault: chaos_pb2.Fault) -> None:
    """Kill or pause this process, depending on the kind of ``fault``.

    After a pause of ``fault.seconds`` it returns. Does nothing for other kinds of faults.
    """
    if fault.kind == chaos_pb2.FAULT_KIND_KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == chaos_pb2.FAULT_KIND_PAUSE:
        _pause(fault.seconds)


def _pause(seconds: float) -> None:
    command = ["/bin/sh", "-c", _WAKER, f"{seconds:f}", str(os.getpid())]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere):
        os.kill(os.getpid(), signal.SIGSTOP)


class Slowness:
    """Slow-down of steps by a fault; ``now`` is the time on the engine's clock, in seconds."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._until = 0.0

    def start(self, fault: chaos_pb2.Fault, now: float) -> None:
        self._factor, self._until = fault.factor, now + fault.seconds

    def extra_s(self, took_s: float, now: float) -> float:
        """Return the seconds to sleep after a step that took ``took_s``.

        The result is 0 if no slow-down is active at ``now``, and at most the rest of its duration.
        """
        if now >= self._until:
            return 0.0
        return min(max(0.0, self._factor - 1) * took_s, self._until - now)


class Wire:
    """Simulated network partitions between this worker and its routers.

    Use it in a single event loop.
    """

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []

    def cut(self, peer: str, seconds: float) -> None:
        """Cut the connections to routers whose id begins with ``peer``, for ``seconds``.

        An empty ``peer`` cuts all connections.
        """
        cut = _Cut(peer)
        self._cuts.append(cut)
        asyncio.get_running_loop().call_later(seconds, self._mend, cut)

    def mend(self) -> None:
        """End all partitions."""
        while self._cuts:
            self._mend(self._cuts[0])

    def _mend(self, cut: _Cut) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
            cut.mended.set()

    async def whole(self, router_id: str) -> None:
        """Wait until no partition separates this worker from the router with this id."""
        while (cut := self._cut_from(router_id)) is not None:
            await cut.mended.wait()

    def _cut_from(self, router_id: str) -> _Cut | None:
        return next((cut for cut in self._cuts if router_id.startswith(cut.peer)), None)


class _Cut:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.mended = asyncio.Event()
