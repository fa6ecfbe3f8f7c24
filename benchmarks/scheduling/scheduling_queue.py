"""Cost of the admission queue with 100 to 100,000 requests in it.

Each round pushes and pops 5,000 requests by each order, on a queue of each size. Requests come from
four gateways, 100 per second in the virtual time of their arrivals, with prompts of 20 to 2,000
tokens and outputs of 1 to 500. They belong to 997 sessions. Figures are medians over the rounds, in
us per push and pop. ``queue_ops_per_s_at_1e4`` is the number of pushes and pops, each pair counted
once, that fifo does in a second with 10,000 requests in the queue.
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


class RequestSource:
    """Source of new requests for a queue of ``waiting`` requests.

    Each request belongs to one of ``tenants`` tenants, at random. If ``tenants`` is 0, no request
    has a tenant.
    """

    def __init__(self, waiting: int, tenants: int = 0) -> None:
        self._dice = random.Random(0)
        self._count = 0
        self._tenants = tenants
        self._wait_s = waiting / PER_S

    @property
    def now(self) -> float:
        """Virtual time of the latest request, in seconds."""
        return self._count / PER_S

    def make(self) -> Waiting:
        self._count += 1
        prompt, output = self._dice.randrange(20, 2000), self._dice.randrange(1, 500)
        tenant = f"tenant-{self._dice.randrange(self._tenants)}" if self._tenants else ""
        return Waiting(
            qualify(tenant, f"request-{self._count}"),
            GATEWAYS[self._count % len(GATEWAYS)],
            arrived=self._count / PER_S + self._dice.random(),
            prefill_tokens=prompt,
            max_tokens=500,
            predicted_tokens=output,
            queue_key=QueueKey(
                prompt + output, output / 500, (prompt + output) / 2500, self._wait_s
            ),
            session=1 + self._count % _SESSIONS,
            attained_rank=(prompt + output) / 2500,
        )


class QueueBench:
    """Admission queue of the given order that contains ``waiting`` requests.

    If ``tenants`` is not 0, requests have that many tenants, and the queue applies fair share.
    """

    def __init__(self, order: Order, waiting: int, tenants: int = 0) -> None:
        config = RouterConfig()
        self._requests = RequestSource(waiting, tenants)
        share = FairShare(1.0, 2.0, lambda tenant: 1.0) if tenants else None
        policy = policy_of(order, config)
        self._queue = AdmissionQueue(policy, config.class_floor, share, is_fair=tenants > 0)
        for _ in range(waiting):
            self._queue.push(self._requests.make())

    def us_per_request(self) -> float:
        """Return the mean time of a push and a pop, in us."""
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
    """Return the us per request of each round, by the number of queued requests.

    Each round measures all sizes, so that changes of the machine's speed affect all alike.
    """
    benches = {size: make(size) for size in waiting}
    seen: dict[int, list[float]] = {size: [] for size in waiting}
    for _ in range(rounds):
        for size, bench in benches.items():
            seen[size].append(bench.us_per_request())
    return seen


def ratios(name: str, us: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the ratios of ``us``, which is by order and number of queued requests.

    ``many_over_few`` is the time with the longest queue divided by that with the shortest.
    """
    few, many = min(us["fifo"]), max(us["fifo"])
    each = {f"{name}_{order}_many_over_few": us[order][many] / us[order][few] for order in us}
    return each | ({f"{name}_ops_per_s_at_1e4": 1e6 / at} if (at := us["fifo"].get(10**4)) else {})
