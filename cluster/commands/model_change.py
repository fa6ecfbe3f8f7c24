"""Progress of a worker's change to another model, as the status of the cluster shows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everlift.errors import InvalidRequest
from everlift.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class ModelChange:
    """Change of a worker's model to ``model``.

    The change is complete when a worker with a new id on the same host serves ``model``. ``worker``
    is the worker's status before the change; ``known`` has the ids of all workers at that time.
    """

    worker: pb.WorkerStatus
    model: str
    known: frozenset[str]

    def joined(self, status: pb.GetStatusResponse) -> str:
        """Return the new id under which a worker on the same host serves ``model``, or "".

        If a worker's process ends during the change, its replacement serves the model with which
        the ended process was started. The returned id may belong to such a replacement if it
        serves ``model``.

        Raises InvalidRequest if the change failed and the worker still serves its present model.
        Also raises InvalidRequest if another process on the host has joined with another model,
        because that process has probably replaced the worker.
        """
        for it in status.workers:
            if it.worker_id == self.worker.worker_id and it.change_error:
                raise InvalidRequest(f"the worker still serves {it.model}: {it.change_error}")
        joined = [it for it in status.workers if it.alive and it.worker_id not in self.known]
        here = [it for it in joined if _host(it) == _host(self.worker)]
        for it in here:
            if it.model == self.model:
                return it.worker_id
        for it in here:
            if it.pid != self.worker.pid:
                raise InvalidRequest(
                    f"{self.worker.worker_id} has not joined with {self.model}, but a new worker "
                    f"{it.worker_id} with {it.model} has: the process has probably ended, and its "
                    "log says why"
                )
        return ""


def _host(worker: pb.WorkerStatus) -> str:
    return worker.address.rpartition(":")[0]
