"""Router replica: construction, start and stop of its parts."""

from __future__ import annotations

import asyncio
import errno
import secrets
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from starlette.types import ASGIApp

from everlift import logs, model_files
from everlift.adapters import parse_adapters
from everlift.address import join_host_port
from everlift.certificates import server_context
from everlift.channels import SERVER_OPTIONS
from everlift.errors import LedgerUnavailable
from everlift.transport import Transport, internal
from everlift.v1 import session_pb2, session_pb2_grpc
from router import event_loop
from router.active import ActiveModel, Connections
from router.api.adapters import Adapters
from router.api.anthropic.messages import Messages
from router.api.chat_renderer import ChatRenderer
from router.api.grpc.admin_server import AdminServer, ChaosServer
from router.api.grpc.handlers import service_name
from router.api.grpc.health_server import HealthServer, ReflectionServer
from router.api.grpc.inference_server import InferenceServer
from router.api.http.endpoint import Handler
from router.api.http.server import HttpServer
from router.api.http2 import Limits, Server
from router.api.http_api import Api
from router.api.kserve.server import KserveServer
from router.api.openai.adapters import AdapterPaths
from router.api.openai.answering import Answering
from router.api.openai.batches.batches import Batches
from router.api.openai.batches.execution import Execution
from router.api.openai.batches.run import Parts
from router.api.openai.batches.runners import Runners
from router.api.openai.batches.stored import StoredBatches
from router.api.openai.batches.window import Window
from router.api.openai.conversations.conversations import Conversations
from router.api.openai.conversations.stored import StoredConversations
from router.api.openai.explaining import Explaining
from router.api.openai.files.files import Files
from router.api.openai.files.stored import StoredFiles
from router.api.openai.responses.responses import Responses
from router.api.openai.responses.stored import StoredResponses
from router.api.openai.texts import Texts
from router.api.service import Inference
from router.api.status import Status
from router.auth.access import Access, store_of
from router.auth.caller import OPEN, Authenticator
from router.auth.quotas import unlimited
from router.chat.templates import ChatTemplate
from router.config import ModelConfig, RouterConfig, exposures
from router.console.actions import Actions
from router.console.console import Console
from router.console.counting import Counting
from router.console.counts import MeasuredRequests, Peers
from router.console.parts import Identity
from router.console.snapshot import Snapshot
from router.faults.injector import Chaos
from router.heartbeat import Heartbeat
from router.internal_server import InternalServer
from router.leader.adapter_catalogue import catalogue_of
from router.leader.client import LeaderClient
from router.leader.leader import Leader
from router.leader.policy_store import RuntimePolicy
from router.ledger.base import Ledger
from router.ledger.config import DEFAULTS as LEDGER_DEFAULTS
from router.ledger.config import LedgerConfig
from router.observability.metrics.collector import StateCollector
from router.observability.metrics.http_server import MetricsServer
from router.observability.metrics.instruments import Instruments, timed
from router.observability.metrics.vllm import VllmCollector
from router.observability.traces.exporter import otlp
from router.observability.traces.traces import Traces
from router.prediction.file import PredictorFile
from router.replaced_workers import replaced_workers
from router.requests.manager import Requests
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel
from router.worker_sessions import Sessions

log = logs.get_logger(__name__)

#: Seconds for which a thread may hold Python's global interpreter lock while the event loop waits
#: for it. Python's default of 5 ms delays tokens noticeably when threads process long prompts.
_SWITCH_INTERVAL_S = 1e-3


