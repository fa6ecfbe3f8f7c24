"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from cluster.simulator.workloads.arrival import Arrival


@dataclass(slots=True)
class Record:
    """Moments are seconds from the workload's begin, as the gateway saw them; infinite: never.
    ``refused`` is the error's slug where it did not come to its end: ``queue_full``,
    ``deadline_exceeded``, ..."""

    #: its place in the workload, from 0
    index: int
    arrival: Arrival
    #: to its first worker
    dispatched: float = inf
    first_token: float = inf
    finished: float = inf
    #: the last that it went to
    worker: str = ""
    output_tokens: int = 0
    attempts: int = 0
    #: times that it gave up its KV blocks
    preemptions: int = 0
    #: attempts that went on with tokens of an earlier one
    migrations: int = 0
    #: of its prompt, in the cache of its first worker
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    #: requests that came later and left the queue before it
    overtaken: int = 0
    refused: str = ""

    @property
    def is_finished(self) -> bool:
        return isfinite(self.finished)

    @property
    def queued_s(self) -> float:
        """Until its first dispatch."""
        return self.dispatched - self.arrival.at

    @property
    def ttft_s(self) -> float:
        return self.first_token - self.arrival.at

    @property
    def latency_s(self) -> float:
        return self.finished - self.arrival.at

    @property
    def tpot_s(self) -> float:
        """Between two output tokens, on the average; 0 where there is only one."""
        if self.output_tokens < 2:
            return 0.0
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def normalised_latency_s(self) -> float:
        """For each output token."""
        return self.latency_s / max(1, self.output_tokens)
