"""Bound of router/admission/README.md on the service of others while a tenant's request waits.

Tenants come and go. Running requests receive a token per step, and may be queued again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from everlift.request_id import qualify, tenant_of
from everlift.v1 import session_pb2 as pb
from router.admission.fair_share import FairShare
from router.admission.policy import (
    Fifo,
    HighestResponseRatio,
    LeastAttained,
    Policy,
    ShortestWork,
)
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey, Waiting

PROMPT, OUTPUT = 1.0, 2.0
#: Most tokens of concurrently running requests, and their highest cost.
CAPACITY = 40
BOUND = OUTPUT * CAPACITY
#: Tenants of the same weight, and one of a higher weight.
TENANTS, HEAVY = ("a", "b", "c"), "heavy"

#: Habit of a tenant for some steps: probability of a request per step, and longest prompt and
#: output in tokens. The lengths are independent, because otherwise a share that is fair by prompts
#: would be fair by outputs too.
LENGTHS = st.integers(1, CAPACITY // 2)
HABIT = st.tuples(st.sampled_from([0.0, 0.1, 0.9]), LENGTHS, LENGTHS)
TIMES = st.lists(st.tuples(HABIT, HABIT, HABIT, HABIT), min_size=1, max_size=8)
_STEPS = 12

Habit: TypeAlias = tuple[float, int, int]


@dataclass(frozen=True)
class Running:
    waiting: Waiting
    left: int

    @property
    def tokens(self) -> int:
        """Number of tokens at its end."""
        return self.waiting.prefill_tokens + self.waiting.max_tokens


class Life:
    """Random life of a queue with fair share.

    ``beside`` and ``others`` have the additional service that another tenant of the same weight
    received while a request was queued. ``beside`` only has tenants with queued requests all that
    time.
    """

    def __init__(self, policy: Policy, dice: random.Random) -> None:
        self._share = FairShare(PROMPT, OUTPUT, lambda tenant: 3.0 if tenant == HEAVY else 1.0)
        self._share.handover_ended()
        self._queue = AdmissionQueue(policy, 0.0, self._share, is_fair=True)
        self._dice = dice
        self._served = dict.fromkeys((*TENANTS, HEAVY), 0.0)
        self._running: list[Running] = []
        #: by queued request: when it was queued, and the service of tenants until then
        self._here: dict[str, tuple[int, dict[str, float]]] = {}
        #: by tenant with queued requests: since when
        self._since: dict[str, int] = {}
        self._moment = 0
        self.beside: list[float] = []
        self.others: list[float] = []

    def live(self, times: list[tuple[Habit, ...]]) -> None:
        for habits in times:
            for _ in range(_STEPS):
                for tenant, (often, *longest) in zip(self._served, habits, strict=True):
                    if self._dice.random() < often:
                        self._come(self._waiting(tenant, *longest))
                self._leave()
                self._run()
        for name in self._here:
            self._judge(name)

    def _waiting(self, tenant: str, longest_prompt: int, longest_output: int) -> Waiting:
        prompt = self._dice.randint(1, longest_prompt)
        output = self._dice.randint(1, longest_output)
        name, total = qualify(tenant, str(self._moment)), prompt + output
        return Waiting(name, "g", self._moment, prompt, output, queue_key=QueueKey(total))

    def _come(self, waiting: Waiting) -> None:
        self._moment += 1
        self._queue.push(waiting)
        self._here[waiting.request_id] = self._moment, dict(self._served)
        self._since.setdefault(tenant_of(waiting.request_id), self._moment)

    def _leave(self) -> None:
        while (head := self._queue.peek(self._moment)) is not None:
            running = Running(head, head.max_tokens)
            if sum(it.tokens for it in self._running) + running.tokens > CAPACITY:
                return
            self._judge(head.request_id)
            self._queue.dispatch(head, 0)
            self._running.append(running)
            self._gone(head)

    def _gone(self, head: Waiting) -> None:
        tenant = tenant_of(head.request_id)
        del self._here[head.request_id]
        if not head.has_run:
            self._served[tenant] += PROMPT * head.prefill_tokens
        if tenant not in self._share.counters(0).waiting:
            del self._since[tenant]

    def _judge(self, name: str) -> None:
        tenant, (came, before) = tenant_of(name), self._here[name]
        served = {it: self._served[it] - before[it] for it in TENANTS}
        for other in served.keys() - {tenant, HEAVY} if tenant != HEAVY else ():
            self.others.append(served[other] - served[tenant])
            if self._since.get(other, inf) <= came:
                self.beside.append(self.others[-1])

    def _run(self) -> None:
        """Run a step, after which a running request may lose its worker."""
        for each in self._running:
            tenant = tenant_of(each.waiting.request_id)
            self._served[tenant] += OUTPUT
            self._share.charge_outputs([pb.ServedTokens(tenant=tenant, tokens=1)])
        self._running = [replace(it, left=it.left - 1) for it in self._running if it.left > 1]
        if self._running and self._dice.random() < 0.1:
            self._come(_again(self._running.pop(self._dice.randrange(len(self._running)))))


def _again(running: Running) -> Waiting:
    known = running.tokens - running.left
    return running.waiting._replace(
        prefill_tokens=known, max_tokens=running.left, accepted=True, has_run=True
    )


@given(
    TIMES,
    st.sampled_from([Fifo(), ShortestWork(1.5), HighestResponseRatio(), LeastAttained(1.5)]),
    st.builds(random.Random, st.integers(0, 2**32)),
)
def test_waiting_tenant_is_passed_by_a_bounded_amount(
    times: list[tuple[Habit, ...]], policy: Policy, dice: random.Random
) -> None:
    life = Life(policy, dice)
    life.live(times)
    assert max(life.beside, default=0.0) <= 2 * BOUND
    assert max(life.others, default=0.0) <= 3 * BOUND


def test_fair_share_is_bounded_for_mixed_request_lengths() -> None:
    """The bound holds at all times; counting prompts or outputs alone would exceed it."""
    half, often = CAPACITY // 2, 0.9
    habits: list[Habit] = [(often, 1, half), (often, half, 1), (often, 9, 9), (often, half, half)]
    for seed in range(10):
        life = Life(Fifo(), random.Random(seed))
        life.live([tuple(habits)] * 25)
        assert len(life.beside) > 100
        assert max(life.beside) <= 2 * BOUND
