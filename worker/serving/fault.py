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


def kill_or_pause(fault: chaos_pb2.Fault) -> None:
    """Kill or pause this process, depending on the kind of ``fault``.

    Returns after a pause of ``fault.seconds`` seconds. Does nothing for other kinds of faults.
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
    """Slow-down of steps by a fault of the kind SLOW.

    ``now`` is the time on the engine's clock, in seconds.
    """

    def __init__(self) -> None:
        self._factor = 1.0
        self._until = 0.0

    def start(self, fault: chaos_pb2.Fault, now: float) -> None:
        self._factor, self._until = fault.factor, now + fault.seconds

    def extra_s(self, step_s: float, now: float) -> float:
        """Return the seconds to sleep after a step that took ``step_s``.

        The result is 0 if no slow-down is active at ``now``, and at most the rest of its duration.
        """
        if now >= self._until:
            return 0.0
        return min(max(0.0, self._factor - 1) * step_s, self._until - now)


class NetworkPartitions:
    """Simulated network partitions between this worker and its routers.

    All methods must be called in the same event loop.
    """

    def __init__(self) -> None:
        self._partitions: list[_Partition] = []

    def add(self, peer: str, seconds: float) -> None:
        """Cut the connections to routers whose id begins with ``peer``, for ``seconds`` seconds.

        An empty ``peer`` cuts all connections.
        """
        partition = _Partition(peer)
        self._partitions.append(partition)
        asyncio.get_running_loop().call_later(seconds, self._heal, partition)

    def heal(self) -> None:
        """End all partitions."""
        while self._partitions:
            self._heal(self._partitions[0])

    def _heal(self, partition: _Partition) -> None:
        if partition in self._partitions:
            self._partitions.remove(partition)
            partition.healed.set()

    async def wait_until_connected(self, router_id: str) -> None:
        """Wait until no partition separates this worker from the router with this id."""
        while (partition := self._partition_of(router_id)) is not None:
            await partition.healed.wait()

    def _partition_of(self, router_id: str) -> _Partition | None:
        matching = (part for part in self._partitions if router_id.startswith(part.peer))
        return next(matching, None)


class _Partition:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.healed = asyncio.Event()
