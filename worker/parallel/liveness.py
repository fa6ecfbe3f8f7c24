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
_LOOK_S = 0.2
#: Seconds without a heartbeat after which a rank that has sent one is considered frozen.
_SILENCE_S = 1.0
#: Seconds after the end of the connection in which a rank above 0 may still read rank 0's stop
#: entry. Without it rank 0 is then considered lost.
_PARTING_S = 0.4


class LivenessMonitor:
    """Monitor of this rank's steps and of the other ranks.

    If a step takes longer than ``watchdog`` allows or a rank is lost, it calls ``end`` with a
    message that says so, perhaps repeatedly. ``log`` is this rank's end of the step log, or None
    for a worker of a single rank.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        log: StepLogWriter | StepLogReader | None,
        end: Callable[[str], None],
    ) -> None:
        self._watchdog = watchdog
        self._log = log
        self._end = end
        self._time = WakingTime(2 * _LOOK_S)
        self._now = 0.0
        #: by rank, the time of its last heartbeat
        self._beats: dict[int, float] = {}
        self._lines: list[int] = []
        self._cut_off_at: float | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to check periodically and, on ranks above 0, to send heartbeats.

        Rank 0 considers a rank frozen only after it has received a first heartbeat from it. Must be
        called in the event loop.
        """
        loop = asyncio.get_running_loop()
        if isinstance(self._log, StepLogWriter):
            self._lines = self._log.descriptors()
            for rank, line in enumerate(self._lines, 1):
                loop.add_reader(line, partial(self._hear, self._log, rank))
        self._look()
        self._looking = loop.create_task(self._look_on())

    def close(self) -> None:
        """Stop checking, before the connections are closed. May be called again."""
        loop = asyncio.get_running_loop()
        while self._lines:
            loop.remove_reader(self._lines.pop())
        if self._looking is not None:
            self._looking.cancel()

    def _hear(self, log: StepLogWriter, rank: int) -> None:
        if log.read_beats(rank):
            self._beats[rank] = self._now
        else:
            self._end(f"rank {rank} is gone")

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look()

    def _look(self) -> None:
        self._now = self._time.update(asyncio.get_running_loop().time())
        if isinstance(self._log, StepLogReader):
            self._log.beat()
            self._miss_rank_0(self._log)
        if (cause := self._watchdog.overdue(self._now)) is not None:
            self._end(cause)
        for rank, beat in self._beats.items():
            if self._now - beat > _SILENCE_S:
                self._end(f"rank {rank} was silent for more than {_SILENCE_S:g} s")

    def _miss_rank_0(self, log: StepLogReader) -> None:
        if not log.is_cut_off():
            return
        if self._cut_off_at is None:
            self._cut_off_at = self._now
        if self._now - self._cut_off_at >= _PARTING_S:
            self._end("rank 0 is gone")
