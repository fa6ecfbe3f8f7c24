"""Settings of the autoscaler."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from everlift.settings import CHECKED, Amount, Count, NotNegative, Part, Positive


@dataclass(frozen=True, slots=True, config=CHECKED)
class AutoscaleConfig:
    """Durations are seconds."""

    #: with max_workers, how many there are at least; 0: none while there is nothing to do
    min_workers: Amount = 1
    #: how many there are at most; not set: their number is fixed (num_workers)
    max_workers: Count | None = None
    #: routers at most, where num_routers is how many there are at least; not set: that many
    max_routers: Count | None = None
    #: running and queued requests that a router is planned to have: 512 streams of 40 tokens per
    #: second are about what a core of a router carries
    requests_per_router: Positive = 512.0
    #: a request is to leave the queue so soon: when it is going to take longer, workers are added
    ttft_target: Positive = 2.0
    #: so many are added that what waits is done in so long, beside what comes
    drain_target: Positive = 20.0
    #: part of what workers can do that is planned with
    utilisation: Part = 0.8
    #: part of their KV blocks that is planned with
    kv_utilisation: Part = 0.9
    #: workers go when fewer would have been enough for so long
    down_delay: NotNegative = 120.0
    #: the last one goes when there was nothing to do for so long
    idle_delay: NotNegative = 300.0
    #: what the leader said longer ago changes nothing
    stale: Positive = 5.0

    def __post_init__(self) -> None:
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(f"max_workers ({self.max_workers}) must be at least min_workers")

    @property
    def is_on(self) -> bool:
        return self.max_workers is not None