class Router:
    """Router replica: ``start`` creates it, and ``stop`` ends it."""

    def __init__(
        self,
        config: RouterConfig,
        ledger: Ledger,
        models: ServedModels,
        transport: Transport | None,
        ledger_config: LedgerConfig,
        access: Access | None = None,
    ) -> None:
        """Create the router without starting it; clients need no API key if ``access`` is None.

        Raises SettingsError for an unusable setting, for example a missing certificate file.
        """
        self.config = config
        self._ledger_config = ledger_config
        self._context = server_context(config.tls, ["h2"]) if config.tls else None
        self._transport = transport or internal(config.internal_tls)
        self.router_id = secrets.token_hex(8)
        endpoint = config.trace_endpoint
        exporter = otlp(endpoint, self.router_id) if endpoint else None
        self._traces = Traces(ledger, exporter, config.trace_sample)
        self.address = self.internal_address = ""
        #: models whose number of workers an autoscaler sets
        self._scaled_models: set[str] = set()
        #: by model: the workers that this cluster wants
        self._demands = {it.name: session_pb2.WorkerDemand(model=it.name) for it in models}
        self._instruments = Instruments([model.name for model in models])
        self._metrics = MetricsServer(self._instruments.registry)
        self._http = HttpServer()
        self._ledger = ledger
        self._access = access
        self._models = models
        self._templates = {
            model.name: template
            for model, its in zip(models, config.models, strict=True)
            if model.directory and (template := ChatTemplate.load(model.directory, config, its))
        }
        limits = Limits(max_message_bytes=config.max_message_bytes)
        self._public = Server(limits) if transport is None else transport.server(SERVER_OPTIONS)
        self._internal = self._transport.server(SERVER_OPTIONS)
        self._predictor_files: list[PredictorFile] = []
        self._console: Console | None = None
        self._runners: Runners | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: RouterConfig,
        ledger: Ledger,
        transport: Transport | None = None,
        ledger_config: LedgerConfig = LEDGER_DEFAULTS,
    ) -> Self:
        """Start a replica, and return it when it serves.

        A ``transport`` replaces gRPC and its TLS. ``ledger_config`` are the settings with which
        ``ledger`` was opened. Raises ModelUnavailable or UnknownModel if the model is not found or
        cannot be used, LedgerUnavailable, SettingsError for an unusable setting, and OSError if a
        port is in use.
        """
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        models = ServedModels([await _load_model(config, each) for each in config.models])
        models.is_active = await ledger.is_active()
        models.assume_limits(await ledger.last_workers())
        models.set_catalogue(catalogue_of((await ledger.policy()).values))
        store = store_of(config, ledger)
        access = await Access.open(store) if store is not None else None
        router = cls(config, ledger, models, transport, ledger_config, access)
        await router._start_servers(await ledger.cluster_id())
        return router

    async def _start_servers(self, cluster_id: str) -> None:
        config = self.config
        # Ports are bound first, because this can be undone if one of them is in use.
        with _naming("metrics_port", config.metrics_host, config.metrics_port):
            await self._metrics.start(config.metrics_host, config.metrics_port)
        try:
            await self._bind()
        except OSError:
            await self._http.stop(0)
            await self._metrics.stop()
            self._traces.close()
            raise
        self._wire(cluster_id)
        await self._internal.start()
        await self._public.start()
        await self._http.start(self._api())
        if self.http_address:
            for template in self._templates.values():
                template.start()
        self._metrics.readiness = self._requests
        for line in exposures(config, has_keys=config.access != "off"):
            log.warning(line, host=config.host, internal_host=config.internal_host)
        log.info("router ready", router_id=self.router_id, address=self.address)

    async def _bind(self) -> None:
        config = self.config
        context = server_context(config.tls, ["http/1.1"]) if config.tls else None
        with _naming("http_port", config.http_host, config.http_port):
            await self._http.bind(config.http_host, config.http_port, context)
        with _naming("port", config.host, config.port):
            port = self._listen_to_clients(join_host_port(config.host, config.port))
        self.address = join_host_port(config.host, port)
        host = config.internal_host
        with _naming("internal_port", host, config.internal_port):
            port = self._transport.listen(
                self._internal, join_host_port(host, config.internal_port)
            )
        self.internal_address = join_host_port(host, port)

    def _listen_to_clients(self, address: str) -> int:
        if not isinstance(self._public, Server):
            return self._transport.listen(self._public, address)
        try:
            if self._context is None:
                return self._public.add_insecure_port(address)
            return self._public.add_secure_port(address, self._context)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    # construction of the parts

    def _wire(self, cluster_id: str) -> None:
        ledger = timed(self._ledger, self._instruments)
        self._wire_queue(cluster_id, ledger)
        self._wire_requests(ledger)
        self._wire_membership(ledger)
        self._serve(cluster_id)
        self._collect()
        self._run()

    def _wire_queue(self, cluster_id: str, ledger: Ledger) -> None:
        config = self.config
        hello = session_pb2.RouterHello(router_id=self.router_id, cluster_id=cluster_id)
        self._sessions = Sessions(config, hello, self, self._transport)
        weight_of = self._access.weight_of if self._access else None
        self._leader = Leader(config, self.router_id, self.internal_address, ledger, weight_of)
        self._leader_client = LeaderClient(self.router_id, self._leader, self._transport)
        for demand in self._demands.values():
            self._leader_client.report_demand(demand)

    def _wire_requests(self, ledger: Ledger) -> None:
        config = self.config
        connections: list[Connections] = [self._http]
        if isinstance(self._public, Server):
            connections.append(self._public)
        self._active = ActiveModel(ledger, self._models, connections)
        self._requests = Requests(
            config,
            self.router_id,
            ledger,
            self._models,
            self._sessions,
            self._leader_client,
            self._ledger_config,
            self._instruments,
            self._traces,
            self._access.limits_of if self._access else unlimited,
        )
        self._leader_client.serve(self._requests)
        for model, its in zip(self._models, config.models, strict=True):
            if its.predictor:
                load = self._requests.predictors[model.name].load
                self._predictor_files.append(PredictorFile(Path(its.predictor), load))

    def _wire_membership(self, ledger: Ledger) -> None:
        listeners = self._leader, self._requests
        self._runtime_policy = RuntimePolicy(
            self.config, ledger, listeners, [self._sessions], [self._models]
        )
        self._heartbeat = Heartbeat(
            self.config,
            self.router_id,
            self.internal_address,
            ledger,
            self._sessions,
            self._leader,
            self._leader_client,
            self._requests,
            self._runtime_policy,
        )
        self._adapters = Adapters(self._models, self._runtime_policy, self._sessions)
        self._admin = AdminServer(
            self._sessions,
            self._runtime_policy,
            self._ledger,
            self._leader.view,
            self._adapters,
            self._models,
            lambda model: model in self._scaled_models,
        )
        self._inference = Inference(self._requests, self._models, self._transport, self._traces)

    def _run(self) -> None:
        optional_parts = self._access, *self._predictor_files, self._console
        for work in (
            self._leader.run(),
            self._heartbeat.run(),
            self._active.run(),
            self._requests.attempts.run(),
            self._requests.quotas.run(),
            event_loop.report(),
            *(part.run() for part in optional_parts if part is not None),
        ):
            self._tasks.append(asyncio.create_task(_guarded(work)))

    def _serve(self, cluster_id: str) -> None:
        server = InferenceServer(self._inference, self._status(cluster_id))
        chaos = Chaos(
            self.config,
            self.router_id,
            self._ledger,
            self._sessions,
            self._heartbeat,
            self._transport,
        )
        authenticator = self._authenticator
        services = (
            server.handlers(authenticator),
            KserveServer(self._inference, self._requests, self._models).handlers(authenticator),
            self._admin.handlers(authenticator),
            ChaosServer(chaos).handlers(authenticator),
        )
        names = [*map(service_name, services)]
        health = HealthServer(self._requests, names).handlers()
        reflection = ReflectionServer([*names, service_name(health)])
        self._public.add_generic_rpc_handlers((*services, health, *reflection.handlers()))
        # Other routers relay their clients' Attach and Cancel to the router that has the request.
        self._internal.add_generic_rpc_handlers((server.handlers(OPEN),))
        session_pb2_grpc.add_RouterInternalServicer_to_server(
            InternalServer(self._heartbeat, self._leader, chaos, self._counting()), self._internal
        )
        if self.config.console and self.config.http_host:
            self._console = self._open_console(chaos)

    def _status(self, cluster_id: str) -> Status:
        return Status(
            cluster_id,
            self._models,
            self._requests,
            self._sessions,
            self._leader_client,
            self._heartbeat,
            self._leader,
            self.metrics_address,
            self.http_address,
        )

    def _open_console(self, chaos: Chaos) -> Console:
        config, has_access = self.config, self._access is not None
        chats = [name for name, template in self._templates.items() if template.is_models]
        names = [model.name for model in self._models]
        identity = Identity(self.router_id, names, config.chaos, has_access, chats)
        snapshot = Snapshot(
            identity,
            self._sessions,
            self._requests,
            self._leader,
            self._leader_client,
            self._heartbeat,
            self._runtime_policy,
            MeasuredRequests(self._instruments),
        )
        actions = Actions(self._inference, self._admin, chaos, has_access=has_access)
        peers = Peers(self.router_id, self._ledger, self._transport)
        return Console(snapshot, actions, self._authenticator, self._ledger, peers)

    def _counting(self) -> Counting:
        measured = MeasuredRequests(self._instruments)
        return Counting(self.router_id, self._sessions, self._requests, measured)

    def _api(self) -> ASGIApp:
        config, models = self.config, self._models
        renderer = ChatRenderer(self._templates, accepts_templates=config.allow_chat_template)
        answering = Answering(config, self._inference, models, renderer)
        stored = StoredResponses(self._inference, renderer, models)
        conversations = StoredConversations(self._ledger, stored, self._requests.ledger_time)
        responses = Responses(answering, self._inference, renderer, models, stored, conversations)
        files, batches = self._open_batches(answering, responses)
        api = Api(
            self._authenticator,
            answering,
            Messages(answering, renderer, models),
            responses,
            Conversations(conversations),
            Texts(models, renderer),
            Explaining(self._inference),
            models,
            self._requests,
            self._metrics,
            AdapterPaths(self._adapters),
            config.max_body_bytes,
            self._console.paths() if self._console is not None else (),
            files,
            batches,
        )
        return api.app(config.cors_origins)

    def _open_batches(
        self, answering: Answering, responses: Responses
    ) -> tuple[Files | None, Batches | None]:
        """Create the handlers of files and batches, and run batches from now on.

        Return None for both if they are disabled.
        """
        config, ledger, ledger_time = self.config, self._ledger, self._requests.ledger_time
        if not config.files_mib:
            return None, None
        kept_s = config.file_retention
        files = StoredFiles(ledger, ledger_time, kept_s, config.files_mib << 20)
        stored = StoredBatches(ledger, ledger_time, kept_s)
        handlers: Mapping[str, Handler] = {
            "/v1/chat/completions": answering.chat,
            "/v1/completions": answering.completions,
            "/v1/responses": responses.create,
        }
        execution = Execution(self._inference, handlers)
        window = Window(self._batch_window)
        limits_of = self._access.limits_of if self._access else unlimited
        parts = Parts(stored, files, execution, window, config.max_body_bytes, limits_of)
        self._runners = Runners(parts, ledger, self.router_id)
        self._tasks.append(asyncio.create_task(_guarded(self._runners.run())))
        return Files(files, stored, ledger), Batches(stored, files, ledger, self._runners.notify)

    def _batch_window(self) -> int:
        """Return how many lines of batches may be in progress at a time.

        This is twice the number of slots, so that each free slot has a line that waits for it.
        """
        slots = sum(link.info.max_num_seqs for link in self._sessions.links if link.is_up)
        return max(2 * slots, 1)

    @property
    def _authenticator(self) -> Authenticator:
        return self._access or OPEN

    @property
    def leader(self) -> Leader:
        """Leader loop of this replica, which exists whether this replica leads or not."""
        return self._leader

    @property
    def http_address(self) -> str:
        """Address of the OpenAI API; empty if the API is disabled."""
        return self._http.address

    @property
    def metrics_address(self) -> str:
        """Address of the metrics; empty if they are disabled."""
        return self._metrics.address

    def _collect(self) -> None:
        instruments, parts = self._instruments, (self._requests, self._sessions, self._leader)
        instruments.registry.register(StateCollector(*parts))
        if self.config.vllm_metrics:
            instruments.registry.register(VllmCollector(self._models, instruments, *parts))

    # calls of the deployment

    async def announce(self, info: session_pb2.WorkerInfo) -> None:
        self._models.check_worker(info)
        await self._heartbeat.announce(info)

    def worker_starts(self, start: session_pb2.WorkerStart) -> None:
        self._heartbeat.worker_starts(start)

    async def num_workers(self) -> dict[str, int]:
        """Return the number of workers of each model that are connected to this router.

        The number also includes the workers of another cluster that the model's workers are to
        replace (``replaced_workers``), while that cluster is active (router/active.py). Raises
        LedgerUnavailable.
        """
        names = [model.name for model in self._models]
        connected = Counter(link.info.model for link in self._sessions.links if link.is_up)
        active = await self._ledger.active_load()
        replaced = replaced_workers(active.load if active else session_pb2.ClusterLoad(), names)
        return {name: connected[name] + replaced[name] for name in names}

    async def activate(self) -> None:
        """Make this cluster the active one, whose routers serve the clients (router/active.py).

        The call has no effect if the setting ``ledger.active_key`` is empty. Raises
        LedgerUnavailable.
        """
        await self._ledger.activate()

    def reconfigure(
        self,
        config: RouterConfig,
        autoscale: Mapping[str, Mapping[str, float]],
        num_workers: Mapping[str, int | None],
    ) -> None:
        """Apply run-time settings of the router and the autoscalers, and the numbers of workers.

        Only those settings of ``config`` that operators may change at run time are applied. The
        leader stores ``autoscale``, by model, in its load report, where the autoscalers read it.
        ``num_workers`` is the number of workers of each model that the cluster is to have; None if
        the model's autoscaler decides it.
        """
        self._runtime_policy.configure(config)
        self._leader.autoscale = autoscale
        for model, number in num_workers.items():
            demand = self._demands[model]
            if number is None:
                self._scaled_models.add(model)
                demand.ClearField("workers")
            else:
                self._scaled_models.discard(model)
                demand.workers = number
            self._leader_client.report_demand(demand)

    def place(self, ray_cluster: str, unplaced: Mapping[str, tuple[int, str]]) -> None:
        """Report to the leader how many workers of each model Ray cannot place.

        Args:
            ray_cluster: Name of the Ray cluster, as in the WorkerInfo of its workers.
            unplaced: By model, the number of workers that wait for resources, and the reason why
                one of them cannot be placed; the reason is empty if no worker waits.
        """
        for model, (number, cause) in unplaced.items():
            demand = self._demands[model]
            demand.ray_cluster = ray_cluster
            demand.unplaced, demand.unplaced_cause = number, cause
            self._leader_client.report_demand(demand)

    async def wait(self) -> None:
        """Wait until a background task of the router fails, and raise its error.

        Return without an error if the router is stopped. Cancellation ends only the wait, not the
        router.
        """
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        self.check()

    def check(self) -> None:
        """Raise the error of a background task of the router that has failed, if any."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """Stop the router: let requests finish, then hand over the rest to other routers.

        The router resigns as the leader, lets streams finish for up to ``drain`` seconds, and ends
        its lease. Further calls wait until the first one has stopped the router.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await self._stopping

    async def _stop(self) -> None:
        log.info("router stopping", router_id=self.router_id, requests=len(self._requests))
        if self._runners is not None:
            await self._runners.stop()
        await asyncio.gather(self._requests.stop(self.config.drain), self._leader.back_off())
        self._inference.stop()
        await asyncio.gather(self._public.stop(grace=0.5), self._http.stop(grace_s=0.5))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leader_client.close()
        await self._sessions.close()
        await self._internal.stop(grace=0.5)
        await self._metrics.stop()
        for template in self._templates.values():
            await template.close()
        try:
            await self._ledger.end_lease(self.router_id)
        except LedgerUnavailable:
            log.info("gateway lease left to expire", router_id=self.router_id)
        # This may take a while, but other routers already continue the remaining requests.
        await asyncio.to_thread(self._traces.close)
        await self._ledger.close()

    # messages from workers (Listener of the sessions)

    def worker_up(self, info: session_pb2.WorkerInfo) -> None:
        log.info("worker up", worker_id=info.worker_id, address=info.address)
        self._limit_models()
        self._leader.worker_up(info)
        self._requests.attempts.worker_up(info.model)

    def worker_frame(self, worker_id: str, frame: session_pb2.WorkerFrame) -> None:
        self._leader.worker_frame(worker_id, frame)
        for breakdown in frame.breakdowns:
            self._requests.attempts.breakdown(breakdown)
        if frame.incomplete_starts:
            self._requests.attempts.incomplete_starts(worker_id, frame.incomplete_starts)

    def worker_progress(self, worker_id: str, progress: session_pb2.Progress) -> None:
        self._requests.attempts.progress(worker_id, progress)

    def worker_lost(self, worker_id: str) -> None:
        log.info("worker lost", worker_id=worker_id)
        self._limit_models()
        self._leader.worker_lost(worker_id)
        self._requests.attempts.worker_lost(worker_id)

    def _limit_models(self) -> None:
        self._models.update_limits([link.info for link in self._sessions.links if link.is_up])


async def _load_model(config: RouterConfig, settings: ModelConfig) -> ServedModel:
    await model_files.fetch(settings.model, settings.model_revision, weights=False)
    model = ServedModel.load(
        settings.model, settings.model_revision, sampling_defaults=settings.sampling_defaults
    )
    model.clamps_max_tokens = config.clamp_max_tokens
    model.computes_chunks = config.locality
    model.max_images = config.max_images
    model.max_image_bytes = config.max_image_bytes
    model.aliases = settings.served_model_names
    model.set_adapters(parse_adapters(settings.adapters))
    return model


@contextmanager
def _naming(setting: str, host: str, port: int) -> Iterator[None]:
    failed = f"cannot listen on {join_host_port(host, port)}"
    try:
        yield
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        cause = "address already in use" if is_taken else str(error).removeprefix(f"{failed}: ")
        raise OSError(f"{failed} (router.{setting}): {cause}") from error


async def _guarded(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("background task of the router failed")
        raise
