"""Faults on purpose, as a worker makes them of itself where chaos is allowed.

KILL, PAUSE    of rank 0 at once, by whom it is told; of another rank when it reads the step log
SLOW           each step of rank 0, and with it of all, is followed by a sleep
PARTITION      the streams to routers stand still; what is in them arrives afterwards
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

from everlift.v1 import chaos_pb2

#: Waits so long, then lets process $1 go on: a program of its own, since who is stopped cannot.
_WAKER = 'sleep "$0"; kill -CONT "$1"'


def strike(fault: chaos_pb2.Fault) -> None:
    """Kill or pause this process, and return when it continues."""
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
    """Added time of steps. Times are the engine's clock."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._until = 0.0

    def start(self, fault: chaos_pb2.Fault, now: float) -> None:
        self._factor, self._until = fault.factor, now + fault.seconds

    def extra_s(self, took_s: float, now: float) -> float:
        """Return the seconds to sleep after a step."""
        if now >= self._until:
            return 0.0
        return min(max(0.0, self._factor - 1) * took_s, self._until - now)


class Wire:
    """Simulated network faults between this worker and its routers. Lives in one event loop."""

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []

    def cut(self, peer: str, seconds: float) -> None:
        """Cut the connection to the router whose id begins with ``peer``; empty: to all."""
        cut = _Cut(peer)
        self._cuts.append(cut)
        asyncio.get_running_loop().call_later(seconds, self._mend, cut)

    def mend(self) -> None:
        """End the partition."""
        while self._cuts:
            self._mend(self._cuts[0])

    def _mend(self, cut: _Cut) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
            cut.mended.set()

    async def whole(self, router_id: str) -> None:
        """Return when something can come through between this router and us."""
        while (cut := self._cut_from(router_id)) is not None:
            await cut.mended.wait()

    def _cut_from(self, router_id: str) -> _Cut | None:
        return next((cut for cut in self._cuts if router_id.startswith(cut.peer)), None)


class _Cut:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.mended = asyncio.Event()
