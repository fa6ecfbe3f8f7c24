"""A stalled event loop is not taken for a silent ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from router import event_loop
from router.ledger.entry import Append, Appended
from router.requests.token_writer import Answered, LedgerAppender
from tests.simulated_cluster.clock import Clock, VirtualLoop

#: Seconds after which an answer is late.
LATE_S = 0.3
#: Tasks that a real answer passes through after it was read.
TASKS = 4


@dataclass
class RemoteLedger:
    """Ledger that answers after ``takes_s`` seconds, even while its caller is stalled."""

    caller: VirtualLoop
    takes_s: float

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        answer: asyncio.Future[list[Appended]] = self.caller.create_future()
        self.caller.call_at(
            self.caller.time() + self.takes_s, answer.set_result, [Appended.OK] * len(appends)
        )
        return await through_tasks(answer)


async def through_tasks(answer: asyncio.Future[Any]) -> Any:
    """Return an answer as a connection does: it passes from task to task."""
    result = await answer
    for _ in range(TASKS):
        await asyncio.sleep(0)
    return result


@dataclass
class Flow:
    """Appender in its own simulated process, and the times of its reports."""

    takes_s: float
    clock: Clock = field(default_factory=Clock)
    away: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = self.clock.process("router")
        ledger = RemoteLedger(self.process, self.takes_s)
        self.appender = LedgerAppender(ledger, self.answered, self.is_away)  # type: ignore[arg-type]
        self.process.create_task(self.appender.run())

    def answered(self, answered: Sequence[Answered]) -> None:
        self.answers.append(self.clock.elapsed)

    def is_away(self, live: object, append: Append) -> None:
        self.away.append(self.clock.elapsed)

    def put(self) -> None:
        self.process.call_soon(self.appender.add, "r", Append("r", 1, 0, (7,)))

    def run(self, stalls_s: Sequence[tuple[float, float]] = (), seconds: float = 2.0) -> None:
        """Run one append with stalls, each given as the seconds before it and its duration."""
        self.put()
        for after_s, lasts_s in stalls_s:
            self.clock.run_for(after_s)
            self.process.freeze(lasts_s)
            self.clock.run_for(lasts_s)
            seconds -= after_s + lasts_s
        self.clock.run_for(seconds)
        self.clock.close()


@pytest.mark.parametrize(
    "stalls_s",
    [
        [(0.01, 0.31)],
        [(0.01, 0.6)],
        [(0.0, 1.5)],
        # The process gets little CPU time: every interval of the wait ends late.
        [(0.01, 0.12)] * 9,
    ],
)
def test_stalled_process_does_not_report_the_ledger_away(
    stalls_s: list[tuple[float, float]],
) -> None:
    flow = Flow(takes_s=0.02)
    flow.run(stalls_s)
    assert not flow.away
    assert len(flow.answers) == 1


def test_silent_ledger_is_away_after_the_answer_timeout() -> None:
    flow = Flow(takes_s=9.0)
    flow.run()
    assert flow.away and flow.away[0] == pytest.approx(LATE_S, abs=0.01)
    assert not flow.answers


def test_silent_ledger_is_away_after_an_earlier_stall() -> None:
    flow = Flow(takes_s=9.0)
    flow.run([(0.1, 0.5)])
    assert flow.away and flow.away[0] == pytest.approx(0.5 + LATE_S, abs=0.06)


def test_slow_ledger_is_away_until_it_answers() -> None:
    flow = Flow(takes_s=0.7)
    flow.run()
    assert [round(at, 2) for at in flow.away] == [0.3, 0.6]
    assert len(flow.answers) == 1


def expired_after(takes_s: float, stall: tuple[float, float]) -> tuple[bool, float]:
    """Return whether a call with a limit of a second expires, and when it ends."""
    clock = Clock()
    process = clock.process("router")

    async def call() -> tuple[bool, float]:
        answer = process.create_future()
        process.call_at(process.time() + takes_s, answer.set_result, None)
        try:
            async with asyncio.timeout(None) as limit:
                expiry = event_loop.Expiry(limit, 1.0)
                try:
                    await through_tasks(answer)
                finally:
                    expiry.cancel()
        except TimeoutError:
            return True, clock.elapsed
        return False, clock.elapsed

    task = process.create_task(call())
    clock.run_for(stall[0])
    process.freeze(stall[1])
    expired, at = clock.run(task, 10.0)
    clock.close()
    return expired, round(at, 2)


def test_call_expires_in_time_without_a_stall() -> None:
    assert expired_after(5.0, (0.0, 0.0)) == (True, 1.0)
    assert expired_after(0.5, (0.0, 0.0)) == (False, 0.5)


def test_call_answered_during_a_stall_does_not_expire() -> None:
    assert expired_after(0.5, (0.2, 2.0)) == (False, 2.2)


def test_call_unanswered_after_a_stall_expires() -> None:
    assert expired_after(9.0, (0.2, 2.0)) == (True, 2.45)
