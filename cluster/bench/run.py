"""Runs of a load against an endpoint: the warm-up, the load itself, or a ramp of rates."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from cluster.bar import bar
from cluster.bench.generator import Generator
from cluster.bench.load import Load, Request
from cluster.bench.report import Outcome, Ramp, RunResult, Slo, Stage, is_load_sustained
from cluster.bench.target import Opened, Target, counted, opened
from cluster.errors import BenchFailed
from everlift.heap import pause_gc

#: Offset of the seed of the warm-up, so that its prompts differ from the measured ones.
_WARM_UP_SEED = 1 << 32
_WARM_UP_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Options for sending a load.

    At most ``concurrency`` requests are in flight (None: no limit), each with a timeout of
    ``timeout_s`` seconds. ``warm_up`` is the number of warm-up requests, to which the limit does
    not apply. ``tokenizer`` counts tokens that the endpoint does not count. ``is_shown`` shows a
    progress bar.
    """

    concurrency: int | None
    warm_up: int
    timeout_s: float
    tokenizer: Any | None
    is_shown: bool


class Run:
    """Sender of loads to a connected endpoint."""

    def __init__(self, found: Opened, send_options: SendOptions) -> None:
        self._found = found
        self._send_options = send_options

    @property
    def model(self) -> str:
        return self._found.model

    async def send(self, load: Load) -> RunResult:
        """Send the load, and return its result when all requests have ended.

        Raises BenchFailed if the load has no requests, and WorkloadFailed if the requests cannot be
        created.
        """
        # pause_gc also moves the requests to the garbage collector's oldest generation; otherwise
        # the collector would traverse all requests repeatedly during the load.
        with pause_gc():
            requests = load.all_requests(self._found.prompts(load.seed))
        if not requests:
            raise BenchFailed("the load has no requests: no arrival is within the given time")
        with bar(_title(load), len(requests), shown=self._send_options.is_shown) as advance:
            cpu, began = time.process_time(), time.perf_counter()
            outcomes = await self._sent(load, requests, advance)
            share = (time.process_time() - cpu) / (time.perf_counter() - began)
        return RunResult(counted(outcomes, self._send_options.tokenizer), share)

    async def climb(self, load: Load, first: float, most: float, slo: Slo) -> list[Stage]:
        """Search for the highest sustained rate from ``first`` to ``most``; return all stages.

        The load is sent once per stage, at the stage's rate. A stage begins when the previous one
        has ended. ``load`` must have a duration. Raises WorkloadFailed, and BenchFailed if there
        are not enough requests for a stage.
        """
        assert load.duration_s is not None
        ramp, stages = Ramp(first, most), list[Stage]()
        while (rate := ramp.next_rate()) is not None:
            result = await self.send(replace(load, rate=rate, seed=load.seed + len(stages)))
            if result.outcomes[-1].due < load.duration_s / 2:
                raise BenchFailed("there are not enough requests for a stage of the ramp")
            is_sustained = is_load_sustained(result.outcomes, load.duration_s, slo)
            stages.append(Stage(rate, result, is_sustained))
            ramp.report(rate, is_sustained)
        return stages

    async def warm_up(self, load: Load) -> None:
        """Send the warm-up requests, if any. Raises BenchFailed if none of them is answered."""
        if not (number := self._send_options.warm_up):
            return
        few = replace(load, requests=number, duration_s=None)
        prompts = self._found.prompts(load.seed + _WARM_UP_SEED)
        generator = Generator(self._found.endpoint, timeout_s=self._send_options.timeout_s)
        requests = few.all_requests(prompts)
        outcomes = await generator.closed_loop(requests, min(number, _WARM_UP_CLIENTS))
        if not any(each.is_complete for each in outcomes):
            raise BenchFailed(f"no warm-up request was answered: {outcomes[0].error}")

    async def _sent(
        self, load: Load, requests: Sequence[Request], advance: Callable[[int], None]
    ) -> list[Outcome]:
        most, timeout_s = self._send_options.concurrency, self._send_options.timeout_s
        generator = Generator(self._found.endpoint, timeout_s=timeout_s, advance=advance)
        if most is not None and not load.has_arrival_times:
            return await generator.closed_loop(requests, most)
        return await generator.open_loop(requests, most)


@asynccontextmanager
async def ready(target: Target, load: Load, send_options: SendOptions) -> AsyncIterator[Run]:
    """Context manager: connect to the target, send the warm-up, and yield a sender of loads.

    Raises BenchFailed if the target or the warm-up fails, WorkloadFailed if the requests cannot be
    created, and EverliftError or SettingsError if a cluster cannot be connected.
    """
    async with opened(target, send_options.tokenizer) as found:
        run = Run(found, send_options)
        await run.warm_up(load)
        yield run


def _title(load: Load) -> str:
    return "load" if load.rate in (None, inf) else f"{load.rate:.4g} requests/s"
