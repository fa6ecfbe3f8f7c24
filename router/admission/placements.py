"""Placement of each model's requests on the workers that serve the model. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping

from router.admission.placement import Placement
from router.admission.workers import Capacity, WorkerView
from router.config import RouterConfig


class Placements:
    """Placements by model; that of a model is created when a request or a worker names it."""

    def __init__(self, config: RouterConfig, placement_class: type[Placement] = Placement) -> None:
        self._config = config
        self._placement_class = placement_class
        self._tpot_target = config.tpot_target
        self._by_model: dict[str, Placement] = {}
        #: placement of each worker, by worker id
        self._by_worker: dict[str, Placement] = {}

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._by_model.values())

    def items(self) -> ItemsView[str, Placement]:
        return self._by_model.items()

    def __getitem__(self, model: str) -> Placement:
        if (placement := self._by_model.get(model)) is None:
            placement = self._by_model[model] = self._placement_class(self._config)
            placement.tpot_target = self._tpot_target
        return placement

    @property
    def models(self) -> tuple[str, ...]:
        """Models that have had a request or a worker."""
        return tuple(self._by_model)

    def of_worker(self, worker_id: str) -> Placement | None:
        """Return the placement of a connected worker; None if it is not connected."""
        return self._by_worker.get(worker_id)

    def view(self, worker_id: str) -> WorkerView | None:
        """Return the view of a worker; None if it is not connected."""
        placement = self._by_worker.get(worker_id)
        return None if placement is None else placement.workers[worker_id]

    @property
    def workers(self) -> Mapping[str, WorkerView]:
        """Views of the connected workers of all models, by worker id."""
        return {
            worker_id: placement.workers[worker_id]
            for worker_id, placement in self._by_worker.items()
        }

    def join(self, worker_id: str, model: str, capacity: Capacity) -> None:
        placement = self._by_worker[worker_id] = self[model]
        placement.join(worker_id, capacity)

    def remove_worker(self, worker_id: str) -> None:
        if (placement := self._by_worker.pop(worker_id, None)) is not None:
            placement.remove_worker(worker_id)

    def set_tpot_target(self, seconds: float) -> None:
        """Set the target time per output token for the workers of all models."""
        self._tpot_target = seconds
        for placement in self:
            placement.tpot_target = seconds

    def expire(self, now: float) -> None:
        """Apply ``Placement.expire`` to each placement."""
        for placement in self:
            placement.expire(now)
