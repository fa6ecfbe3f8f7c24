"""Whether explanations add up, for bench-explain: requests of all kinds through one router, in one
process.

Two fake workers with few slots, of which one is killed in the middle; requests of several lengths,
classes and numbers of choices, some ended by a stop string. Each is timed in the router's own
process, every other one by who asks for it there, from the call to the last piece, and the others,
which come over HTTP and are streamed, where the router hears of them and writes to them (rim.py).
The spans are summed: as the router tells them, and as the ledger does, which is told with the next
beats of what came after a request's end.

worst_sum_error        the largest difference, as a part of the request's time
worst_kept_sum_error   the same of the ledger's
worst_of_allowed       the larger one, as a part of 1 ms or 1 % of the time, whichever is more

Beside these stands how much CPU time a router spends a token on what explanations need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from benchmarks.explain_account import Measured, Meter
from everlift.v1 import inference_pb2 as pb
from router.api.service import IDEMPOTENCY_KEY
from router.auth.caller import ANYONE
from router.event_loop import now
from router.requests.attempts import RunningRequests
from router.requests.explanation import stored_explanation
from router.requests.request import LiveRequest
from router.requests.timing import Journal, UnreadTime
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster
from tests.support.router.fronts import COMPLETIONS
from tests.support.router.http_client import JSON, ask
from tests.support.router.rim import Rim
from worker.config import FakeModel

_WORKER = replace(WORKER, max_num_seqs=8, fake=FakeModel(step_time=0.004))
_RATE = 40.0
_REQUESTS = 200
#: Until the ledger has been told what is to be told.
_BEATS = 4
#: All that is called for explanations alone.
_RECORDING = {
    Journal: (
        "__init__",
        "accepted",
        "dispatched",
        "set_newcomers",
        "breakdown",
        "progress",
        "end_attempt",
        "requeued",
        "readable",
        "ended",
        "delivered",
    ),
    UnreadTime: ("__init__", "mark_unread", "mark_caught_up"),
    LiveRequest: ("_mark_all_unread", "packed_explanation"),
    RunningRequests: ("neighbours", "occupants", "newcomers"),
}


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of one request, in seconds: by a stopwatch, as its router told it, and as the ledger did; and
    how many tokens it has."""

    wall_s: float
    told_s: float
    tokens: int
    kept_s: float

    @property
    def error_s(self) -> float:
        return abs(self.told_s - self.wall_s)

    @property
    def kept_error_s(self) -> float:
        return abs(self.kept_s - self.wall_s)

    @property
    def of_allowed(self) -> float:
        return max(self.error_s, self.kept_error_s) / max(1e-3, 0.01 * self.wall_s)


def measure() -> Measured:
    meter = Meter()
    with _metered(meter), pytest.MonkeyPatch.context() as patch:
        sums = asyncio.run(_measured(_REQUESTS, Rim(patch)))
    return Measured(
        settings={"requests": _REQUESTS, "requests_per_s": _RATE},
        raw={
            "mean_wall_s": sum(it.wall_s for it in sums) / len(sums),
            "worst_error_ms": 1e3 * max(it.error_s for it in sums),
            "worst_kept_error_ms": 1e3 * max(it.kept_error_s for it in sums),
            "output_tokens": sum(it.tokens for it in sums),
            "router_us_a_token": 1e6 * meter.seconds / sum(it.tokens for it in sums),
        },
        ratios={
            "worst_sum_error": max(it.error_s / it.wall_s for it in sums),
            "worst_kept_sum_error": max(it.kept_error_s / it.wall_s for it in sums),
            "worst_of_allowed": max(it.of_allowed for it in sums),
        },
    )


@contextmanager
def _metered(meter: Meter) -> Iterator[None]:
    """CPU time of what is called for explanations, in routers of this process."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, methods in _RECORDING.items():
            for method in methods:
                patch.setattr(owner, method, meter.over(getattr(owner, method)))
        yield


async def _measured(num_requests: int, rim: Rim) -> list[_Sums]:
    dice = Random(0)
    async with cluster(1, 2, replace(ROUTER, max_queued=num_requests), _WORKER) as parts:
        messages = [_message(number, dice) for number in range(num_requests)]
        asked = []
        for number, message in enumerate(messages):
            wall = _over_http(parts, rim, message) if number % 2 else _in_process(parts, message)
            asked.append(asyncio.create_task(_asked(parts, message, wall)))
            await asyncio.sleep(dice.expovariate(_RATE))
            if number == num_requests // 2:
                await parts.kill_worker(parts.workers[0])
        times = await asyncio.gather(*asked)
        await asyncio.sleep(_BEATS * ROUTER.heartbeat)
        return [
            _Sums(*told, await _kept_s(parts, message.request_id))
            for message, told in zip(messages, times, strict=True)
        ]


def _message(number: int, dice: Random) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"r{number}",
        tokens=pb.TokenIds(ids=[dice.randrange(256) for _ in range(dice.randint(1, 200))]),
        max_tokens=dice.randint(1, 120),
        n=dice.choice((1, 1, 1, 3)),
        priority=dice.choice((0, 0, 0, 5)),
        stop=dice.choice(((), (), ("e",))),
    )


async def _asked(
    parts: Cluster, message: pb.GenerateRequest, wall: Coroutine[Any, Any, float]
) -> tuple[float, float, int]:
    """By a stopwatch, and as its router tells it, which has so many tokens of it."""
    wall_s, router = await wall, parts.routers[0]
    told = await router._inference.explain(ANYONE, pb.ExplainRequest(request_id=message.request_id))
    return wall_s, _sum(told), told.output_tokens


async def _kept_s(parts: Cluster, request_id: str) -> float:
    stored = await parts.ledger.read(request_id)
    return _sum(stored_explanation(stored, await parts.ledger.events(request_id)))


async def _over_http(parts: Cluster, rim: Rim, message: pb.GenerateRequest) -> float:
    body = {
        "prompt": [*message.tokens.ids],
        "max_tokens": message.max_tokens,
        "n": message.n,
        "priority": message.priority,
        "stop": [*message.stop],
        "stream": True,
    }
    headers = {**JSON, IDEMPOTENCY_KEY: message.request_id}
    assert (await ask(parts.routers[0].http_address, COMPLETIONS, body, headers)).status == 200
    return rim.seconds[message.request_id]


async def _in_process(parts: Cluster, message: pb.GenerateRequest) -> float:
    began = now()
    opened = await parts.routers[0]._inference.generate(ANYONE, message, {}, Journal(began))
    async with aclosing(opened.pieces) as pieces:  # type: ignore[type-var]
        async for _ in pieces:
            pass
        return now() - began


def _sum(explanation: pb.Explanation) -> float:
    return sum(span.seconds for span in explanation.spans)
