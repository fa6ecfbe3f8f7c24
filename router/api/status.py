"""Status of the cluster as one router knows it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from everlift.v1 import inference_pb2 as pb
from router.auth.caller import Caller, Scope
from router.heartbeat import Heartbeat
from router.leader.client import LeaderClient
from router.leader.leader import Leader
from router.requests.manager import Requests
from router.requests.served_models import ServedModels
from router.worker_sessions import Sessions, WorkerLink


class Status:
    def __init__(
        self,
        cluster_id: str,
        models: ServedModels,
        requests: Requests,
        sessions: Sessions,
        leader_client: LeaderClient,
        heartbeat: Heartbeat,
        leader: Leader,
        metrics_address: str,
        http_address: str,
    ) -> None:
        self._cluster_id = cluster_id
        self._models = models
        self._requests = requests
        self._sessions = sessions
        self._leader_client = leader_client
        self._heartbeat = heartbeat
        self._leader = leader
        self._metrics_address = metrics_address
        self.http_address = http_address

    async def describe(self, caller: Caller) -> pb.GetStatusResponse:
        """Return the cluster's status; only administrators receive the ids of running requests.

        The counters from ``completed`` to ``recomputed_tokens`` include only this router's
        requests.
        """
        workers = sorted(map(self._worker, self._sessions.links), key=lambda w: w.worker_id)
        if Scope.ADMIN not in caller.scopes:
            for sequence in chain.from_iterable(worker.running for worker in workers):
                sequence.ClearField("request_id")
        counters = self._requests.counters
        return pb.GetStatusResponse(
            cluster_id=self._cluster_id,
            model=self._models.first.name,
            leader=self._heartbeat.leader_id,
            workers=workers,
            queued=self._leader_client.queued,
            running=sum(worker.num_running for worker in workers if worker.alive),
            completed=counters.completed,
            failed=counters.failed,
            migrated=counters.migrated,
            output_tokens=counters.output_tokens,
            preempted=counters.preempted,
            moved=counters.moved,
            recomputed_tokens=counters.recomputed_tokens,
            false_alarms=self._sessions.false_alarms,
            ledger=self._requests.ledger_status(),
            metrics_address=self._metrics_address,
            http_address=self.http_address,
            missing_workers=await self._requests.missing_workers(),
            models=[self._model(model.name, workers) for model in self._models],
        )

    def _model(self, name: str, workers: Iterable[pb.WorkerStatus]) -> pb.ModelStatus:
        alive = [worker for worker in workers if worker.alive and worker.model == name]
        estimate = self._requests.queue_estimates.get(name)
        return pb.ModelStatus(
            name=name,
            workers=len(alive),
            queued=0 if estimate is None else estimate.queued,
            running=sum(worker.num_running for worker in alive),
        )

    def _worker(self, link: WorkerLink) -> pb.WorkerStatus:
        worker, view = _worker(link), self._leader.view(link.info.worker_id)
        if view is not None:
            worker.step_s, worker.slow = view.throughput.step_s, view.is_slow
        return worker


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
        model=info.model,
        next_model=state.next_model,
        change_error=state.change_error,
        running=link.running,
        counters=state.counters,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        engine_policy=state.engine_policy,
        loaded_adapters=[it.name for it in link.adapters.adapters if not it.loading],
    )
