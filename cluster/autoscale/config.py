"""What an operator can set about the number of workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """Durations are seconds."""

    #: with max_workers, how many there are at least; 0: none while there is nothing to do
    min_workers: int = 1
    #: how many there are at most; not set: their number is fixed (num_workers)
    max_workers: int | None = None
    #: routers at most, where num_routers is how many there are at least; not set: that many
    max_routers: int | None = None
    #: running and queued requests that a router is planned to have: 512 streams of 40 tokens per
    #: second are about what a core of a router carries
    requests_per_router: float = 512.0
    #: a request is to leave the queue so soon: when it is going to take longer, workers are added
    ttft_target: float = 2.0
    #: so many are added that what waits is done in so long, beside what comes
    drain_target: float = 20.0
    #: part of what workers can do that is planned with
    utilisation: float = 0.8
    #: part of their KV blocks that is planned with
    kv_utilisation: float = 0.9
    #: workers go when fewer would have been enough for so long
    down_delay: float = 120.0
    #: the last one goes when there was nothing to do for so long
    idle_delay: float = 300.0
    #: what the leader said longer ago changes nothing
    stale: float = 5.0

    def __post_init__(self) -> None:
        if self.min_workers < 0:
            raise ValueError(f"min_workers must be at least 0, not {self.min_workers}")
        if self.max_workers is not None and self.max_workers < max(1, self.min_workers):
            raise ValueError(f"max_workers ({self.max_workers}) must be at least min_workers and 1")
        for name in ("ttft_target", "drain_target", "stale", "requests_per_router"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}")
        for name in ("utilisation", "kv_utilisation"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        for name in ("down_delay", "idle_delay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name):g}")

    @property
    def is_on(self) -> bool:
        return self.max_workers is not None
