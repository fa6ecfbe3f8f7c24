"""Room that is promised to requests which moved: how much more they may grow where they are. Pure.

Nobody knows how long an output becomes. One that moved was promised ``tokens`` beside those it had,
and needs fewer of them with every step of its worker:

    left    tokens - choices * (seconds since it moved) / (seconds of a step)

A promise ends when nothing is left of it, or with the stay at that worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from router.admission.running import Running, RunningTable
from router.admission.workers import WorkerView, blocks_for

#: Who is on the way for longer is not waited for.
_ON_THE_WAY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Promise:
    worker_id: str
    tokens: int
    choices: int
    since: float


class Growth:
    """``running`` says who is where. ``now`` is in seconds."""

    def __init__(self, running: RunningTable) -> None:
        self._running = running
        #: by request id
        self._promises: dict[str, _Promise] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def promise(self, running: Running, worker_id: str, tokens: int, now: float) -> None:
        """In place of what it was promised where it is now."""
        self._promises[running.request_id] = _Promise(worker_id, tokens, running.choices, now)

    def blocks(self, workers: Mapping[str, WorkerView], now: float) -> Mapping[str, int]:
        """By worker. O(promises)."""
        blocks: Counter[str] = Counter()
        for promise in self._promises.values():
            blocks[promise.worker_id] += blocks_for(_left(promise, workers, now))
        return blocks

    def forget(self, workers: Mapping[str, WorkerView], now: float) -> None:
        """What is kept, or needs to be kept no more."""
        self._promises = {
            request_id: promise
            for request_id, promise in self._promises.items()
            if self._stays(request_id, promise, now) and _left(promise, workers, now) > 0
        }

    def _stays(self, request_id: str, promise: _Promise, now: float) -> bool:
        running = self._running.get(request_id)
        is_there = running is not None and running.worker_id == promise.worker_id
        return is_there or now - promise.since < _ON_THE_WAY_S


def _left(promise: _Promise, workers: Mapping[str, WorkerView], now: float) -> int:
    worker = workers.get(promise.worker_id)
    if worker is None:
        return 0
    step_s = worker.pace.step_s
    steps = (now - promise.since) / step_s if step_s else 0.0
    return max(0, round(promise.tokens - promise.choices * steps))
