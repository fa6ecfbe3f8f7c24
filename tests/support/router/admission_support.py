"""Workers as a leader sees them, with made-up loads and throughputs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from everlift.v1 import session_pb2 as pb
from router.admission.fair_share import FairShare
from router.admission.leader_state import LeaderState
from router.admission.model_queue import ModelQueue, Placed
from router.admission.placement import Placement
from router.admission.placements import Placements
from router.admission.policy import (
    EarliestDeadline,
    Fifo,
    HighestResponseRatio,
    LeastAttained,
    Policy,
    PredictedRank,
    Rules,
    ShortestWork,
    StarvationLimit,
)
from router.admission.request import Running, Waiting
from router.admission.throughput import ThroughputEstimator, Work
from router.admission.workers import Capacity, Load
from router.config import RouterConfig

#: One policy of each kind.
POLICIES: tuple[Policy, ...] = (
    Fifo(),
    EarliestDeadline(5.0),
    ShortestWork(1.5),
    PredictedRank(2.0),
    HighestResponseRatio(),
    LeastAttained(1.5),
    StarvationLimit(ShortestWork(1.5), 4.0),
)
CONFIG = RouterConfig(
    local_depth=2,
    max_pending_prefill=100_000,
    max_queued=3,
    heartbeat=0.5,
    lease=1.5,
    move_reserve=0.05,
    class_floor=0.0,
)
CAPACITY = Capacity(max_num_seqs=4, num_blocks=100)


def waiting(request_id: str, arrived: float = 0.0, **fields: object) -> Waiting:
    made = Waiting(request_id, "g", arrived, prefill_tokens=32, max_tokens=10)
    return made._replace(**fields)  # type: ignore[arg-type]


def running(request_id: str, worker_id: str = "home", **fields: object) -> Running:
    made = Running(
        request_id, "g", worker_id, epoch=1, priority=0, known_tokens=310, arrived=0.0, moves_left=3
    )
    return made._replace(**fields)  # type: ignore[arg-type]


def choose(placement: Placement, waiting: Waiting) -> str | None:
    """Return the id of the worker that a placement chooses, if any."""
    choice = placement.choose(waiting)
    return None if choice is None else choice.worker_id


def paced(
    *,
    tokens_per_s: float = 1000.0,
    blocks_per_s: float = 0.0,
    rows_per_s: float = 0.0,
    step_s: float = 0.01,
) -> ThroughputEstimator:
    """Return the estimator of a worker that was observed for two seconds."""
    throughput = ThroughputEstimator()
    for second in range(3):
        steps = round(second / step_s)
        work = Work(
            step=steps,
            computed_tokens=round(steps * step_s * tokens_per_s),
            released_blocks=round(second * blocks_per_s),
            busy_s=steps * step_s,
            num_rows=round(steps * step_s * rows_per_s),
        )
        throughput.measure(work, False, float(second))
    return throughput


class Cluster:
    """State of a leader, with its workers' views and the requests in their slots."""

    def __init__(
        self, config: RouterConfig = CONFIG, weight_of: Callable[[str], float] | None = None
    ) -> None:
        placements = Placements(config)
        self.placement = placements[""]
        self.slots: dict[str, list[str]] = {}
        self.leader_state = LeaderState(
            config,
            Rules.of(config),
            placements,
            lambda worker: self.slots.get(worker, []),
            "",
            now=0.0,
            fair_share=None if weight_of is None else lambda: FairShare(1.0, 2.0, weight_of),
        )
        self.leader_state.handover.set_live_gateways(())
        self._epochs = count(1)

    def add_worker(
        self,
        worker_id: str,
        load: Load,
        throughput: ThroughputEstimator | None = None,
        capacity: Capacity = CAPACITY,
    ) -> None:
        self.placement.join(worker_id, capacity)
        self.placement.report(worker_id, load, now=0.0)
        self.placement.workers[worker_id].throughput = throughput or paced()

    @property
    def queue(self) -> ModelQueue:
        """Queue of the only model."""
        return self.leader_state.queue("")

    def connect(self, gateway: str = "g", now: float = 0.0) -> None:
        """Connect a gateway that has no requests."""
        self.leader_state.connect(gateway, now)
        self.receive(pb.GatewayMessage(is_complete=True), gateway, now)

    def receive(
        self, message: pb.GatewayMessage, gateway: str = "g", now: float = 0.0
    ) -> tuple[list[str], list[str]]:
        effects = self.leader_state.on_message(gateway, message, now)
        refused = [refusal.waiting.request_id for refusal in effects.refused]
        return refused, [replaced.gateway for replaced in effects.replaced]

    def enqueue(self, request_id: str, gateway: str = "g", **fields: object) -> None:
        message = pb.Waiting(
            **{"request_id": request_id, "prompt_tokens": 32, "choices": 1} | fields
        )
        self.receive(pb.GatewayMessage(enqueue=[message]), gateway)

    def runs(self, request_id: str, worker_id: str, gateway: str = "g", **fields: object) -> None:
        message = pb.Running(
            **{
                "request_id": request_id,
                "worker_id": worker_id,
                "epoch": 1,
                "known_tokens": 310,
                "moves_left": 3,
                "choices": 1,
            }
            | fields
        )
        self.receive(pb.GatewayMessage(running=[message]), gateway)

    def place(self, now: float = 0.0, ledger_now: float = 0.0) -> list[Placed]:
        placed = self.leader_state.place(now, ledger_now, 100, lambda: next(self._epochs))
        for one in placed:
            self.leader_state.on_dispatched(one, one.waiting.gateway)
        return placed

    def moves(self, now: float = 0.0) -> list[tuple[str, str]]:
        moves = self.leader_state.moves(now, now)
        return [(move.running.request_id, move.worker_id) for move in moves]
