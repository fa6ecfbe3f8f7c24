"""Models that a cluster serves, by the names that clients and the ledger use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from everlift.errors import InvalidRequest, RouterStopping, SettingsError, UnknownModel
from everlift.messages import Request, Submission
from everlift.v1 import session_pb2
from router.leader.adapter_catalogue import AdapterEntry
from router.requests.splicing import Turn
from router.requests.tokenizer import ServedModel


class ServedModels:
    """Models of a cluster; requests that name no model are for the first one."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """Create the catalogue. Raises SettingsError if two models have a name in common."""
        self._by_name: dict[str, ServedModel] = {}
        #: models by the names that clients may use, including those of aliases and adapters
        self._by_client_name: dict[str, ServedModel] = {}
        for model in models:
            for name in model.names:
                if name in self._by_client_name:
                    raise SettingsError(f"two models of the cluster have the name {name!r}")
                self._by_client_name[name] = model
            self._by_name[model.name] = model
        self._configured = dict(self._by_client_name)
        #: whether clients are directed to these models and not to another cluster (router.active)
        self.is_active = True
        #: whether requests for another cluster's model may arrive, because this cluster is inactive
        #: or was activated a moment ago
        self.is_switching = False

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    @property
    def first(self) -> ServedModel:
        return next(iter(self))

    @property
    def names(self) -> list[str]:
        """Return all names that clients may use, those of the first model first."""
        return [*self._by_client_name]

    def requested(self, name: str) -> ServedModel:
        """Return the model that clients ask for by ``name``; the first model if ``name`` is empty.

        Raises UnknownModel if no model has the name. Raises RouterStopping instead while this
        cluster replaces another or is replaced (``is_switching``), because the other cluster may
        serve the model.
        """
        if not name:
            return self.first
        if (model := self._by_client_name.get(name)) is not None:
            return model
        names = self.names
        served = " or ".join(map(repr, names))
        is_are = "served model is" if len(names) == 1 else "served models are"
        cause = f"the model {name!r} is not served; the {is_are} {served}"
        if self.is_switching:
            raise RouterStopping(f"{cause}, and one model is replacing another: try again")
        raise UnknownModel(cause, field="model")

    def set_catalogue(self, entries: Mapping[str, AdapterEntry]) -> None:
        """Serve the adapters that operators have loaded, besides those of the settings."""
        free = {name: entry for name, entry in entries.items() if not self.is_configured(name)}
        for model in self:
            model.set_catalogue(free)
        self._by_client_name = {name: model for model in self for name in model.names}

    def is_configured(self, name: str) -> bool:
        """Return whether ``name`` is a name of a model, or of an adapter of the settings."""
        return name in self._configured

    def canonical_name(self, name: str) -> str:
        """Return the name of the model for which a client asks; empty for an unknown model."""
        model = self._by_client_name.get(name) if name else self.first
        return "" if model is None else model.name

    def find(self, request: Request) -> ServedModel | None:
        """Return the model of an accepted or stored request; None if it is no longer served."""
        return self._by_name.get(request.model)

    def of(self, request: Request) -> ServedModel:
        """Return the model of an accepted or stored request.

        Raises UnknownModel if it is no longer served.
        """
        if (model := self.find(request)) is None:
            raise UnknownModel(f"the model {request.model!r} is no longer served")
        return model

    def resolve(self, submission: Submission, turns: Sequence[Turn] = ()) -> Request:
        """Return a submission's request, completed and checked by its model.

        ``turns`` are earlier turns of the submission's session. Raises the errors of ``requested``
        and of ``ServedModel.resolve``.
        """
        return self.requested(submission.model).resolve(submission, turns)

    def assume_limits(self, last: Iterable[session_pb2.WorkerInfo]) -> None:
        """Use the limits that earlier workers announced, until a worker of the model is connected.

        ``last`` has, for each model, the worker that was added to the ledger last, even if that
        worker is gone. Workers of models that the cluster does not serve are ignored.
        """
        for worker in last:
            if (model := self._by_name.get(worker.model)) is not None:
                model.assume_limit(worker)

    def update_limits(self, workers: Sequence[session_pb2.WorkerInfo]) -> None:
        """Use the limits, the fingerprints and the adapters of the connected workers."""
        for model in self:
            model.update_limits([worker for worker in workers if worker.model == model.name])

    def check_worker(self, info: session_pb2.WorkerInfo) -> None:
        """Raise InvalidRequest if a worker serves a model that is not the cluster's."""
        if info.model not in self._by_name:
            served = " or ".join(map(repr, self._by_name))
            raise InvalidRequest(
                f"worker {info.worker_id} has the model {info.model!r}; the cluster serves {served}"
            )
