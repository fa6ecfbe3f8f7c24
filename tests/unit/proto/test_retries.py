"""Errors that are retried, and the times of the retries."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from everlift import (
    AsyncClient,
    DeadlineExceeded,
    EverliftError,
    InvalidRequest,
    LedgerFull,
    LedgerUnavailable,
    NoWorker,
    QueueFull,
    QueueTimeout,
    RateLimited,
    RouterStopping,
    Shed,
    UnknownRequest,
    Unreachable,
    wire,
)
from everlift.client.output_reader import OutputReader
from everlift.client.received_output import ReceivedOutput
from everlift.client.retries import Deadline, Retries, RetryBudget
from everlift.testing import Break, FakeRouter, FakeTransport, Hold, Refuse
from everlift.testing.router import Context
from everlift.v1 import chaos_pb2
from everlift.v1 import inference_pb2 as pb
from tests.simulated_cluster.clock import Clock


def retries(unavailable_s: float = 30.0, refused_s: float = 10.0, jitter: float = 0.0) -> Retries:
    return Retries(unavailable_s, refused_s, lambda: jitter)


def test_retries_apply_only_to_temporary_errors() -> None:
    for passing in (
        Unreachable(),
        RouterStopping(),
        LedgerUnavailable(),
        QueueFull(),
        LedgerFull(),
    ):
        assert retries().delay(passing, 0.0) == 0.025
    for final in (NoWorker(), InvalidRequest(), UnknownRequest(), DeadlineExceeded()):
        assert retries().delay(final, 0.0) is None


@pytest.mark.parametrize(("jitter", "delay"), [(0.0, 2.0), (0.5, 2.25), (1.0, 2.5)])
def test_retry_delay_is_at_least_retry_after_plus_jitter(jitter: float, delay: float) -> None:
    assert retries(jitter=jitter).delay(RateLimited(retry_after_s=2.0), 0.0) == delay


def test_retry_delay_beyond_budget_is_not_started() -> None:
    assert retries(refused_s=1.9).delay(RateLimited(retry_after_s=2.0), 0.0) is None
    assert retries(refused_s=2.1).delay(RateLimited(retry_after_s=2.0), 0.0) == 2.0


def test_retries_without_budget_are_disabled() -> None:
    off = retries(unavailable_s=0.0, refused_s=0.0)
    assert off.delay(QueueFull(), 0.0) is None
    assert off.delay(Unreachable(), 0.0) is None


def test_retry_budget_may_be_infinite() -> None:
    endless, now = retries(refused_s=math.inf), 0.0
    for _ in range(1000):
        delay = endless.delay(QueueFull(retry_after_s=100.0), now)
        assert delay is not None
        now += delay


def test_retry_budgets_are_separate_and_renewed_by_success() -> None:
    both = retries(unavailable_s=1.0, refused_s=1.0)
    assert both.delay(QueueFull(), 0.0) is not None
    assert both.delay(Unreachable(), 1.5) is not None
    assert both.delay(QueueFull(), 1.5) is None
    both.report_success()
    assert both.delay(QueueFull(), 1.5) is not None


def test_deadline_starts_at_first_use() -> None:
    deadline = Deadline(5.0)
    assert not deadline.passes_before(1e9)
    assert deadline.remaining(100.0) == 5.0
    assert (deadline.remaining(103.0), deadline.remaining(106.0)) == (2.0, 0.0)
    assert deadline.passes_before(105.1)
    assert not deadline.passes_before(105.0)
    never = Deadline(None)
    assert never.remaining(0.0) is None
    assert not never.passes_before(1e9)


SOON = 0.01


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in virtual time, because a busy machine may delay a last attempt."""

    @functools.wraps(test)
    def run() -> None:
        clock = Clock()
        clock.run(asyncio.ensure_future(test(), loop=clock.process("client")), limit=60)
        clock.close()

    return run


@in_virtual_time
async def test_refused_submission_is_retried_under_its_id() -> None:
    refusals = [Refuse(each(retry_after_s=SOON)) for each in (QueueFull, RateLimited, LedgerFull)]
    transport = FakeTransport(faults=refusals)
    async with AsyncClient("fake", transport=transport) as client:
        assert await client.generate("a b", request_id="r").text() == "a b"
    assert transport.router.calls == ["Generate"] * 4
    assert list(transport.router.requests) == ["r"]


class Crowded(FakeRouter):
    """Router that accepts each request and then, after ``wait_s`` seconds, raises the next refusal.

    After the last of the ``refusals`` it serves normally.
    """

    def __init__(self, transport: FakeTransport, *refusals: EverliftError, wait_s: float) -> None:
        super().__init__(transport=transport)
        self._refusals = deque(refusals)
        self._wait_s = wait_s

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        if not self._refusals:
            async for piece in super().Generate(request, context):
                yield piece
            return
        self.calls.append("Generate")
        yield pb.GenerateResponse(request_id=request.request_id)
        await asyncio.sleep(self._wait_s)
        await wire.abort(context, self._refusals.popleft())


def crowded(*refusals: EverliftError, wait_s: float = 0.0) -> FakeTransport:
    transport = FakeTransport()
    transport.router = Crowded(transport, *refusals, wait_s=wait_s)
    transport.router.listen()
    return transport


@in_virtual_time
async def test_submission_refused_in_queue_is_retried_under_its_id() -> None:
    transport = crowded(Shed(retry_after_s=SOON), QueueTimeout(retry_after_s=SOON), wait_s=0.1)
    async with AsyncClient("fake", transport=transport) as client:
        assert await client.generate("a b", request_id="r").text() == "a b"
    assert transport.router.calls == ["Generate"] * 3


