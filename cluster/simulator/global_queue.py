"""Admission queue and placement of a simulated cluster, made of the product's classes. Pure.

In the product, ``router.leader.leader`` combines the same classes with a ledger and connections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count

from cluster.simulator.frame import Frame
from cluster.simulator.sequence import chunk_id
from everlift.v1 import session_pb2
from router.admission.fair_share import FairShare
from router.admission.handover import DISPATCHES_AT_ONCE, MOVES_S
from router.admission.leader_state import LeaderState
from router.admission.load_shedding import Refusal
from router.admission.model_queue import Placed
from router.admission.placement import Placement
from router.admission.placements import Placements
from router.admission.policy import Rules
from router.admission.preemption import Move
from router.admission.prefix_index import PrefixIndex
from router.admission.request import Running, Waiting
from router.admission.wait_estimate import EstimatedWait
from router.admission.workers import Capacity
from router.config import RouterConfig

#: Name of the only gateway of a simulation.
GATEWAY = "gateway"
_TERM = 1
#: Name of the only model of a simulation.
_MODEL = ""


class GlobalQueue:
    """Admission queue of a simulated cluster, with the placement of its requests.

    ``occupants`` returns the ids of the requests that have a slot at the worker with the given id.
    ``weights`` maps tenants to their fair-share weights, which are 1 for all others; None means
    that tenants are not distinguished. Times are virtual seconds.
    """

    #: subclasses may observe the placement
    placement_class: type[Placement] = Placement

    def __init__(
        self,
        config: RouterConfig,
        occupants: Callable[[str], Collection[str]],
        weights: Mapping[str, float] | None = None,
        now: float = 0.0,
    ) -> None:
        placements = Placements(config, self.placement_class)
        self._placement = placements[_MODEL]
        share = None if weights is None else partial(_fair_share, config, weights)
        rules = Rules.of(config)
        self._leader_state = LeaderState(config, rules, placements, occupants, "", now, share)
        self._leader_state.restore_counters(session_pb2.ClusterLoad())
        self._leader_state.handover.set_live_gateways([GATEWAY])
        self._leader_state.connect(GATEWAY, now)
        self._send(session_pb2.GatewayMessage(is_complete=True), now)
        self._wait = EstimatedWait()
        self._epochs = count(1)
        self._move_after = 0.0

    @property
    def queued(self) -> int:
        return self._leader_state.queued

    @property
    def has_work(self) -> bool:
        """Return whether any request is queued, or waits at its worker after a preemption."""
        return self._leader_state.has_work

    def load(self, now: float) -> session_pb2.ClusterLoad:
        """Return the load report of the cluster, which the autoscaler reads."""
        return self._leader_state.load(_TERM, now, now)

    def worker_up(self, worker_id: str, capacity: Capacity) -> None:
        self._placement.join(worker_id, capacity)

    def worker_lost(self, worker_id: str) -> None:
        self._placement.remove_worker(worker_id)

    def on_message(self, frame: Frame, now: float) -> None:
        for epoch in frame.accepted:
            self._placement.acknowledge(frame.worker_id, epoch)
        update_index(self._placement.index, frame)
        self._placement.report(frame.worker_id, frame.load, now)

    def most_cached(self, chunks: Sequence[int], num_tokens: int) -> int:
        """Return the largest number of leading prompt tokens that any one worker has cached.

        ``num_tokens`` is the length of the prompt, and ``chunks`` are the ids of its full chunks.
        The last token is never included.
        """
        return self._placement.most_cached(chunks, num_tokens)

    def estimated_wait_s(self, priority: int, work_tokens: int) -> float:
        return self._wait.estimate(priority, work_tokens)

    def enqueue(self, waiting: Waiting, now: float) -> list[Refusal]:
        return self._send(session_pb2.GatewayMessage(enqueue=[waiting.to_proto()]), now)

    def withdraw(self, request_id: str, now: float) -> None:
        self._send(session_pb2.GatewayMessage(withdraw=[request_id]), now)

    def running(self, running: Running, now: float) -> None:
        """Record that a worker preempted or resumed the request that ``running`` describes."""
        self._send(session_pb2.GatewayMessage(running=[running.to_proto()]), now)

    def served(self, outputs: list[session_pb2.ServedTokens], now: float) -> None:
        self._send(session_pb2.GatewayMessage(served=outputs), now)

    def session_output(self, session: int, tokens: int, now: float) -> None:
        """Record the number of output tokens of a request that has ended, and its session."""
        output = session_pb2.SessionOutput(session=session, tokens=tokens)
        self._send(session_pb2.GatewayMessage(session_outputs=[output]), now)

    def finished(self, tpot_ratio: float, now: float) -> None:
        """Record the ratio of measured to predicted time per output token of a finished request."""
        ratio = session_pb2.TpotRatio(ratio=tpot_ratio)
        self._send(session_pb2.GatewayMessage(tpot_ratios=[ratio]), now)

    def _send(self, message: session_pb2.GatewayMessage, now: float) -> list[Refusal]:
        return self._leader_state.on_message(GATEWAY, message, now).refused

    def expired(self, now: float) -> list[Refusal]:
        """Remove the requests that have waited too long, and return each with its error."""
        return self._leader_state.expire(now)

    def moves(self, now: float) -> list[Move]:
        """Return the preempted requests to move, because another worker would resume them sooner.

        The result is empty if the last search was less than ``MOVES_S`` seconds ago.
        """
        if now < self._move_after:
            return []
        self._move_after = now + MOVES_S
        return self._leader_state.moves(now, now)

    def place(self, now: float) -> list[Placed]:
        placed = self._leader_state.place(now, now, DISPATCHES_AT_ONCE, lambda: next(self._epochs))
        for each in placed:
            self._leader_state.on_dispatched(each, GATEWAY)
        return placed

    def tick(self, now: float) -> None:
        self._placement.expire(now)
        self._leader_state.update_estimates(now)
        self._leader_state.prune(now)
        self._wait.on_estimate(self._leader_state.queue(_MODEL).queue_estimate())


def _fair_share(config: RouterConfig, weights: Mapping[str, float]) -> FairShare:
    def weight_of(tenant: str) -> float:
        return weights.get(tenant, 1.0)

    return FairShare(config.prompt_token_weight, config.output_token_weight, weight_of)


def update_index(index: PrefixIndex, frame: Frame) -> None:
    """Apply the changes of a worker's prefix cache that its frame reports."""
    if frame.chunks:
        stored = [chunk_id(name) for name, is_stored in frame.chunks.items() if is_stored]
        evicted = [chunk_id(name) for name, is_stored in frame.chunks.items() if not is_stored]
        index.update(frame.worker_id, stored, evicted)
    for outcome in frame.outcomes:
        if outcome.tokens or outcome.stop is not None:
            index.settle(frame.worker_id, outcome.key.epoch)
    for epoch in frame.aborted:
        index.settle(frame.worker_id, epoch)
