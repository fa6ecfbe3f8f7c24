"""Made-up forecasts for tests of reports."""

from __future__ import annotations

from cluster.simulator.forecast import Forecast, Sample
from cluster.simulator.summary import Record
from cluster.simulator.workloads.arrivals import Arrival


def finished(
    index: int, at: float, ttft_s: float, tpot_s: float, *, priority: int = 0, tenant: str = ""
) -> Record:
    """Return the record of a finished request with 11 output tokens."""
    arrival = Arrival(at, 100, 11, 50, priority, tenant, "chat")
    first = at + ttft_s
    return Record(
        index,
        arrival,
        dispatched=at + ttft_s / 2,
        first_token=first,
        finished=first + 10 * tpot_s,
        worker="0",
        output_tokens=11,
        attempts=1,
    )


def refused(index: int, at: float) -> Record:
    return Record(index, Arrival(at, 100, 11, 50, application="chat"), refused="queue_full")


def some() -> Forecast:
    """Return a forecast of nine requests with TTFTs of 0.1 to 0.9 s, and a refused one."""
    done = [
        finished(i, float(i), 0.1 * (i + 1), 0.02, priority=i % 2, tenant=f"t{i % 3}")
        for i in range(9)
    ]
    samples = tuple(
        Sample(float(i), i % 4, 3, 1, 2, 8, blocks_used=10 * i, blocks=100) for i in range(10)
    )
    return Forecast((*done, refused(9, 9.0)), samples, num_steps=50, num_jumped=20, worker_s=20.0)
