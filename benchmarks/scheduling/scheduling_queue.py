"""Cost of the admission queue with 100 to 100,000 requests in it.

A push and a pop by each order, in turns of 5,000 of both on queues of each size. Of requests 100
come in a second, with prompts of 20 to 2,000 tokens and outputs of 1 to 500, at four gateways; each
is new, as is what it is made of, and is of one of 997 sessions. Medians over the rounds, in us.
``queue_ops_per_s_at_1e4`` is how often both are done in a second by fifo with 10,000. With
``tenants`` these take turns (scheduling_turns.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from everlift.request_id import qualify
from router.admission.fair_share import FairShare
from router.admission.policy import policy_of
from router.admission.queue import AdmissionQueue
from router.admission.request import QueueKey, Waiting
from router.config import Order, RouterConfig

WAITING = (100, 10_000, 100_000)
AT_ONCE = 5_000
GATEWAYS = tuple(f"gateway-{number}" for number in range(4))
PER_S = 100.0
_SESSIONS = 997


class Requests:
    """Each comes as a queue of ``waiting`` requests is found, and is of one of so many tenants; 0:
    they are not told apart."""

    def __init__(self, waiting: int, tenants: int = 0) -> None:
        self._dice = random.Random(0)
        self._came = 0
        self._tenants = tenants
        self._wait_s = waiting / PER_S

    @property
    def now(self) -> float:
        """When the last one came, in seconds."""
        return self._came / PER_S

    def make(self) -> Waiting:
        self._came += 1
        prompt, output = self._dice.randrange(20, 2000), self._dice.randrange(1, 500)
        tenant = f"tenant-{self._dice.randrange(self._tenants)}" if self._tenants else ""
        return Waiting(
            qualify(tenant, f"request-{self._came}"),
            GATEWAYS[self._came % len(GATEWAYS)],
            arrived=self._came / PER_S + self._dice.random(),
            prefill_tokens=prompt,
            max_tokens=500,
            predicted_tokens=output,
            queue_key=QueueKey(
                prompt + output, output / 500, (prompt + output) / 2500, self._wait_s
            ),
            session=1 + self._came % _SESSIONS,
            attained_rank=(prompt + output) / 2500,
        )


class QueueBench:
    """A queue in this order with ``waiting`` requests."""

    def __init__(self, order: Order, waiting: int, tenants: int = 0) -> None:
        config = RouterConfig()
        self._requests = Requests(waiting, tenants)
        share = FairShare(1.0, 2.0, lambda tenant: 1.0) if tenants else None
        policy = policy_of(order, config)
        self._queue = AdmissionQueue(policy, config.class_floor, share, is_fair=tenants > 0)
        for _ in range(waiting):
            self._queue.push(self._requests.make())

    def us_per_request(self) -> float:
        requests = [self._requests.make() for _ in range(AT_ONCE)]
        began = time.perf_counter()
        for each in requests:
            self._queue.push(each)
            self._queue.pop(each.arrived)
        return (time.perf_counter() - began) / AT_ONCE * 1e6


class Bench(Protocol):
    def us_per_request(self) -> float: ...


def measure(
    make: Callable[[int], Bench], waiting: Sequence[int], rounds: int
) -> dict[int, list[float]]:
    """us of a request, by how many wait, in the order of the rounds."""
    benches = {size: make(size) for size in waiting}
    seen: dict[int, list[float]] = {size: [] for size in waiting}
    for _ in range(rounds):
        for size, bench in benches.items():
            seen[size].append(bench.us_per_request())
    return seen


def ratios(name: str, us: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """``us`` by order and by how many wait."""
    few, many = min(us["fifo"]), max(us["fifo"])
    each = {f"{name}_{order}_many_over_few": us[order][many] / us[order][few] for order in us}
    return each | ({f"{name}_ops_per_s_at_1e4": 1e6 / at} if (at := us["fifo"].get(10**4)) else {})
