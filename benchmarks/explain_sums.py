"""Accuracy of request explanations, for bench-explain: sums of spans against measured times.

A router and two fake workers with few slots run in one process, and one worker is killed in the
middle. Requests have several lengths, classes and numbers of choices; some end by a stop string.
Each request is timed in this process. Every other one is streamed over HTTP, and timed where the
router receives the request and writes the response (rim.py); the others are direct calls, timed
from the call to the last piece. The spans of a request are summed twice: as its router explains it,
and as stored in the ledger, where the last ones arrive with the heartbeats after the request's end.

worst_sum_error        largest relative difference between the router's spans and the measured time
worst_kept_sum_error   the same for the spans in the ledger
worst_of_allowed       largest of both differences, divided by the larger of 1 ms and 1 % of time

The raw figures include the router's CPU time for explanations per output token.
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
#: Heartbeats after which the ledger has all spans.
_BEATS = 4
#: Methods that are called only for explanations.
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
class _SpanSum:
    """Seconds of a request: measured, sum of the router's spans, and sum of the ledger's.

    ``tokens`` is its number of output tokens.
    """

    wall_s: float
    reported_s: float
    tokens: int
    stored_s: float

    @property
    def error_s(self) -> float:
        return abs(self.reported_s - self.wall_s)

    @property
    def stored_error_s(self) -> float:
        return abs(self.stored_s - self.wall_s)

    @property
    def of_allowed(self) -> float:
        return max(self.error_s, self.stored_error_s) / max(1e-3, 0.01 * self.wall_s)


def measure() -> Measured:
    meter = Meter()
    with _meter_recording(meter), pytest.MonkeyPatch.context() as patch:
        sums = asyncio.run(_run_requests(_REQUESTS, Rim(patch)))
    return Measured(
        settings={"requests": _REQUESTS, "requests_per_s": _RATE},
        raw={
            "mean_wall_s": sum(it.wall_s for it in sums) / len(sums),
            "worst_error_ms": 1e3 * max(it.error_s for it in sums),
            "worst_kept_error_ms": 1e3 * max(it.stored_error_s for it in sums),
            "output_tokens": sum(it.tokens for it in sums),
            "router_us_a_token": 1e6 * meter.seconds / sum(it.tokens for it in sums),
        },
        ratios={
            "worst_sum_error": max(it.error_s / it.wall_s for it in sums),
            "worst_kept_sum_error": max(it.stored_error_s / it.wall_s for it in sums),
            "worst_of_allowed": max(it.of_allowed for it in sums),
        },
    )


@contextmanager
def _meter_recording(meter: Meter) -> Iterator[None]:
    """Meter the methods that are called only for explanations, in routers of this process."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, methods in _RECORDING.items():
            for method in methods:
                patch.setattr(owner, method, meter.over(getattr(owner, method)))
        yield


async def _run_requests(num_requests: int, rim: Rim) -> list[_SpanSum]:
    dice = Random(0)
    async with cluster(1, 2, replace(ROUTER, max_queued=num_requests), _WORKER) as parts:
        messages = [_message(number, dice) for number in range(num_requests)]
        asked = []
        for number, message in enumerate(messages):
            wall = _over_http(parts, rim, message) if number % 2 else _in_process(parts, message)
            asked.append(asyncio.create_task(_measure_request(parts, message, wall)))
            await asyncio.sleep(dice.expovariate(_RATE))
            if number == num_requests // 2:
                await parts.kill_worker(parts.workers[0])
        times = await asyncio.gather(*asked)
        await asyncio.sleep(_BEATS * ROUTER.heartbeat)
        return [
            _SpanSum(*explained, await _stored_s(parts, message.request_id))
            for message, explained in zip(messages, times, strict=True)
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


async def _measure_request(
    parts: Cluster, message: pb.GenerateRequest, wall: Coroutine[Any, Any, float]
) -> tuple[float, float, int]:
    """Return the measured seconds, the sum of the router's spans, and the output tokens."""
    wall_s, router = await wall, parts.routers[0]
    explained = await router._inference.explain(
        ANYONE, pb.ExplainRequest(request_id=message.request_id)
    )
    return wall_s, _sum(explained), explained.output_tokens


async def _stored_s(parts: Cluster, request_id: str) -> float:
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
