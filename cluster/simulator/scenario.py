"""Scenario of a simulation: a cluster's workers, its settings, and the events during it."""

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


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings and speed of a simulated worker.

    ``config.num_blocks`` and ``config.max_model_len`` must be set. Each step takes ``slowness``
    times the seconds that ``step_time`` states. Raises ValueError for settings that are not
    modelled.
    """

    config: WorkerConfig
    step_time: StepTime
    slowness: float = 1.0

    def __post_init__(self) -> None:
        if self.config.num_blocks is None or self.config.max_model_len is None:
            raise ValueError("worker.num_blocks and worker.max_model_len must be set")
        if self.config.speculation.num_draft_tokens:
            raise ValueError(
                "worker.speculation: not modelled, because the acceptance of drafts is unknown"
            )
        if self.config.preemption != "recompute":
            raise ValueError(
                "worker.preemption: must be recompute; the time to copy blocks is not modelled"
            )
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
    #: token values are never used, and no block is copied to host memory
    vocab_size: int = 2
    num_host_blocks: int = 0
    host_load_s: float = 0.0
    #: only decides the defaults of settings; a kind of GPU worker sets these itself
    device_kind: DeviceKind = DeviceKind.CPU
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """Loss of worker number ``worker`` (from 0) at ``at`` seconds.

    The router detects the loss ``detection_s`` seconds later.
    """

    at: float
    worker: int
    detection_s: float = 0.9


@dataclass(frozen=True, slots=True)
class WorkerDrain:
    """Drain of worker number ``worker`` (from 0), which returns its requests and then leaves."""

    at: float
    worker: int


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Start of another worker at ``at`` seconds; it accepts requests ``start_s`` seconds later."""

    at: float
    spec: WorkerSpec
    start_s: float = 0.0


Event: TypeAlias = WorkerLoss | WorkerDrain | WorkerStart


@dataclass(frozen=True, slots=True)
class Scenario:
    """Cluster to simulate, with its settings and events.

    ``link_s`` is the one-way delay of a message between router and worker. ``start_s`` is the time
    that a worker requested by the autoscaler needs to start. Event times are in seconds since the
    start of the workload. Raises ValueError for invalid values.
    """

    workers: tuple[WorkerSpec, ...]
    router: RouterConfig = field(default_factory=RouterConfig)
    #: if max_workers is set, the product's autoscaler adds and drains workers; added ones are like
    #: the first one, at its normal speed
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    start_s: float = 30.0
    #: fair-share weights of tenants, by default 1; None: tenants are not distinguished
    weights: Mapping[str, float] | None = field(default_factory=dict)
    #: error of predicted output lengths, as the standard deviation of their logarithm; 0: exact;
    #: None: no error is simulated, and recorded predictions or a mean are used
    #: (length_predictor.py)
    foresight_sigma: float | None = None
    events: tuple[Event, ...] = ()
    link_s: float = 0.001
    #: seconds between two samples of the time series
    sample_s: float = 1.0
    #: seed of the random errors of predicted lengths
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("a scenario needs at least one worker")
        if not self.link_s >= 0 or not self.sample_s > 0:
            raise ValueError("link_s must be at least 0 and sample_s above 0")

    @classmethod
    def uniform(cls, num_workers: int, spec: WorkerSpec, **others: object) -> Scenario:
        """Return a scenario with ``num_workers`` equal workers; ``others`` sets other fields."""
        return replace(cls((spec,) * num_workers), **others)  # type: ignore[arg-type]
