"""Interval of a console's snapshots, which take a part of the router's CPU time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, cast

import pytest

from router.console.console import Console
from tests.simulated_cluster.clock import Clock


class Looked:
    """Cluster whose snapshots take CPU time, cycling through ``cpu_s``, and ``wall_s`` of time."""

    def __init__(self, clock: Clock, cpu_s: Sequence[float], wall_s: float) -> None:
        self._clock = clock
        self._cpu_s = cycle(cpu_s)
        self._wall_s = wall_s
        self.spent_s = 0.0
        self.num_looks = 0
        self.load, self.scaling = None, []

    def update(self, now: float) -> Mapping[str, Any]:
        self.num_looks += 1
        self.spent_s += next(self._cpu_s)
        self._clock.now += self._wall_s
        return {}

    def add_counts(self, counts: object, num_silent: int, now: float) -> None:
        pass


class Alone:
    """Peers of a router that is the only one."""

    async def counts(self) -> tuple[list[Any], int]:
        return [], 0

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("cpu_s", "wall_s", "num_looks"),
    [
        ([0.0], 0.0, 100),
        # Snapshots take at most a fiftieth of a core.
        ([0.1], 0.1, 20),
        # Other processes use the core meanwhile.
        ([0.0], 1.0, 50),
        # A garbage collection in one of ten snapshots changes nothing.
        ([0.0] * 9 + [0.2], 0.0, 100),
    ],
)
def test_console_refresh_rate_is_bounded_by_its_cpu_time(
    cpu_s: list[float], wall_s: float, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, nobody = Clock(), cast("Any", None)
    looked = Looked(clock, cpu_s, wall_s)
    monkeypatch.setattr(time, "thread_time", lambda: looked.spent_s)
    process = clock.process("router")
    console = Console(cast("Any", looked), nobody, nobody, nobody, cast("Any", Alone()))
    running: asyncio.Task[None] = process.create_task(console.run())
    clock.run_for(99.5)
    assert abs(looked.num_looks - num_looks) <= 1
    running.cancel()
    clock.close()
