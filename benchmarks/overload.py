"""What an overload leaves of goodput, in virtual time: with bounds and without.

    python benchmarks/overload.py [--seconds 40] [--workers 2] [--out FILE]

Chats (prompts of 205 tokens and outputs of 57 in the mean, log-normal, Poisson) come to simulated
engines of 64 slots. Capacity is what they serve with always enough to do. Goodput is requests a
second with a first token within 1 s and 50 ms a token after it, as a part of capacity; the first 10
s do not count. ``error`` is the median by which predicted times to first token were off, as a part
of them.

Beside that all that are refused come again when they are told to: at 1.3 times the load, and of a
burst of 200 for each worker on top of 0.9 and 1.0 times, behind which nobody comes. ``tries`` is
how often a refused request was refused in the mean.
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
#: For each worker, requests that may wait where those that are refused come again, and of a burst.
QUEUED, BURST = 50, 200


def played(rate: float, seconds: float, workers: int, settings: dict[str, Any]) -> list[Asked]:
    cluster = VirtualCluster(RouterConfig(**settings), workers)
    return cluster.play(chats(rate, seconds), seconds + 2)


def capacity(seconds: float, workers: int) -> float:
    """Requests a second."""
    load = played(100.0 * workers, seconds, workers, {})
    ended = sum(it.ended is not None and BEGIN_S <= it.ended < seconds for it in load)
    return ended / (seconds - BEGIN_S)


def measured(load: list[Asked], seconds: float, per_s: float) -> dict[str, Any]:
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


def returning(load: list[Asked], seconds: float, workers: int) -> dict[str, Any]:
    """What those found that were refused, all of whom came again."""
    config = RouterConfig(max_queued=QUEUED * workers)
    cluster = VirtualCluster(config, workers, comes_back=True)
    refused = [it for it in cluster.play(load, seconds) if it.refusals]
    return {
        "refused": len(refused),
        "tries": statistics.fmean(len(it.refusals) for it in refused),
    }


def with_burst(rate: float, seconds: float, workers: int) -> list[Asked]:
    """Behind requests that come at this rate."""
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
            load: measured(
                played(load * per_s, args.seconds, args.workers, settings), args.seconds, per_s
            )
            for load in LOADS
        }
        for name, settings in BOUNDS.items()
    }
    seconds, workers = args.seconds / 2, args.workers
    again = {
        "1.3": returning(chats(1.3 * per_s, seconds), seconds, workers),
        **{
            f"burst on {load}": returning(
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
