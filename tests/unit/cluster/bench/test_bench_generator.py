"""Load generator in virtual time: send times, and the start of latencies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest

from cluster.bench.endpoint import Answer, Refused, slug
from cluster.bench.generator import Generator
from cluster.bench.load import Request
from cluster.bench.report import CountedBy, Outcome, due_time, e2el, itls, sent_time, tpot, ttft
from tests.simulated_cluster.clock import Clock, VirtualLoop

T = TypeVar("T")


class Steady:
    """Endpoint with fixed latencies and ``slots`` concurrent requests, which records arrivals."""

    def __init__(self, ttft_s: float = 1.0, gap_s: float = 0.1, slots: int = 1000) -> None:
        self._ttft_s, self._gap_s = ttft_s, gap_s
        self._slots = asyncio.Semaphore(slots)
        self.came: list[float] = []
        self.at_once = self.most_at_once = 0

    async def send(self, request: Request, answer: Answer) -> None:
        answer.mark_sent()
        self.came.append(asyncio.get_running_loop().time())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async with self._slots:
                await self._answer(request, answer)
        finally:
            self.at_once -= 1

    async def _answer(self, request: Request, answer: Answer) -> None:
        await asyncio.sleep(self._ttft_s)
        for number in range(request.max_tokens):
            await asyncio.sleep(self._gap_s if number else 0.0)
            answer.add_piece("x", 1)
        answer.set_usage(7, request.max_tokens)


def asks(*due_times: float, tokens: int = 3) -> list[Request]:
    return [Request(at, "p", 5, tokens) for at in due_times]


def in_virtual_time(work: Callable[[VirtualLoop], Awaitable[T]], limit: float = 1000) -> T:
    clock = Clock()
    loop = clock.process("generator")
    try:
        return clock.run(asyncio.ensure_future(work(loop), loop=loop), limit)
    finally:
        clock.close()


def generator(endpoint: object, loop: VirtualLoop, timeout_s: float = 600.0) -> Generator:
    return Generator(endpoint, timeout_s=timeout_s, clock=loop.time)  # type: ignore[arg-type]


def test_open_loop_sends_requests_when_due() -> None:
    async def work(loop: VirtualLoop) -> tuple[list[float], list[Outcome]]:
        server, began = Steady(), loop.time()
        outcomes = await generator(server, loop).open_loop(asks(0.0, 0.5, 0.5, 2.0))
        return [at - began for at in server.came], outcomes

    came, outcomes = in_virtual_time(work)
    assert came == pytest.approx([0.0, 0.5, 0.5, 2.0])
    assert [each.lag_s for each in outcomes] == pytest.approx([0.0] * 4)
    first = outcomes[0]
    assert (ttft(first, due_time), e2el(first, due_time)) == (
        pytest.approx(1.0),
        pytest.approx(1.2),
    )
    assert itls(first) == pytest.approx([0.1, 0.1]) and tpot(first) == pytest.approx(0.1)
    assert (first.prompt_tokens, first.output_tokens) == (7, 3)
    assert first.counted_by is CountedBy.USAGE


def test_open_loop_keeps_its_rate_with_a_slow_server() -> None:
    """A closed loop of one client would have sent ten requests, with a TTFT of 1 s each."""

    async def work(loop: VirtualLoop) -> list[Outcome]:
        due_times = [float(number) / 2 for number in range(20)]
        return await generator(Steady(slots=1), loop).open_loop(asks(*due_times, tokens=1))

    outcomes = in_virtual_time(work)
    assert [ttft(each, due_time) for each in outcomes] == pytest.approx(
        [1.0 + number / 2 for number in range(20)]
    )


def test_open_loop_late_request_counts_from_its_due_time() -> None:
    async def work(loop: VirtualLoop) -> list[Outcome]:
        task = loop.create_task(generator(Steady(), loop).open_loop(asks(1.0, 2.0, 9.0)))
        await asyncio.sleep(0.5)
        loop.freeze(4.0)
        return await task

    late, later, punctual = in_virtual_time(work)
    assert (late.lag_s, later.lag_s) == (pytest.approx(3.5), pytest.approx(2.5))
    assert punctual.lag_s == pytest.approx(0.0)
    assert (ttft(late, due_time), ttft(late, sent_time)) == (pytest.approx(4.5), pytest.approx(1.0))
    assert ttft(punctual, due_time) == pytest.approx(1.0)


def test_open_loop_concurrency_limit_counts_waiting_time() -> None:
    async def work(loop: VirtualLoop) -> tuple[int, list[Outcome]]:
        server = Steady()
        found = await generator(server, loop).open_loop(asks(0.0, 0.0, 0.0, tokens=1), 2)
        return server.most_at_once, found

    most, (first, second, third) = in_virtual_time(work)
    assert most == 2
    assert [each.admitted for each in (first, second, third)] == pytest.approx([0.0, 0.0, 1.0])
    assert third.lag_s == pytest.approx(0.0), "it was not late: there was no room"
    assert (ttft(third, due_time), ttft(third, sent_time)) == (
        pytest.approx(2.0),
        pytest.approx(1.0),
    )


def test_closed_loop_request_is_due_with_a_free_client() -> None:
    async def work(loop: VirtualLoop) -> tuple[int, list[Outcome]]:
        server = Steady()
        requests = asks(0.0, 0.0, 0.0, 0.0, 0.0, tokens=1)
        return server.most_at_once, await generator(server, loop).closed_loop(requests, 2)

    _, outcomes = in_virtual_time(work)
    assert [each.due for each in outcomes] == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0])
    assert [ttft(each, due_time) for each in outcomes] == pytest.approx([1.0] * 5)


class Failing:
    """Endpoint that fails with one of ``causes`` after another; an empty cause succeeds."""

    def __init__(self, *causes: str) -> None:
        self._causes = list(causes)

    async def send(self, request: Request, answer: Answer) -> None:
        answer.mark_sent()
        answer.add_piece("x", 1)
        if cause := self._causes.pop(0):
            raise Refused(cause)


def test_open_loop_records_failures_as_outcomes() -> None:
    async def work(loop: VirtualLoop) -> list[Outcome]:
        return await generator(Failing("429 queue_full", ""), loop).open_loop(asks(0.0, 1.0))

    failed, fine = in_virtual_time(work)
    assert (failed.error, failed.is_complete) == ("429 queue_full", False)
    assert fine.is_complete


def test_generator_answer_fails_after_its_timeout() -> None:
    async def work(loop: VirtualLoop) -> list[Outcome]:
        return await generator(Steady(ttft_s=5.0), loop, timeout_s=2.0).open_loop(asks(0.0))

    (outcome,) = in_virtual_time(work)
    assert (outcome.error, outcome.ended) == ("timeout", pytest.approx(2.0))


def test_generator_answer_without_output_is_an_error() -> None:
    answer = Answer(Request(0.0, "p", 5, 3), lambda: 1.0)
    answer.set_usage(5, 0)
    assert answer.outcome(0.0, 0.0).error == "no_output"


@pytest.mark.parametrize(
    "counts, usage, tokens, by, text",
    [
        ((1, 2), (7, 9), 9, CountedBy.USAGE, ""),
        ((1, 2), None, 3, CountedBy.USAGE, ""),
        ((0, 0), None, 2, CountedBy.PIECES, "ab"),
        ((0, 0), (7, 0), 2, CountedBy.PIECES, "ab"),
    ],
)
def test_answer_tokens_come_from_usage_events_or_pieces(
    counts: Sequence[int], usage: tuple[int, int] | None, tokens: int, by: CountedBy, text: str
) -> None:
    answer = Answer(Request(0.0, "p", 5, 3), lambda: 1.0)
    for piece, number in zip("ab", counts, strict=True):
        answer.add_piece(piece, number)
    if usage is not None:
        answer.set_usage(*usage)
    outcome = answer.outcome(0.0, 0.0)
    assert (outcome.output_tokens, outcome.counted_by, outcome.text) == (tokens, by, text)


def test_slug_keeps_only_an_error_word() -> None:
    assert [slug(word) for word in ("rate_limited", "not_utf8", "BadRequestError")] == [
        "rate_limited",
        "not_utf8",
        "BadRequestError",
    ]
    for said in ("no such key: ev", "sk-1234", "ev_1_4b2c", "a" * 50, 429, None):
        assert slug(said) == ""
