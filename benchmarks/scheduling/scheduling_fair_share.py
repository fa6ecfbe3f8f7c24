"""Fairness and cost of fair share: two backlogged tenants, with fair share and without it.

One tenant floods the queue: it sends eight requests for one of the other's, with shorter prompts
and longer outputs. A worker with 32 slots makes a token of each running request per step of 50 ms,
and reports them every five steps. VTC bounds the difference between the weighted tokens that two
backlogged tenants were served over any interval by 2 U (arXiv 2401.00588;
``router/admission/fair_share.py``). Late reports add to that bound.

The cost is that of a push and a pop by fifo, with fair share of several tenants and without
tenants.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.scheduling.scheduling_queue import QueueBench
from everlift.request_id import qualify, tenant_of
from everlift.v1 import session_pb2
from router.admission.fair_share import FairShare
from router.admission.policy import ORDERS, policy_of
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey, Waiting
from router.config import Order, RouterConfig

SLOTS, STEPS, STEPS_PER_REPORT, STEP_S = 32, 20_000, 5, 0.05
CONFIG = RouterConfig()


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant that sends ``per_cycle`` requests in each cycle of arrivals.

    Lengths of prompts and outputs are uniform from 1 to ``prompt`` and ``output`` tokens.
    """

    name: str
    per_cycle: int
    prompt: int
    output: int


TENANTS = (Tenant("flood", 8, 200, 500), Tenant("other", 1, 1000, 200))


def bound() -> float:
    """Return the bound on the difference in service, in weighted tokens.

    It is 2 U, plus four times the cost of the output tokens between two reports.
    """
    prompt_cost, output_cost = CONFIG.prompt_token_weight, CONFIG.output_token_weight
    most = max(it.prompt for it in TENANTS), max(it.prompt + it.output for it in TENANTS)
    late = output_cost * SLOTS * STEPS_PER_REPORT
    return 2 * (max(prompt_cost * most[0], output_cost * SLOTS * most[1]) + 2 * late)


class Worker:
    """Worker with SLOTS slots, fed from a queue of the given order; it counts service by tenant."""

    def __init__(self, order: Order, *, is_fair: bool) -> None:
        weights = CONFIG.prompt_token_weight, CONFIG.output_token_weight
        self._share = FairShare(*weights, lambda tenant: 1.0)
        self._share.handover_ended()
        self._queue = AdmissionQueue(policy_of(order, CONFIG), 0.0, self._share, is_fair=is_fair)
        self._requests = _requests(random.Random(0))
        self._waiting: Counter[str] = Counter()
        self._running: list[tuple[str, list[int]]] = []
        self._unreported: Counter[str] = Counter()
        self.served = Counter({it.name: 0.0 for it in TENANTS})

    def step(self, number: int) -> None:
        self._fill(number * STEP_S)
        for tenant, left in self._running:
            left[0] -= 1
            self._unreported[tenant] += 1
            self.served[tenant] += CONFIG.output_token_weight
        self._running = [it for it in self._running if it[1][0]]
        if number % STEPS_PER_REPORT == 0:
            self._share.charge_outputs(
                session_pb2.ServedTokens(tenant=tenant, tokens=tokens)
                for tenant, tokens in self._unreported.items()
            )
            self._unreported.clear()

    def _fill(self, now: float) -> None:
        while len(self._running) < SLOTS:
            # Both tenants stay backlogged: the counter of an idle tenant would be raised.
            while any(self._waiting[it.name] < 2 for it in TENANTS):
                one = next(self._requests)
                self._waiting[tenant_of(one.request_id)] += 1
                self._queue.push(one)
            gone = self._queue.pop(now)
            tenant = tenant_of(gone.request_id)
            self._waiting[tenant] -= 1
            self._running.append((tenant, [gone.predicted_tokens]))
            self.served[tenant] += CONFIG.prompt_token_weight * gone.prefill_tokens


def _requests(dice: random.Random) -> Iterator[Waiting]:
    number = 0
    while True:
        for tenant in TENANTS:
            for _ in range(tenant.per_cycle):
                number += 1
                prompt, output = dice.randint(1, tenant.prompt), dice.randint(1, tenant.output)
                yield Waiting(
                    qualify(tenant.name, str(number)),
                    "gateway",
                    arrived=number / 1000,
                    prefill_tokens=prompt,
                    max_tokens=tenant.output,
                    predicted_tokens=output,
                    queue_key=QueueKey(prompt + output),
                )


def gap(order: Order, *, is_fair: bool, steps: int = STEPS) -> float:
    """Return the largest difference in service between the two tenants over any interval.

    Service is in weighted tokens. Intervals begin at the end of a step; the first step is left out.
    """
    worker, gaps = Worker(order, is_fair=is_fair), []
    one, other = (it.name for it in TENANTS)
    for number in range(1, steps + 1):
        worker.step(number)
        gaps.append(worker.served[one] - worker.served[other])
    return max(gaps) - min(gaps)


def gaps() -> dict[str, dict[str, float]]:
    """Return the gap of each order, with fair share ("turns") and without it ("arrival")."""
    return {
        order: {"turns": gap(order, is_fair=True), "arrival": gap(order, is_fair=False)}
        for order in ORDERS
    }


def costs(waiting: Sequence[int], rounds: int) -> dict[int, dict[int, float]]:
    """Return the median us per push and pop, by number of tenants and number of queued requests.

    With 0 tenants there is no fair share. Each round measures all numbers of tenants, so that
    changes of the machine's speed affect all alike.
    """
    medians: dict[int, dict[int, float]] = {tenants: {} for tenants in (0, 10, 1000)}
    for number in waiting:
        benches = {tenants: QueueBench("fifo", number, tenants) for tenants in medians}
        seen = [
            {tenants: bench.us_per_request() for tenants, bench in benches.items()}
            for _ in range(rounds)
        ]
        for tenants in medians:
            medians[tenants][number] = statistics.median(us[tenants] for us in seen)
    return medians


def ratios(
    gaps: Mapping[str, Mapping[str, float]], costs: Mapping[int, Mapping[int, float]]
) -> dict[str, float]:
    """Return the gaps relative to the bound and to fifo, and costs relative to no fair share."""
    return {
        "vtc_gap_vs_bound": max(each["turns"] for each in gaps.values()) / bound(),
        "vtc_gap_vs_fifo": gaps["fifo"]["turns"] / gaps["fifo"]["arrival"],
        **{
            f"queue_turns_of_{tenants}_over_none": max(us[n] / costs[0][n] for n in us)
            for tenants, us in costs.items()
            if tenants
        },
    }
