"""Settings of the autoscaler."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from everlift.settings import CHECKED, Amount, Count, Fraction, NotNegative, Positive


@dataclass(frozen=True, slots=True, config=CHECKED)
class AutoscaleConfig:
    """Settings of the autoscaler; all durations are in seconds."""

    #: minimum number of workers, if max_workers is set; 0: none while there is no work
    min_workers: Amount = 1
    #: maximum number of workers; not set: the number is fixed (num_workers)
    max_workers: Count | None = None
    #: maximum number of routers; num_routers is the minimum. Not set: the number is fixed
    max_routers: Count | None = None
    #: running and queued requests per router: 512 streams of 40 tokens per second use about one
    #: core
    requests_per_router: Positive = 512.0
    #: target for the queue wait in seconds; workers are normally added when the estimated wait
    #: exceeds half of it
    ttft_target: Positive = 2.0
    #: target time, in seconds, in which added workers drain the queue
    drain_target: Positive = 20.0
    #: share of the workers' throughput and batch slots that the autoscaler plans to use
    utilisation: Fraction = 0.8
    #: share of the workers' KV blocks that the autoscaler plans to use
    kv_utilisation: Fraction = 0.9
    #: workers are removed when fewer would have sufficed for this many seconds
    down_delay: NotNegative = 120.0
    #: with min_workers 0: all workers are removed after this many seconds without work
    idle_delay: NotNegative = 300.0
    #: a load report that is older than this many seconds is ignored
    stale: Positive = 5.0

    def __post_init__(self) -> None:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers ({self.max_workers}) must be at least min_workers")

    @property
    def is_on(self) -> bool:
        return self.max_workers is not None
