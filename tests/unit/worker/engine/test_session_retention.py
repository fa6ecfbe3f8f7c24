"""Retention of a session's KV blocks by the engine between turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from everlift.errors import EngineFailed
from everlift.v1 import session_pb2
from tests.support.worker.scheduler_bench import Bench
from tests.support.worker.worker_support import engine, limits, prompt, run, sequence
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, Stop
from worker.engine.plan import RowResult
from worker.serving.inbox import Inbox, Orders
from worker.serving.loop import LeadingLoop, follow

#: Blocks of 32 tokens; the first tokens of the prompts differ.
FIRST, SECOND = prompt(96, 100), prompt(96, 200)


def bounds(num_blocks: int = 12, **fields: Any) -> Limits:
    defaults = {
        "max_num_batched_tokens": 200,
        "watermark_blocks": 0,
        "session_retention_s": 10.0,
        "max_retained_blocks": num_blocks,
    }
    return limits(num_blocks, **{**defaults, **fields})


def turn(this: Engine, epoch: int, tokens: Iterable[int], **fields: Any) -> None:
    this.add(sequence(this.limits, epoch, tokens, **{"max_tokens": 2, **fields}))
    run(this)


def num_hits(this: Engine, tokens: list[int]) -> int:
    """Return how many blocks of a prompt are in the prefix cache."""
    return len(this._scheduler._batch.prefix_hits(sequence(this.limits, 99, [*tokens, 1])))


def test_session_survives_what_evicts_others() -> None:
    this = engine(bounds())
    turn(this, 1, FIRST, session=1)
    turn(this, 2, SECOND)
    for epoch in range(3, 6):
        turn(this, epoch, prompt(96, 100 * epoch + 100))
    assert num_hits(this, FIRST) == 3
    assert num_hits(this, SECOND) == 0


def test_retained_blocks_are_used_before_a_preemption() -> None:
    bench = Bench(bounds(8))
    for epoch, first in ((1, 100), (2, 200)):
        bench.add(epoch, 65, max_tokens=1, first=first, session=epoch)
        bench.step()
    batch = bench.scheduler._batch
    assert (batch.num_blocks_free, batch._pool._free.num_retained) == (8, 4)
    running = [bench.add(epoch, 97, 40, 100 * epoch) for epoch in (3, 4)]
    bench.steps(2)
    assert bench.scheduler.load().blocks_used == 8
    assert batch._pool._free.num_retained == 0
    assert bench.scheduler.load().preemptions == 0
    bench.steps(40)
    assert bench.scheduler.load().preemptions == 1, "only when the batch itself lacks blocks"
    assert all(it.num_output for it in running)


@pytest.mark.parametrize("seconds", [9.0, 10.0])
def test_retention_ends_with_the_time_of_steps(seconds: float) -> None:
    this = engine(bounds())
    this.add(sequence(this.limits, 1, FIRST, max_tokens=1, session=1))
    this.step(now=100.0)
    for epoch in range(2, 6):
        this.add(sequence(this.limits, epoch, prompt(96, 100 * epoch), max_tokens=1))
        this.step(now=100.0 + seconds)
    assert num_hits(this, FIRST) == (3 if seconds < 10 else 0)


def test_stop_string_ends_a_turn_that_is_retained() -> None:
    this = engine(bounds())
    for epoch in (1, 2):
        tokens = FIRST if epoch == 1 else SECOND
        this.add(sequence(this.limits, epoch, tokens, max_tokens=99, session=epoch))
    this.step()
    this.abort(Abort(1, (0,)))
    this.abort(Abort(2))
    assert this._scheduler._batch._pool._free.num_retained == 3
    for epoch in range(3, 7):
        turn(this, epoch, prompt(96, 100 * epoch))
    assert (num_hits(this, FIRST), num_hits(this, SECOND)) == (3, 0)


def test_failed_sequence_retains_nothing() -> None:
    bench = Bench(bounds())
    bench.add(1, 96, session=1)
    plan = bench.plan()
    (outcome,) = bench.scheduler.commit(plan, [RowResult(error=EngineFailed("in this row"))])
    assert outcome.stop is Stop.FAILED
    assert bench.scheduler._batch._pool._free.num_retained == 0


def test_preempted_sequence_retains_nothing() -> None:
    bench = Bench(bounds())
    this = bench.add(1, 96, session=1)
    bench.step()
    bench.scheduler.preempt(this)
    assert bench.scheduler._batch._pool._free.num_retained == 0


def test_next_turn_is_a_hit_and_extends_what_is_retained() -> None:
    this = engine(bounds())
    turn(this, 1, FIRST, session=1)
    turn(this, 2, [*FIRST, *prompt(64, 7)], session=1)
    load = this.load()
    assert load.counters.prefix_hit_tokens == 96
    assert this._scheduler._batch._pool._free.num_retained == 5
    assert (load.blocks_used, load.blocks_cached) == (0, 5)


class Log:
    """Step log that keeps its entries as other ranks would receive them."""

    def __init__(self) -> None:
        self.entries: list[session_pb2.StepLog] = []

    def write(self, entry: session_pb2.StepLog) -> None:
        self.entries.append(session_pb2.StepLog.FromString(entry.SerializeToString()))


def test_ranks_end_retention_at_the_same_step() -> None:
    leader, other, log, now = engine(bounds()), engine(bounds()), Log(), [100.0]
    loop = LeadingLoop(leader, Inbox(), lambda report: None, log, lambda: now[0])
    for epoch, seconds in enumerate((0.0, 4.0, 7.0), 1):
        now[0] = 100.0 + seconds
        tokens = prompt(70, 100 * epoch)
        start = sequence(leader.limits, epoch, tokens, max_tokens=1, session=epoch)
        loop.run_iteration(Orders(starts=[start]))
    pools = [it._scheduler._batch._pool for it in (leader, other)]
    assert pools[0]._free.num_retained == 6
    now[0] = 112.0
    loop.run_iteration(Orders())
    assert pools[0]._free.num_retained == 4, "the first session's time is over"
    follow(other, log.entries)
    assert pools[1]._free.num_retained == 4
    assert [*pools[0]._free] == [*pools[1]._free]
