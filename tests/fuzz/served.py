"""Gateway with all interfaces for clients, in one process and without sockets.

Accepted requests are checked as a worker checks them, and erased before the next case.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from everlift.errors import EverliftError, UnknownRequest
from everlift.messages import Request
from everlift.transport import GRPC
from everlift.v1 import chaos_pb2
from everlift.v1 import inference_pb2 as pb
from router.api.adapters import Adapters
from router.api.anthropic.messages import Messages
from router.api.chat_renderer import ChatRenderer
from router.api.grpc.admin_server import AdminServer, ChaosServer
from router.api.grpc.health_server import ReflectionServer
from router.api.grpc.inference_server import InferenceServer
from router.api.http_api import Api
from router.api.kserve.server import KserveServer
from router.api.openai.adapters import AdapterPaths
from router.api.openai.answering import Answering
from router.api.openai.batches.batches import Batches
from router.api.openai.batches.stored import StoredBatches
from router.api.openai.conversations.conversations import Conversations
from router.api.openai.conversations.stored import StoredConversations
from router.api.openai.explaining import Explaining
from router.api.openai.files.files import Files
from router.api.openai.files.stored import StoredFiles
from router.api.openai.responses.responses import Responses
from router.api.openai.responses.stored import StoredResponses
from router.api.openai.texts import Texts
from router.api.service import Inference
from router.auth.caller import OPEN, Caller
from router.chat import frames
from router.chat.process import RendererProcess
from router.chat.renderer import _answer
from router.chat.templates import ChatTemplate
from router.config import RouterConfig
from router.faults.injector import Chaos
from router.leader.policy_store import RuntimePolicy
from router.ledger.memory.memory import MemoryLedger
from router.observability.metrics.http_server import MetricsServer
from router.observability.traces.traces import Traces
from tests.fuzz.target import Finding, event_loop, is_named
from tests.support.router import chat_support
from tests.support.router.gateway_support import CONFIG, Gateway, gateway_ledger
from worker.config import WorkerConfig
from worker.engine.limits import Limits
from worker.engine.sequence import Sequence
from worker.runner.fake_runner import FakeRunner

_CONFIG = replace(CONFIG, max_queued=4096)
#: Limit above which a declared length is rejected; bodies and messages of cases are far smaller.
MAX_MESSAGE_BYTES = 1 << 16
#: Limits of files, which are never deleted.
_FILES_KEPT_S, _FILES_BYTES = 5.0, 1 << 20
#: Limit of the rounds until a call ends, of which the second half take 50 ms each.
_MOST_ROUNDS = 100


class Served:
    """Gateway and its servers; ``runs`` runs an awaitable in their event loop."""

    def __init__(self, runs: Callable[[Awaitable[object]], Any], template: ChatTemplate) -> None:
        self.runs = runs
        self.gateway = Gateway(runs(gateway_ledger(MemoryLedger(time.monotonic))), config=_CONFIG)
        self.gateway.epochs = itertools.count(1)
        inference = Inference(
            self.gateway.requests, self.gateway.models, GRPC, Traces(self.gateway.ledger)
        )
        policy = RuntimePolicy(_CONFIG, self.gateway.ledger, ())
        workers = cast("Any", _NoWorkers())
        self._adapters = Adapters(self.gateway.models, policy, workers)
        self._handlers = (
            InferenceServer(inference, cast("Any", _OfNothing())).handlers(OPEN),
            KserveServer(inference, self.gateway.requests, self.gateway.models).handlers(OPEN),
            AdminServer(
                workers,
                policy,
                self.gateway.ledger,
                lambda _: None,
                self._adapters,
                self.gateway.models,
                lambda _: False,
            ).handlers(OPEN),
            ChaosServer(self._chaos()).handlers(OPEN),
            *ReflectionServer(["everlift.v1.Inference"]).handlers(),
        )
        self.app = self._api(inference, template)
        worker = WorkerConfig(model="fake", num_blocks=256)
        self._limits = Limits.of(worker, FakeRunner(256, worker.fake))

    @property
    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        return self._handlers

    def _api(self, inference: Inference, template: ChatTemplate) -> ASGIApp:
        models = self.gateway.models
        renderer = ChatRenderer({models.first.name: template})
        answering = Answering(_CONFIG, inference, models, renderer)
        stored = StoredResponses(inference, renderer, models)
        ledger, ledger_time = self.gateway.ledger, self.gateway.requests.ledger_time
        conversations = StoredConversations(ledger, stored, ledger_time)
        files = StoredFiles(ledger, ledger_time, _FILES_KEPT_S, _FILES_BYTES)
        batches = StoredBatches(ledger, ledger_time, _FILES_KEPT_S)
        return Api(
            OPEN,
            answering,
            Messages(answering, renderer, models),
            Responses(answering, inference, renderer, models, stored, conversations),
            Conversations(conversations),
            Texts(models, renderer),
            Explaining(inference),
            models,
            self.gateway.requests,
            MetricsServer(CollectorRegistry()),
            AdapterPaths(self._adapters),
            MAX_MESSAGE_BYTES,
            files=Files(files, batches, ledger),
            batches=Batches(batches, files, ledger, lambda: None),
        ).app(("http://page",))

    def _chaos(self) -> Chaos:
        config, here = replace(_CONFIG, chaos=True), "0123456789abcdef"
        membership, processes = cast("Any", SimpleNamespace(leader_id=here)), _Spared()
        sessions = cast("Any", _OneWorker())
        return Chaos(config, here, self.gateway.ledger, sessions, membership, GRPC, processes)

    async def settle(self) -> None:
        """Run all accepted requests as a worker would, and erase them."""
        gateway = self.gateway
        names = [waiting.request_id for waiting in gateway.line.enqueued]
        gateway.line.enqueued.clear()
        for name in names:
            live = gateway.requests._registry.get(name)
            if live is not None and not live.is_over:
                _check_stored(live.request)
                await gateway.dispatch(name)
            try:
                await gateway.requests.forget(name)
            except UnknownRequest:
                pass
        for start in gateway.workers.started:
            self._check_start(start)
        for record in (gateway.workers.started, gateway.workers.aborted, gateway.line.withdrawn):
            record.clear()

    def _check_start(self, start: Any) -> None:
        """Check that a worker accepts a start that the gateway accepts."""
        try:
            sequence = Sequence.from_start(start, self._limits)
        except EverliftError as error:
            raise Finding(f"a worker refuses what the gateway accepts: {error!r}") from error
        back = sequence.to_start()
        if Sequence.from_start(back, self._limits).to_start() != back:
            raise Finding("a worker hands back another request than it got")


def _check_stored(request: Request) -> None:
    stored = Request.from_bytes(request.to_bytes())
    if stored != request:
        raise Finding(f"the ledger keeps another request than was accepted: {stored!r}")


class _NoWorkers:
    links: tuple[Any, ...] = ()


class _OfNothing:
    """Source of an empty status."""

    http_address = ""

    async def describe(self, caller: Caller) -> pb.GetStatusResponse:
        return pb.GetStatusResponse()


class _OneWorker:
    """Worker that receives faults without executing them."""

    def __init__(self) -> None:
        info = SimpleNamespace(worker_id="abc123", tensor_parallel=2)
        self.links = (SimpleNamespace(info=info, is_up=True, delay_messages=_check_seconds),)

    def inject(self, worker_id: str, fault: chaos_pb2.Fault) -> None:
        assert worker_id == "abc123"
        assert fault.rank < 2
        if fault.kind != chaos_pb2.FAULT_KIND_KILL:
            _check_seconds(fault.seconds)


class _Spared:
    """Processes on which faults have no effect."""

    def kill(self, pid: int) -> None:
        pass

    async def pause(self, pid: int, seconds: float) -> None:
        _check_seconds(seconds)


def _check_seconds(seconds: float) -> None:
    assert 0 <= seconds < inf


class _Here:
    """Renderer in this process. Small cases need no separate process as a sandbox."""

    def __init__(self, process: RendererProcess) -> None:
        self._process = process

    async def start(self) -> None:
        pass

    async def render(self, request: bytes) -> str:
        answer = _answer(_unframed(request), self._process._launch)
        return self._process._text(_unframed(answer))

    def end(self) -> None:
        pass


def _unframed(frame: bytes) -> frames.Frame:
    return frames.decode(frame[frames.LENGTH_BYTES :])


@contextmanager
def template(text: str = chat_support.HERMES) -> Iterator[ChatTemplate]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "chat_template.jinja").write_text(text)
        loaded = ChatTemplate.load(Path(directory), RouterConfig(), max_characters=1 << 16)
        assert loaded is not None
        loaded._processes = [_Here(one) for one in loaded._processes]  # type: ignore[misc]
        yield loaded


@contextmanager
def served(text: str = chat_support.HERMES) -> Iterator[Served]:
    with event_loop() as runs, template(text) as chat:
        yield Served(runs, chat)
        runs(chat.close())


async def ended(work: Coroutine[Any, Any, None], server: Served) -> None:
    """Run ``work`` to its end, together with the requests that it waits for.

    Raises the errors of ``work``, and Finding if it does not end.
    """
    task = asyncio.create_task(work)
    for round_ in range(_MOST_ROUNDS):
        await quiet()
        if task.done():
            return task.result()
        await server.settle()
        # Long texts are tokenized in a thread.
        await asyncio.sleep(0 if round_ < _MOST_ROUNDS / 2 else 0.05)
    task.cancel()
    raise Finding("a call waits for nothing")


async def quiet() -> None:
    """Let the event loop run until probably all tasks wait for external events."""
    for _ in range(6):
        await asyncio.sleep(0)


def check_refusal(error: EverliftError) -> None:
    if not is_named(error):
        raise Finding(f"an error without a name: {error}") from error


class Transport(asyncio.Transport):
    """Transport of a socket whose peer reads everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass
