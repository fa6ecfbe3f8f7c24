"""What a router shows of its cluster."""

from __future__ import annotations

from everlift.v1 import inference_pb2 as pb
from router.fleet import Fleet
from router.gateway.model import ServedModel
from router.gateway.requests import Requests
from router.line import AdmissionLine
from router.sessions import Sessions, WorkerLink


class Status:
    def __init__(
        self,
        cluster_id: str,
        model: ServedModel,
        requests: Requests,
        sessions: Sessions,
        line: AdmissionLine,
        fleet: Fleet,
    ) -> None:
        self._cluster_id = cluster_id
        self._model = model
        self._requests = requests
        self._sessions = sessions
        self._line = line
        self._fleet = fleet

    def describe(self) -> pb.GetStatusResponse:
        workers = sorted(map(_worker, self._sessions.links), key=lambda w: w.worker_id)
        counters = self._requests.counters
        return pb.GetStatusResponse(
            cluster_id=self._cluster_id,
            model=self._model.name,
            leader=self._fleet.leader_id,
            workers=workers,
            queued=self._line.queued,
            running=sum(worker.num_running for worker in workers if worker.alive),
            completed=counters.completed,
            failed=counters.failed,
            migrated=counters.migrated,
            output_tokens=counters.output_tokens,
        )


def _worker(link: WorkerLink) -> pb.WorkerStatus:
    info, state = link.info, link.state
    return pb.WorkerStatus(
        worker_id=info.worker_id,
        address=info.address,
        pid=info.pid,
        alive=link.is_up,
        draining=state.draining,
        num_running=state.num_running,
        num_waiting=state.num_waiting,
        blocks_used=state.blocks_used,
        blocks_total=info.num_blocks,
        output_tokens=state.output_tokens,
        preemptions=state.preemptions,
        step=state.step,
        tensor_parallel=info.tensor_parallel,
        running=link.running,
        counters=state.counters,
        max_num_seqs=info.max_num_seqs,
    )
