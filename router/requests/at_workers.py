"""The requests of a gateway that workers have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from everlift.request_id import tenant_of
from router.requests.request import LiveRequest

#: Others that are looked at, those that came last, and of these the ones that are told.
_LOOKED_AT, _TOLD = 16, 8


class AtWorkers:
    """Finds them by epoch and by worker."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, LiveRequest] = {}
        #: no worker without any
        self._by_worker: dict[str, dict[int, LiveRequest]] = {}
        #: who came to each of these last, gone or not: epochs and names
        self._came: dict[str, deque[tuple[int, str]]] = {}

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
        came = self._came.setdefault(live.worker_id, deque(maxlen=_LOOKED_AT))
        came.append((live.epoch, live.request_id))

    def remove(self, epoch: int) -> LiveRequest | None:
        """Answers who it was."""
        live = self._by_epoch.pop(epoch, None)
        if live is not None:
            beside = self._by_worker[live.worker_id]
            del beside[epoch]
            if not beside:
                del self._by_worker[live.worker_id], self._came[live.worker_id]
        return live

    # whom a request hears of: some of its tenant's own, and nothing of others'

    def neighbours(self, request_id: str, worker_id: str) -> tuple[str, ...]:
        """Requests of its tenant that this worker has."""
        last = islice(reversed(self._by_worker.get(worker_id, {}).values()), _LOOKED_AT)
        return _own(request_id, (live.request_id for live in last))

    def occupants(self, request_id: str, worker_id: str) -> tuple[str, ...]:
        """Requests of its tenant that other workers have."""
        last = islice(reversed(self._by_epoch.values()), _LOOKED_AT)
        return _own(request_id, (live.request_id for live in last if live.worker_id != worker_id))

    def newcomers(self, live: LiveRequest) -> tuple[str, ...]:
        """Requests of its tenant that came to its worker since it did."""
        last = reversed(self._came.get(live.worker_id, ()))
        since = takewhile(lambda each: each[0] != live.epoch, last)
        return _own(live.request_id, (request_id for _, request_id in since))


def _own(request_id: str, others: Iterable[str]) -> tuple[str, ...]:
    """Each once, at most so many as are told."""
    tenant = tenant_of(request_id)
    own = (other for other in others if tenant_of(other) == tenant)
    return tuple(islice(dict.fromkeys(own), _TOLD))