@in_virtual_time
async def test_retry_budget_is_not_renewed_by_slow_refusal() -> None:
    transport = crowded(*[QueueTimeout(retry_after_s=SOON)] * 9, wait_s=3.0)
    async with AsyncClient("fake", transport=transport) as client:
        with pytest.raises(QueueTimeout):
            await client.generate("a b").text()
    assert transport.router.calls == ["Generate"] * 5


@in_virtual_time
async def test_attached_reader_does_not_resubmit() -> None:
    async with AsyncClient("fake", transport=FakeTransport()) as client:
        reception = ReceivedOutput("r")
        reader = OutputReader(client._routers, reception, client._budget(Deadline(None)))
        reception.accept(pb.GenerateResponse(request_id="r"))
        with pytest.raises(Shed):
            await reader.recover(Shed())
        assert reader.is_closed


@in_virtual_time
async def test_refusal_after_tokens_is_final() -> None:
    transport = FakeTransport(faults=[Break(1), Refuse(Shed())])
    async with AsyncClient("fake", transport=transport) as client:
        stream = client.generate("a b")
        assert (await anext(stream)).text == "a"
        with pytest.raises(Shed):
            await stream.text()
    assert transport.router.calls == ["Generate", "Attach 1"]


@in_virtual_time
async def test_submission_retry_waits_for_retry_after() -> None:
    transport = FakeTransport(faults=[Refuse(QueueFull(retry_after_s=0.2))])
    async with AsyncClient("fake", transport=transport) as client:
        began = asyncio.get_running_loop().time()
        await client.generate("a").text()
        assert asyncio.get_running_loop().time() - began >= 0.2


@in_virtual_time
async def test_retries_can_be_disabled() -> None:
    transport = FakeTransport(faults=[Refuse(QueueFull()), Refuse(RouterStopping(), "GetStatus")])
    async with AsyncClient("fake", transport=transport, retry_s=0) as client:
        with pytest.raises(QueueFull):
            await client.generate("a").text()
        with pytest.raises(RouterStopping):
            await client.status()
    assert transport.router.calls == ["Generate", "GetStatus"]


@in_virtual_time
async def test_unary_call_retries_temporary_errors() -> None:
    transport = FakeTransport(
        faults=[
            Refuse(LedgerUnavailable(), "Cancel"),
            Refuse(RateLimited(retry_after_s=SOON), "Cancel"),
            Refuse(UnknownRequest("never seen"), "Cancel"),
        ]
    )
    async with AsyncClient("fake", transport=transport) as client:
        with pytest.raises(UnknownRequest, match="never seen"):
            await client.cancel("r")
    assert transport.router.calls == ["Cancel"] * 3


@in_virtual_time
async def test_fault_injection_is_not_retried() -> None:
    transport = FakeTransport(faults=[Refuse(RouterStopping(), "Inject")])
    async with AsyncClient("fake", transport=transport) as client:
        with pytest.raises(RouterStopping):
            await client.inject(chaos_pb2.Fault())
    assert transport.router.calls == ["Inject"]


@in_virtual_time
async def test_unary_call_deadline_covers_all_tries() -> None:
    refusals = [Refuse(RouterStopping(), "GetStatus")] * 100
    async with AsyncClient("fake", transport=FakeTransport(faults=refusals)) as client:
        with pytest.raises(DeadlineExceeded, match="no router answered"):
            await client.status(timeout_s=0.3)
    refusals = [Refuse(QueueFull("no room", retry_after_s=0.1), "GetStatus")] * 100
    async with AsyncClient("fake", transport=FakeTransport(faults=refusals)) as client:
        with pytest.raises(QueueFull, match="no room"):
            await client.status(timeout_s=0.3)


@in_virtual_time
async def test_retry_cut_off_by_deadline_raises_previous_error() -> None:
    cut = DeadlineExceeded("cut off")
    async with AsyncClient("fake", transport=FakeTransport()) as client:
        budget = RetryBudget(client._routers, retries(), Deadline(9.0))
        assert budget.error_at_deadline(cut) is cut
        await budget.wait(RouterStopping(), "fake")
        assert "no router answered" in str(budget.error_at_deadline(cut))
        full = QueueFull("no room")
        await budget.wait(full, "fake")
        assert budget.error_at_deadline(cut) is full


@in_virtual_time
async def test_submission_deadline_covers_all_tries() -> None:
    refusals = [Refuse(QueueFull("no room", retry_after_s=0.1))] * 100
    transport = FakeTransport(faults=refusals)
    async with AsyncClient("fake", transport=transport) as client:
        with pytest.raises(QueueFull, match="no room"):
            await client.generate("a", timeout_s=0.3).text()
    assert transport.router.calls == ["Generate"] * len(transport.router.calls)
    assert 2 <= len(transport.router.calls) <= 4


@in_virtual_time
async def test_submission_retry_sends_remaining_time() -> None:
    transport = FakeTransport(faults=[Refuse(QueueFull(retry_after_s=0.2))])
    async with AsyncClient("fake", transport=transport) as client:
        await client.generate("a", timeout_s=9, request_id="r").text()
    left = transport.router.requests["r"].submission.timeout_s
    assert left is not None and left <= 8.8


@in_virtual_time
async def test_cancelled_call_is_not_retried() -> None:
    transport = FakeTransport(faults=[Hold(0)])
    async with AsyncClient("fake", transport=transport) as client:
        async with client.generate("a", request_id="r") as stream:
            waiting = asyncio.create_task(anext(stream))
            while not transport.router.requests:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    assert transport.router.calls == ["Generate", "Cancel"]
