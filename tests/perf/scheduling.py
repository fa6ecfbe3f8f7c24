"""What the admission queue costs with a hundred requests in it and with a million.

    python tests/perf/scheduling.py [--waiting N ...] [--rounds 9] [--out FILE]

A push and a pop by each order, in turns of 5,000 of both on queues of each size. Of requests 100
come in a second, with prompts of 20 to 2,000 tokens and outputs of 1 to 500, at four gateways; each
is new, as is what it is made of. Medians over the rounds, in us. ``queue_ops_per_s_at_1e6`` is how
often both are done in a second by fifo.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from router.admission.policy import ORDERS, policy_of
from router.admission.queue import AdmissionQueue
from router.admission.waiting import Waiting
from router.config import Order, RouterConfig
from tests.perf import report

WAITING = (100, 10_000, 1_000_000)
AT_ONCE = 5_000
GATEWAYS = 4
PER_S = 100.0


class Bench:
    """A queue in this order with ``waiting`` requests."""

    def __init__(self, order: Order, waiting: int) -> None:
        config = RouterConfig()
        self._dice = random.Random(0)
        self._came = 0
        self._queue = AdmissionQueue(policy_of(order, config), config.class_floor)
        for each in self._requests(waiting):
            self._queue.push(each)

    def us_per_pair(self) -> float:
        requests = self._requests(AT_ONCE)
        began = time.perf_counter()
        for each in requests:
            self._queue.push(each)
            self._queue.pop(each.arrived)
        return (time.perf_counter() - began) / AT_ONCE * 1e6

    def _requests(self, number: int) -> list[Waiting]:
        return [self._request() for _ in range(number)]

    def _request(self) -> Waiting:
        self._came += 1
        prompt, output = self._dice.randrange(20, 2000), self._dice.randrange(1, 500)
        return Waiting(
            f"request-{self._came}",
            f"gateway-{self._came % GATEWAYS}",
            arrived=self._came / PER_S + self._dice.random(),
            prefill_tokens=prompt,
            max_tokens=500,
            predicted_tokens=output,
            predicted_total=prompt + output,
        )


def measure(order: Order, waiting: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """us of a push and a pop, by how many wait, in the order of the rounds."""
    benches = {size: Bench(order, size) for size in waiting}
    seen: dict[int, list[float]] = {size: [] for size in waiting}
    for _ in range(rounds):
        for size, bench in benches.items():
            seen[size].append(bench.us_per_pair())
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("build/bench/scheduling.json"))
    args = parser.parse_args()
    raw = {order: measure(order, args.waiting, args.rounds) for order in ORDERS}
    us = {order: {n: statistics.median(seen[n]) for n in seen} for order, seen in raw.items()}
    few, many = min(args.waiting), max(args.waiting)
    ratios = {f"queue_{order}_many_over_few": us[order][many] / us[order][few] for order in ORDERS}
    ratios["queue_ops_per_s_at_1e6"] = 1e6 / us["fifo"][many]
    report.write(
        args.out,
        packages=(),
        settings={"waiting": args.waiting, "at_once": AT_ONCE, "rounds": args.rounds},
        raw={"us_per_push_and_pop": us, "rounds": raw},
        ratios=ratios,
    )


if __name__ == "__main__":
    main()
