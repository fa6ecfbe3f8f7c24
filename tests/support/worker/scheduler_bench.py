"""Scheduler without a runner, for tests of its plans."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from everlift.sampling import TokenLogprobs
from tests.support.worker.worker_support import prompt, sequence
from worker.engine.limits import Limits
from worker.engine.outcome import Outcome
from worker.engine.plan import Plan, Row, RowResult
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence

TOKEN = 5


def result(row: Row) -> RowResult:
    """Return TOKEN, and one more for each accepted draft, which is one that equals TOKEN.

    The log probability of the prompt's token at position p is -p.
    """
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    right = tuple(takewhile(lambda draft: draft == TOKEN, drafts))
    ends = range(row.start + 1, row.start + 1 + len(row.tokens)) if row.scores_prompt else ()
    scores = tuple(TokenLogprobs(-float(position), 1) for position in ends)
    return RowResult((*right, TOKEN) if row.samples else (), prompt_logprobs=scores)


class Bench:
    """Scheduler with a runner that always samples TOKEN."""

    def __init__(self, bounds: Limits) -> None:
        self.limits = bounds
        self.scheduler = Scheduler(bounds)

    def add(
        self, epoch: int, length: int, max_tokens: int = 50, first: int = 1, **fields: Any
    ) -> Sequence:
        tokens = prompt(length, first)
        this = sequence(self.limits, epoch, tokens, max_tokens=max_tokens, **fields)
        self.scheduler.add(this)
        return this

    def plan(self, now: float = 0.0) -> Plan:
        return self.scheduler.schedule(now=now)

    def commit(self, plan: Plan) -> list[Outcome]:
        outcomes = self.scheduler.commit(plan, [result(row) for row in plan.rows])
        self.scheduler.check_integrity()
        return outcomes

    def step(self) -> list[tuple[int, int, int]]:
        """Run the next step; return (slot, start, number of tokens) of each row."""
        plan = self.plan()
        self.commit(plan)
        return [(row.slot, row.start, len(row.tokens)) for row in plan.rows]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def is_on_device(self, block_hash: bytes) -> bool:
        return block_hash in self.scheduler._batch._pool._by_hash
