"""A scheduler without a runner, for the tests of what it plans."""

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
    """TOKEN, and another for each draft that is TOKEN. The log probability of the prompt's token at
    p is -p."""
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    right = tuple(takewhile(lambda draft: draft == TOKEN, drafts))
    ends = range(row.start + 1, row.start + 1 + len(row.tokens)) if row.scores_prompt else ()
    scores = tuple(TokenLogprobs(-float(position), 1) for position in ends)
    return RowResult((*right, TOKEN) if row.samples else (), prompt_logprobs=scores)


class Bench:
    """A scheduler with a runner that always draws TOKEN."""

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
        """(slot, start, tokens) of each row of the next step."""
        plan = self.plan()
        self.commit(plan)
        return [(row.slot, row.start, len(row.tokens)) for row in plan.rows]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def is_on_device(self, block_hash: bytes) -> bool:
        return block_hash in self.scheduler._batch._pool._by_hash
