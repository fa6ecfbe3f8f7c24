"""What a request costs its leader, with 100 to 100,000 requests in the queue.

From the gateway's message, as it came over the wire, to the leader's: it is parsed, foreseen, goes
through the bounds into the queue; the one that leaves next gets a worker, with what its stay was
like; its dispatch is written as it goes over the wire; and its gateway says that it has ended.
Without the sockets, the event loop and the ledger, none of which knows how many wait. One worker,
which has room for one request more at any time. The requests are those of scheduling_queue.py.
"""

from __future__ import annotations

import time

from benchmarks.scheduling.scheduling_queue import AT_ONCE, GATEWAYS, Requests
from everlift.v1 import session_pb2 as pb
from router.admission.scheduler import Placed
from router.admission.workers import Capacity, Load
from router.config import Order, RouterConfig
from tests.support.router.admission_support import Cluster

_WORKER = "worker"
#: More than is ever asked of it.
_ROOMY = Capacity(max_num_seqs=10_000, num_blocks=10**7)


class LeaderBench:
    """A leader whose queue is in this order, with ``waiting`` requests in it."""

    def __init__(self, order: Order, waiting: int) -> None:
        self._cluster = Cluster(RouterConfig(order=order, max_queued=10**9))
        self._requests = Requests(waiting)
        for gateway in GATEWAYS:
            self._cluster.connect(gateway)
        for _ in range(waiting):
            self._hear(self._message())
        self._cluster.add_worker(_WORKER, Load(sequence_number=1), capacity=_ROOMY)
        self._cluster.leader_state.update_estimates(self._requests.now)

    def us_per_request(self) -> float:
        messages = [self._message() for _ in range(AT_ONCE)]
        began = time.perf_counter()
        for message in messages:
            self._hear(message)
            self._dispatch()
        return (time.perf_counter() - began) / AT_ONCE * 1e6

    def _message(self) -> bytes:
        told = self._requests.make()
        waiting = pb.Waiting(
            request_id=told.request_id,
            arrived=told.arrived,
            prompt_tokens=told.prefill_tokens,
            max_tokens=told.max_tokens,
            choices=1,
            predicted_tokens=told.predicted_tokens,
            session=told.session,
            **told.queue_key._asdict(),
        )
        message = pb.GatewayMessage(router_id=told.gateway, enqueue=[waiting])
        return message.SerializeToString()

    def _hear(self, data: bytes) -> None:
        message = pb.GatewayMessage.FromString(data)
        self._cluster.leader_state.on_message(message.router_id, message, self._requests.now)

    def _dispatch(self) -> None:
        leader_state, now = self._cluster.leader_state, self._requests.now
        leader_state.note_workers(now)
        leader_state.expire(now)
        [placed] = leader_state.place(now, now, 1, lambda: 1)
        leader_state.on_dispatched(placed, placed.waiting.gateway)
        _told(placed, leader_state.queued)
        self._cluster.placement.acknowledge(_WORKER, placed.epoch)
        output = pb.SessionOutput(session=placed.waiting.session, tokens=100)
        ended = pb.GatewayMessage(withdraw=[placed.waiting.request_id], session_outputs=[output])
        leader_state.on_message(placed.waiting.gateway, ended, now)


def _told(placed: Placed, queued: int) -> bytes:
    dispatched = pb.Dispatched(
        request_id=placed.waiting.request_id,
        worker_id=placed.worker_id,
        epoch=placed.epoch,
        attempt=1,
        bypassed=placed.bypassed,
        predicted_ttft_s=placed.waiting.predicted_ttft_s,
        predicted_tpot_s=placed.waiting.predicted_tpot_s,
        queue_wait=placed.queue_wait,
    )
    return pb.LeaderMessage(dispatched=[dispatched], queued=queued).SerializeToString()
