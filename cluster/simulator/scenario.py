"""A cluster whose future is asked for: its workers, its settings, and what happens to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cluster.autoscale.config import AutoscaleConfig
from everlift.step_time import StepTime
from router.config import RouterConfig
from worker.config import WorkerConfig
from worker.device.device_kind import DeviceKind
from worker.engine.limits import Limits

#: How a request finds its worker when it is not the product that decides.


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Simulated worker.

    ``config.num_blocks`` and ``config.max_model_len`` must be set. Each step takes ``slowness``
    times its ``step_time``.
    """

    config: WorkerConfig
    step_time: StepTime
    slowness: float = 1.0

    def __post_init__(self) -> None:
        if self.config.num_blocks is None or self.config.max_model_len is None:
            raise ValueError("worker.num_blocks and worker.max_model_len must be set")
        if self.config.speculation.num_draft_tokens:
            raise ValueError("worker.speculation: nobody knows which drafts would be right")
        if self.config.preemption != "recompute":
            raise ValueError("worker.preemption: what a copy of a block takes is not modelled")
        if not self.slowness > 0:
            raise ValueError(f"slowness must be above 0, not {self.slowness:g}")

    @property
    def limits(self) -> Limits:
        assert self.config.num_blocks is not None and self.config.max_model_len is not None
        return Limits.of(self.config, _Device(self.config.num_blocks, self.config.max_model_len))


@dataclass(frozen=True, slots=True)
class _Device:
    num_blocks: int
    max_model_len: int
    #: nobody looks at tokens, and nothing is copied to the host's memory
    vocab_size: int = 2
    num_host_blocks: int = 0
    #: what a kind of worker has on GPUs, it says itself
    device_kind: DeviceKind = DeviceKind.CPU


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """Loss of ``worker`` (by number, from 0), detected ``detection_s`` later."""

    at: float
    worker: int
    detection_s: float = 0.9


@dataclass(frozen=True, slots=True)
class WorkerDrain:
    """Drain: ``worker`` returns its requests and leaves."""

    at: float
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Start of another worker, which takes requests ``start_s`` later."""

    at: float
    spec: WorkerSpec
    start_s: float = 0.0


Event: TypeAlias = WorkerLoss | WorkerDrain | WorkerStart


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario of a simulation.

    ``link_s`` is the delay of a message, one way; ``start_s`` the start time of a worker that the
    autoscaler requests. Times are seconds from the workload's begin.
    """

    workers: tuple[WorkerSpec, ...]
    router: RouterConfig = field(default_factory=RouterConfig)
    #: with max_workers the product's autoscaler decides how many there are; those that come are as
    #: the first, at its usual speed
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    start_s: float = 30.0
    #: of tenants, 1 where there is none; None: tenants are not told apart
    weights: Mapping[str, float] | None = field(default_factory=dict)
    #: how sharply outputs' lengths are foreseen: 0, exactly; not set: not at all (foresight.py)
    foresight_sigma: float | None = None
    events: tuple[Event, ...] = ()
    link_s: float = 0.001
    #: between two samples of the time series
    sample_s: float = 1.0
    #: of the errors that foresight_sigma draws
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("a scenario needs a worker")
        if not self.link_s >= 0 or not self.sample_s > 0:
            raise ValueError("link_s must be at least 0 and sample_s above 0")

    @classmethod
    def uniform(cls, num_workers: int, spec: WorkerSpec, **others: object) -> Scenario:
        """Return a scenario with ``num_workers`` of one kind."""
        return replace(cls((spec,) * num_workers), **others)  # type: ignore[arg-type]
