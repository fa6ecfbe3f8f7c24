"""The requests of a gateway that workers have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from everlift.request_id import tenant_of
from router.gateway.live import LiveRequest

#: Neighbours that are looked at, those that came last, and of these the ones that are told.
_LOOKED_AT, _TOLD = 16, 8


class AtWorkers:
    """By their epochs."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, LiveRequest] = {}
        #: no worker without any
        self._by_worker: dict[str, dict[int, LiveRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_epoch)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._by_epoch.values())

    def get(self, epoch: int) -> LiveRequest | None:
        return self._by_epoch.get(epoch)

    def of(self, worker_id: str) -> list[LiveRequest]:
        return list(self._by_worker.get(worker_id, {}).values())

    def add(self, live: LiveRequest) -> None:
        self._by_epoch[live.epoch] = live
        self._by_worker.setdefault(live.worker_id, {})[live.epoch] = live

    def remove(self, epoch: int) -> LiveRequest | None:
        """Answers who it was."""
        live = self._by_epoch.pop(epoch, None)
        if live is not None:
            beside = self._by_worker[live.worker_id]
            del beside[epoch]
            if not beside:
                del self._by_worker[live.worker_id]
        return live

    def neighbours(self, request_id: str, worker_id: str) -> tuple[str, ...]:
        """Of its tenant, some of those that a worker has: a tenant is told nothing of others'."""
        tenant = tenant_of(request_id)
        last = islice(reversed(self._by_worker.get(worker_id, {}).values()), _LOOKED_AT)
        own = (live.request_id for live in last if tenant_of(live.request_id) == tenant)
        return tuple(islice(own, _TOLD))
