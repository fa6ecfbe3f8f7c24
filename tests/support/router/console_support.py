"""Fake cluster for tests of a console's aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from everlift.v1 import inference_pb2, session_pb2
from router.admission.workers import WorkerView
from router.console.counting import LATENCIES
from router.console.parts import Identity
from router.console.prompts import Prompts
from router.console.snapshot import Snapshot
from router.ledger.base import LoadReport

BOUNDS = (0.1, 1.0, inf)


@dataclass
class Link:
    info: session_pb2.WorkerInfo
    state: session_pb2.WorkerState = field(default_factory=session_pb2.WorkerState)
    is_up: bool = True
    running: list[inference_pb2.RunningSequence] = field(default_factory=list)

    def seat(self, *request_ids: str, prefilling: bool = False) -> None:
        """Put the requests into the worker's slots in order; an empty id leaves a slot free."""
        self.running = [
            inference_pb2.RunningSequence(request_id=name, slot=slot, prefilling=prefilling)
            for slot, name in enumerate(request_ids)
            if name
        ]
        self.state.num_running = len(self.running)


def link(worker_id: str, slots: int = 4, blocks: int = 100) -> Link:
    info = session_pb2.WorkerInfo(
        worker_id=worker_id,
        address=f"10.0.0.1:{worker_id[-1:]}",
        max_num_seqs=slots,
        num_blocks=blocks,
        tensor_parallel=1,
    )
    return Link(info)


@dataclass
class Counters:
    completed: int = 0
    failed: int = 0
    migrated: int = 0
    preempted: int = 0
    moved: int = 0
    recomputed_tokens: int = 0


@dataclass
class EffectiveSettings:
    values: dict[str, Any] = field(default_factory=lambda: {"order": "fifo"})
    overridden: Sequence[str] = ()


@dataclass
class FakeCluster:
    """All parts of a router that a snapshot reads, in one object."""

    links: list[Link] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    queue_estimates: dict[str, session_pb2.QueueEstimate] = field(default_factory=dict)
    effective_settings: EffectiveSettings = field(default_factory=EffectiveSettings)
    ledger: inference_pb2.LedgerStatus = field(default_factory=inference_pb2.LedgerStatus)
    observed: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, Prompts] = field(default_factory=dict)
    leader_id: str = "me"
    is_leading: bool = True
    false_alarms: int = 0
    queued: int = 0
    is_quiet: bool = False

    def ledger_status(self) -> inference_pb2.LedgerStatus:
        return self.ledger

    def view(self, worker_id: str) -> WorkerView | None:
        return None

    def bounds(self, name: str) -> Sequence[float]:
        return BOUNDS

    def cumulative(self, name: str) -> Sequence[int]:
        return self.observed.get(name, [0] * len(BOUNDS))

    def failures(self) -> Mapping[str, int]:
        return self.failed

    def tenant_prompts(self) -> Mapping[str, Prompts]:
        return self.prompts

    def observe(self, latency: str, *cumulative: int) -> None:
        self.observed[LATENCIES[latency]] = list(cumulative)

    def snapshot(self) -> Snapshot:
        identity = Identity("me", ["model"], has_chaos=False, has_access=False, chats=[])
        return Snapshot(identity, *[self] * 7)  # type: ignore[arg-type]


def report(age_s: float = 0.1, **fields: Any) -> LoadReport:
    return LoadReport(session_pb2.ClusterLoad(**fields), age_s)
