"""gRPC servers of ``everlift.v1.Admin`` and ``Chaos``, for operators.

Any router of the cluster accepts these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc

from everlift import logs
from everlift.errors import InvalidRequest, LedgerUnavailable, SettingsError, UnknownWorker
from everlift.v1 import admin_pb2 as pb
from everlift.v1 import chaos_pb2, session_pb2
from router.admission.workers import Connected, WorkerView, capacity
from router.api.adapters import Adapters
from router.api.grpc.handlers import Call, Handlers, parse
from router.auth.caller import Authenticator, Scope
from router.faults.injector import Chaos
from router.id_prefix import find_id
from router.leader.policy_store import RuntimePolicy
from router.ledger.base import Ledger
from router.requests.served_models import ServedModels
from router.worker_sessions import Sessions, WorkerLink

log = logs.get_logger(__name__)

#: Age in seconds from which the leader's load report is ignored. The leader renews it five times a
#: second.
_STALE_S = 5.0


class AdminServer:
    def __init__(
        self,
        sessions: Sessions,
        runtime_policy: RuntimePolicy,
        ledger: Ledger,
        view: Callable[[str], WorkerView | None],
        adapters: Adapters,
        models: ServedModels,
        is_scaled: Callable[[str], bool],
    ) -> None:
        """Create the server.

        ``view`` maps a worker id to what this router knows about the worker's load and speed, or to
        None if the worker is not connected. ``is_scaled`` returns whether an autoscaler sets the
        number of a model's workers.
        """
        self._sessions = sessions
        self._runtime_policy = runtime_policy
        self._ledger = ledger
        self._view = view
        self._adapters = adapters
        self._models = models
        self._is_scaled = is_scaled

    async def _drain(self, data: bytes, call: Call) -> pb.DrainResponse:
        return self.drain(parse(pb.DrainRequest, data))

    def drain(self, message: pb.DrainRequest) -> pb.DrainResponse:
        """Drain the worker whose id begins with ``message.worker_id``.

        Raises UnknownWorker if no connected worker or more than one has such an id.
        """
        worker_id = self._worker(message.worker_id)
        num_running = self._sessions.drain(worker_id)
        log.info("worker draining", worker_id=worker_id, num_running=num_running)
        return pb.DrainResponse(worker_id=worker_id, num_running=num_running)

    async def _change_model(self, data: bytes, call: Call) -> pb.ChangeModelResponse:
        return self.change_model(parse(pb.ChangeModelRequest, data))

    def change_model(self, message: pb.ChangeModelRequest) -> pb.ChangeModelResponse:
        """Change the model of the worker whose id begins with ``message.worker_id``.

        Raises UnknownWorker if no connected worker or more than one has such an id. Raises
        UnknownModel if the cluster does not serve the model, or RouterStopping instead while one
        model replaces another. Raises InvalidRequest if no model is given, if the worker cannot
        change to the model, or if the worker is draining or already changing its model. Raises
        InvalidRequest also if an autoscaler sets the number of workers of one of the two models.
        """
        worker_id = self._worker(message.worker_id)
        if not message.model:
            raise InvalidRequest("model must be set", field="model")
        model = self._models.requested(message.model).name
        models = {link.info.worker_id: link.info.model for link in self._sessions.links}
        for name in (models[worker_id], model):
            if self._is_scaled(name):
                raise InvalidRequest(
                    f"the autoscaler sets the number of workers of {name!r} and would undo the "
                    "change: set num_workers instead of autoscale.max_workers",
                    field="model",
                )
        num_running = self._sessions.change_model(worker_id, model)
        log.info("worker changes its model", worker_id=worker_id, model=model)
        return pb.ChangeModelResponse(worker_id=worker_id, num_running=num_running, model=model)

    def _worker(self, beginning: str) -> str:
        alive = (link.info.worker_id for link in self._sessions.links if link.is_up)
        worker_id = find_id(beginning, alive)
        if worker_id is None:
            raise UnknownWorker(f"no worker with the id {beginning!r} is connected")
        return worker_id

    async def _set_policy(self, data: bytes, call: Call) -> pb.SetPolicyResponse:
        return await self.set_policy(parse(pb.SetPolicyRequest, data))

    async def set_policy(self, message: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
        """Change the runtime policy, and return the policy that is then in effect.

        Raises InvalidRequest for an invalid value, and LedgerUnavailable.
        """
        changes = {field.name: value for field, value in message.ListFields()}
        changes |= dict.fromkeys(changes.pop("reset", ()))
        try:
            effective_settings = await self._runtime_policy.set(changes)
        except SettingsError as error:
            raise InvalidRequest(str(error)) from None
        return pb.SetPolicyResponse(
            **effective_settings.values, overridden=effective_settings.overridden
        )

    async def capacity(self, data: bytes, call: Call) -> pb.CapacityResponse:
        parse(pb.CapacityRequest, data)
        load = await self._load()
        return capacity(load, self._connected())

    async def _load_adapter(self, data: bytes, call: Call) -> pb.LoadAdapterResponse:
        message = parse(pb.LoadAdapterRequest, data)
        return pb.LoadAdapterResponse(
            adapter=await self._adapters.load(message.name, message.source, message.model)
        )

    async def _unload_adapter(self, data: bytes, call: Call) -> pb.UnloadAdapterResponse:
        await self._adapters.unload(parse(pb.UnloadAdapterRequest, data).name)
        return pb.UnloadAdapterResponse()

    async def _list_adapters(self, data: bytes, call: Call) -> pb.ListAdaptersResponse:
        parse(pb.ListAdaptersRequest, data)
        return pb.ListAdaptersResponse(adapters=self._adapters.all())

    def kinds(self) -> Sequence[pb.WorkerKind]:
        """Return the kinds of the connected workers that are not draining, most frequent first."""
        return capacity(None, self._connected()).kinds

    def _connected(self) -> list[Connected]:
        return [self._connected_worker(link) for link in self._sessions.links if link.is_up]

    def _connected_worker(self, link: WorkerLink) -> Connected:
        view = self._view(link.info.worker_id)
        return Connected(link.info, link.state, None if view is None else view.step_time)

    async def _load(self) -> session_pb2.ClusterLoad | None:
        try:
            report = await self._ledger.load()
        except LedgerUnavailable:
            # The workers' capacity is known even without the load report.
            return None
        return report.load if report is not None and report.age_s < _STALE_S else None

    def handlers(self, authenticator: Authenticator) -> grpc.GenericRpcHandler:
        """Return the handlers to add to a gRPC server."""
        handlers = Handlers(authenticator)
        methods = {
            "Drain": handlers.unary(self._drain, Scope.ADMIN),
            "ChangeModel": handlers.unary(self._change_model, Scope.ADMIN),
            "SetPolicy": handlers.unary(self._set_policy, Scope.ADMIN),
            "Capacity": handlers.unary(self.capacity, Scope.METRICS, Scope.ADMIN),
            "LoadAdapter": handlers.unary(self._load_adapter, Scope.ADMIN),
            "UnloadAdapter": handlers.unary(self._unload_adapter, Scope.ADMIN),
            "ListAdapters": handlers.unary(self._list_adapters, Scope.METRICS, Scope.ADMIN),
        }
        name = pb.DESCRIPTOR.services_by_name["Admin"].full_name
        return grpc.method_handlers_generic_handler(name, methods)


class ChaosServer:
    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos

    async def inject(self, data: bytes, call: Call) -> chaos_pb2.InjectResponse:
        return chaos_pb2.InjectResponse(
            target=await self._chaos.inject(parse(chaos_pb2.Fault, data))
        )

    def handlers(self, authenticator: Authenticator) -> grpc.GenericRpcHandler:
        """Return the handlers to add to a gRPC server."""
        methods = {"Inject": Handlers(authenticator).unary(self.inject, Scope.ADMIN)}
        name = chaos_pb2.DESCRIPTOR.services_by_name["Chaos"].full_name
        return grpc.method_handlers_generic_handler(name, methods)
