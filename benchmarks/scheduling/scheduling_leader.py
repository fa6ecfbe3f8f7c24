"""Leader's CPU time per request, with 100 to 100,000 requests in the queue.

It covers all that the leader does for a request: parse the gateway's message, estimate its wait,
check the limits, and queue it; place the next request on a worker, and serialise its dispatch
message; and process the gateway's message that it has ended. Sockets, event loop and ledger are
left out; their cost does not depend on the length of the queue. The only worker always has room for
one more request. Requests are those of scheduling_queue.py.
"""

from __future__ import annotations

import time

from benchmarks.scheduling.scheduling_queue import AT_ONCE, GATEWAYS, RequestSource
from everlift.v1 import session_pb2 as pb
from router.admission.model_queue import Placed
from router.admission.workers import Capacity, Load
from router.config import Order, RouterConfig
from tests.support.router.admission_support import Cluster

_WORKER = "worker"
#: Capacity of the worker that is never used up.
_LARGE = Capacity(max_num_seqs=10_000, num_blocks=10**7)


class LeaderBench:
    """Leader whose queue has the given order and contains ``waiting`` requests."""

    def __init__(self, order: Order, waiting: int) -> None:
        self._cluster = Cluster(RouterConfig(order=order, max_queued=10**9))
        self._requests = RequestSource(waiting)
        for gateway in GATEWAYS:
            self._cluster.connect(gateway)
        for _ in range(waiting):
            self._receive(self._message())
        self._cluster.add_worker(_WORKER, Load(sequence_number=1), capacity=_LARGE)
        self._cluster.leader_state.update_estimates(self._requests.now)

    def us_per_request(self) -> float:
        """Return the mean time per request, in us, while the queue keeps its length."""
        messages = [self._message() for _ in range(AT_ONCE)]
        began = time.perf_counter()
        for message in messages:
            self._receive(message)
            self._dispatch()
        return (time.perf_counter() - began) / AT_ONCE * 1e6

    def _message(self) -> bytes:
        request = self._requests.make()
        waiting = pb.Waiting(
            request_id=request.request_id,
            arrived=request.arrived,
            prompt_tokens=request.prefill_tokens,
            max_tokens=request.max_tokens,
            choices=1,
            predicted_tokens=request.predicted_tokens,
            session=request.session,
            **request.queue_key._asdict(),
        )
        message = pb.GatewayMessage(router_id=request.gateway, enqueue=[waiting])
        return message.SerializeToString()

    def _receive(self, data: bytes) -> None:
        message = pb.GatewayMessage.FromString(data)
        self._cluster.leader_state.on_message(message.router_id, message, self._requests.now)

    def _dispatch(self) -> None:
        leader_state, now = self._cluster.leader_state, self._requests.now
        leader_state.note_workers(now)
        leader_state.expire(now)
        [placed] = leader_state.place(now, now, 1, lambda: 1)
        leader_state.on_dispatched(placed, placed.waiting.gateway)
        _dispatch_message(placed, leader_state.queued)
        self._cluster.placement.acknowledge(_WORKER, placed.epoch)
        output = pb.SessionOutput(session=placed.waiting.session, tokens=100)
        ended = pb.GatewayMessage(withdraw=[placed.waiting.request_id], session_outputs=[output])
        leader_state.on_message(placed.waiting.gateway, ended, now)


def _dispatch_message(placed: Placed, queued: int) -> bytes:
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
