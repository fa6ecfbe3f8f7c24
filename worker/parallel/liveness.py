"""Monitor of a rank's own step and of the other ranks, in the event loop's thread.

The ranks check periodically:

    each rank      asks the watchdog whether its own step is overdue
    ranks above 0  send heartbeats on the step log's connection, and check whether it has ended,
                   because the thread that reads it may be in a step that waits for rank 0
    rank 0         receives the heartbeats, which stop if a process is frozen or gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from worker.parallel.step_log import StepLogReader, StepLogWriter
from worker.parallel.watchdog import WakingTime, Watchdog

#: Seconds between two checks of the step and of the other ranks.
_CHECK_INTERVAL_S = 0.2
#: Seconds after the end of the connection in which a rank above 0 may still read rank 0's stop
#: entry. If it has not read one by then, rank 0 is considered lost.
_STOP_GRACE_S = 0.4


class LivenessMonitor:
    """Monitor of this rank's steps and of the other ranks.

    If a step takes longer than ``watchdog`` allows, or a rank is lost, the monitor calls ``end``
    with a message that states the cause. It may do so repeatedly. ``log`` is this rank's end of the
    step log, or None for a worker of a single rank. A rank that has sent a heartbeat is considered
    frozen after ``silence_s`` seconds without another one.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        log: StepLogWriter | StepLogReader | None,
        end: Callable[[str], None],
        silence_s: float,
    ) -> None:
        self._watchdog = watchdog
        self._log = log
        self._end = end
        self._silence_s = silence_s
        self._time = WakingTime(2 * _CHECK_INTERVAL_S)
        self._now = 0.0
        #: by rank, the time of its last heartbeat
        self._last_heartbeats: dict[int, float] = {}
        self._descriptors: list[int] = []
        self._cut_off_at: float | None = None
        self._check_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to check periodically and, on ranks above 0, to send heartbeats.

        Rank 0 considers a rank frozen only after it has received a first heartbeat from it. Must be
        called in the event loop.
        """
        loop = asyncio.get_running_loop()
        if isinstance(self._log, StepLogWriter):
            self._descriptors = self._log.descriptors()
            for rank, descriptor in enumerate(self._descriptors, 1):
                loop.add_reader(descriptor, partial(self._read_heartbeats, self._log, rank))
        self._check()
        self._check_task = loop.create_task(self._check_periodically())

    def close(self) -> None:
        """Stop checking. Must be called before the connections are closed; may be called again."""
        loop = asyncio.get_running_loop()
        while self._descriptors:
            loop.remove_reader(self._descriptors.pop())
        if self._check_task is not None:
            self._check_task.cancel()

    def _read_heartbeats(self, log: StepLogWriter, rank: int) -> None:
        if log.read_heartbeats(rank):
            self._last_heartbeats[rank] = self._now
        else:
            self._end(f"rank {rank} is gone")

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self._check()

    def _check(self) -> None:
        self._now = self._time.update(asyncio.get_running_loop().time())
        if isinstance(self._log, StepLogReader):
            self._log.send_heartbeat()
            self._check_rank_0(self._log)
        if (cause := self._watchdog.overdue(self._now)) is not None:
            self._end(cause)
        for rank, received_at in self._last_heartbeats.items():
            if self._now - received_at > self._silence_s:
                self._end(f"rank {rank} was silent for more than {self._silence_s:g} s")

    def _check_rank_0(self, log: StepLogReader) -> None:
        if not log.is_cut_off():
            return
        if self._cut_off_at is None:
            self._cut_off_at = self._now
        if self._now - self._cut_off_at >= _STOP_GRACE_S:
            self._end("rank 0 is gone")
