"""Operations on the LoRA adapters of the cluster, for operators."""

from __future__ import annotations

from collections.abc import Sequence

from everlift import logs
from everlift.adapters import AdapterSource
from everlift.errors import InvalidRequest, NoWorker, UnknownModel
from everlift.v1 import admin_pb2 as pb
from everlift.v1 import session_pb2
from router.leader.adapter_catalogue import AdapterEntry
from router.leader.policy_store import RuntimePolicy
from router.requests.served_models import ServedModels
from router.worker_sessions import Sessions, WorkerLink

log = logs.get_logger(__name__)


class Adapters:
    def __init__(self, models: ServedModels, policy: RuntimePolicy, sessions: Sessions) -> None:
        self._models = models
        self._policy = policy
        self._sessions = sessions

    async def load(self, name: str, location: str, model: str = "") -> pb.AdapterInfo:
        """Add an adapter of ``model`` or a new version of one, and return its description.

        A worker of the model checks the adapter first. An empty ``model`` stands for the model of
        the adapter's present version, or for the first served model if the adapter is new.

        Raises InvalidRequest if the name or the location is malformed, if the name is taken, or if
        the worker cannot load the files. Raises UnknownModel if the model is not served, or
        RouterStopping instead during a replacement of models. Raises NoWorker if no worker of the
        model is connected, UnknownWorker if the worker does not answer, and LedgerUnavailable.
        """
        source, known = self._source(name, location), self._policy.adapters.get(name)
        chosen = self._models.requested(model or (known.model if known is not None else "")).name
        if known is not None and known.model != chosen:
            raise InvalidRequest(
                f"the name {name!r} belongs to an adapter of {known.model!r}: unload that one "
                "first",
                field="model",
            )
        link = self._worker(chosen)
        answer = await link.check_adapter(str(source))
        if answer.error:
            raise InvalidRequest(answer.error, field="source")
        before = self._policy.adapters.get(name)
        entry = AdapterEntry(link.info.model, answer.source, answer.digest)
        await self._policy.set_adapter(name, entry)
        log.info("adapter added", source=entry.source, digest=entry.digest)
        load = session_pb2.AdapterLoad(source=entry.source, digest=entry.digest)
        is_new = before is not None and before.digest != entry.digest
        self._change(entry.model, load, [before.digest] if before is not None and is_new else [])
        return self._info(name)

    async def unload(self, name: str) -> None:
        """Remove an adapter that was added with ``load``.

        Raises UnknownModel if no adapter or model has the name. Raises InvalidRequest if the name
        is that of a model or of an adapter in the settings. Raises LedgerUnavailable.
        """
        entry = self._policy.adapters.get(name)
        if entry is None:
            if self._models.is_configured(name):
                raise InvalidRequest(
                    f"{name!r} is in the settings of the cluster: remove it there",
                    field="name",
                )
            raise UnknownModel(f"no adapter {name!r} is loaded", field="name")
        await self._policy.set_adapter(name, None)
        log.info("adapter removed", source=entry.source, digest=entry.digest)
        self._change(entry.model, None, [entry.digest])

    def all(self) -> Sequence[pb.AdapterInfo]:
        """Return the adapters of the cluster, sorted by name."""
        return [self._info(name) for name in sorted(n for it in self._models for n in it.adapters)]

    def _source(self, name: str, location: str) -> AdapterSource:
        try:
            source = AdapterSource.parse(f"{name}={location}")
        except ValueError as error:
            raise InvalidRequest(f"an adapter {error}", field="source") from None
        if self._models.is_configured(name):
            raise InvalidRequest(
                f"the name {name!r} belongs to a model or to an adapter of the settings",
                field="name",
            )
        return source

    def _worker(self, model: str) -> WorkerLink:
        links = [link for link in self._sessions.links if link.is_up and link.info.model == model]
        if not links:
            raise NoWorker(
                f"no worker of {model!r} is connected that could check the adapter: try again"
            )
        return max(links, key=lambda link: link.info.adapter_slots)

    def _change(
        self, model: str, load: session_pb2.AdapterLoad | None, unload: Sequence[str]
    ) -> None:
        for link in self._sessions.links:
            if link.is_up and link.info.model == model and link.info.adapter_slots:
                link.change_adapters(load, unload)

    def _info(self, name: str) -> pb.AdapterInfo:
        model = self._models.requested(name)
        digest, source = model.adapter_digests[name], model.adapters[name]
        return pb.AdapterInfo(
            name=name,
            model=model.name,
            source=str(source).partition("=")[2],
            digest=digest,
            configured=name not in self._policy.adapters,
            workers=[
                link.info.worker_id
                for link in self._sessions.links
                if link.is_up
                if any(it.digest == digest and not it.loading for it in link.adapters.adapters)
            ],
        )
