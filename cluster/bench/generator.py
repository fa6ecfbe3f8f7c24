"""Generator of a load: each request is sent when it is due, even if earlier ones have not ended.

        due -------- admitted -- sent ---- first piece ... last piece
         |  at limit    |   lag   |
         +--- latency counts from here

A generator that waits for answers sends fewer requests to a slow server, and does not measure how
long other clients would have waited (coordinated omission). This generator therefore does not wait
for answers. A request may be sent late, because this process is busy or the limit of concurrent
requests is reached, but its latency still counts from its due time.

In a closed loop there are no arrival times: a request is due as soon as its client is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from cluster.bench.endpoint import Answer, Endpoint, Refused
from cluster.bench.load import Request
from cluster.bench.report import Outcome

#: Default number of seconds after which an incomplete answer counts as failed.
TIMEOUT_S = 600.0


class Generator:
    """Sender of a load's requests to an endpoint; ``clock`` returns seconds.

    ``advance`` is called at the end of each request with its number of output tokens.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.perf_counter,
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._clock = clock
        self._advance = advance
        self._started_at = clock()

    async def open_loop(
        self, requests: Sequence[Request], max_concurrency: int | None = None
    ) -> list[Outcome]:
        """Send each request when it is due, at most ``max_concurrency`` at a time (None: no limit).

        When all requests have ended, return their measured times and sizes (see Outcome), in the
        order of ``requests``.
        """
        semaphore = asyncio.Semaphore(max_concurrency or len(requests) or 1)

        async def send_when_admitted(request: Request) -> Outcome:
            is_full = semaphore.locked()
            async with semaphore:
                admitted = self._now() if is_full else request.due
                return await self._send(request, request.due, admitted)

        self._started_at = self._clock()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await self._until(request.due)
                tasks.append(group.create_task(send_when_admitted(request)))
        return [task.result() for task in tasks]

    async def closed_loop(self, requests: Sequence[Request], clients: int) -> list[Outcome]:
        """Send the requests from ``clients`` clients, each of which sends its requests one by one.

        The due times of the requests are ignored. When all requests have ended, return their
        measured times and sizes (see Outcome), in the order of ``requests``.
        """
        remaining = iter(enumerate(requests))
        outcomes: dict[int, Outcome] = {}

        async def client() -> None:
            for number, request in remaining:
                now = self._now()
                outcomes[number] = await self._send(request, now, now)

        self._started_at = self._clock()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return [outcomes[number] for number in range(len(requests))]

    async def _until(self, due: float) -> None:
        """Sleep until ``due``, in seconds since the load began.

        Other tasks of the event loop run at least once, even if ``due`` has passed. Otherwise, many
        requests that are due at once would delay the processing of answers.
        """
        await asyncio.sleep(due - self._now())
        # A timer may fire a fraction of a millisecond early.
        while (early := due - self._now()) > 0:
            await asyncio.sleep(early)

    async def _send(self, request: Request, due: float, admitted: float) -> Outcome:
        answer, error = Answer(request, self._now), ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._endpoint.send(request, answer)
        except Refused as refused:
            error = str(refused)
        except TimeoutError:
            error = "timeout"
        outcome = answer.outcome(due, admitted, error)
        self._advance(outcome.output_tokens)
        return outcome

    def _now(self) -> float:
        """Return the seconds since the load began."""
        return self._clock() - self._started_at
