"""Goodput under overload with and without early rejection, in virtual time.

    python benchmarks/overload.py [--seconds 40] [--workers 2] [--out FILE]

Simulated engines with 64 slots serve chats with Poisson arrivals; prompts have 205 tokens and
outputs 57 in the mean (log-normal). Capacity is the rate that they serve if the queue is never
empty. Goodput is the rate of requests with a TTFT of at most 1 s and a TPOT of at most 50 ms, as a
share of capacity, without the first 10 s. ``error`` is the median relative error of the predicted
TTFT.

In further runs ("again") each refused request retries when its Retry-After says so: at a load of
1.3, and with a burst of 200 requests per worker after loads of 0.9 and 1.0, after which no other
requests come. ``tries`` is the mean number of refusals of a request that was refused.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import report
from router.config import RouterConfig
from tests.support.router.overload_support import TPOT_S, Asked, VirtualCluster, chats

LOADS = (0.8, 0.9, 1.0, 1.1, 1.3, 1.6)
BOUNDS: dict[str, dict[str, Any]] = {
    "none": {},
    "refuse_late": {"refuse_late": True, "tpot_target": TPOT_S},
}
BEGIN_S = 10.0
#: Limit of queued requests in runs with retries, and requests of a burst, both per worker.
QUEUED, BURST = 50, 200


def simulate_chats(
    rate: float, seconds: float, workers: int, settings: dict[str, Any]
) -> list[Asked]:
    cluster = VirtualCluster(RouterConfig(**settings), workers)
    return cluster.play(chats(rate, seconds), seconds + 2)


def capacity(seconds: float, workers: int) -> float:
    """Return the requests per second that the workers serve if the queue is never empty."""
    load = simulate_chats(100.0 * workers, seconds, workers, {})
    ended = sum(it.ended is not None and BEGIN_S <= it.ended < seconds for it in load)
    return ended / (seconds - BEGIN_S)


def figures(load: list[Asked], seconds: float, per_s: float) -> dict[str, Any]:
    counted = [it for it in load if BEGIN_S <= it.arrived < seconds]
    errors = [
        abs(it.predicted_ttft_s / (it.first_token - it.arrived) - 1)
        for it in counted
        if it.predicted_ttft_s and it.first_token
    ]
    return {
        "goodput": sum(it.is_good for it in counted) / (seconds - BEGIN_S) / per_s,
        "refused": Counter(error.slug for it in counted for _, error in it.refusals),
        "requests": len(counted),
        "error": statistics.median(errors) if errors else None,
    }


def retry_figures(load: list[Asked], seconds: float, workers: int) -> dict[str, Any]:
    """Run the load with retries; return the number of refused requests, and their mean tries."""
    config = RouterConfig(max_queued=QUEUED * workers)
    cluster = VirtualCluster(config, workers, comes_back=True)
    refused = [it for it in cluster.play(load, seconds) if it.refusals]
    return {
        "refused": len(refused),
        "tries": statistics.fmean(len(it.refusals) for it in refused),
    }


def with_burst(rate: float, seconds: float, workers: int) -> list[Asked]:
    """Return chats at ``rate`` for ``seconds``, followed by a burst."""
    burst = chats(2000.0, 1.0 * workers, seed=3)[: BURST * workers]
    for asked in burst:
        asked.name, asked.arrived = f"burst-{asked.name}", seconds + asked.arrived
    return [*chats(rate, seconds), *burst]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench/overload.json"))
    args = parser.parse_args()
    per_s = capacity(args.seconds / 2, args.workers)
    raw = {
        name: {
            load: figures(
                simulate_chats(load * per_s, args.seconds, args.workers, settings),
                args.seconds,
                per_s,
            )
            for load in LOADS
        }
        for name, settings in BOUNDS.items()
    }
    seconds, workers = args.seconds / 2, args.workers
    again = {
        "1.3": retry_figures(chats(1.3 * per_s, seconds), seconds, workers),
        **{
            f"burst on {load}": retry_figures(
                with_burst(load * per_s, seconds, workers), args.seconds, workers
            )
            for load in (0.9, 1.0)
        },
    }
    report.write(
        args.out,
        packages=(),
        settings={"seconds": args.seconds, "workers": args.workers, "capacity_per_s": per_s},
        raw={**raw, "again": again},
        ratios={
            **{
                f"goodput_1_3_vs_1_0 ({name})": raw[name][1.3]["goodput"]
                / raw[name][1.0]["goodput"]
                for name in BOUNDS
            },
            **{f"tries ({load})": found["tries"] for load, found in again.items()},
        },
    )


if __name__ == "__main__":
    main()
