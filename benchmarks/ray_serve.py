"""Streams through Ray Serve, for comparison with a router of Everlift.

A driver, which starts Ray and reads a deployment's handle, runs in a process of its own and gets
its tasks over a pipe. The deployment ("model") yields tokens without computing anything, one per
item. There are four modes:

    handle   the driver reads the streams through a DeploymentHandle, as an ingress deployment does
             before it answers a client. The driver's process is measured
    grpc     the same, with calls of the handle over gRPC, as with RAY_SERVE_THROUGHPUT_OPTIMIZED
    direct   HTTP clients read the streams through an ingress deployment, which reads the model's
             replica, as a router reads its workers. Direct ingress is enabled, and
             RAY_SERVE_THROUGHPUT_OPTIMIZED set for both. The ingress replica's process is measured
    alone    HTTP clients read the streams from the model's replica, with the same settings. There
             is no router that could queue or migrate requests. The model's process is measured

In the last two modes there is no proxy; in a cluster there would be HAProxy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

from benchmarks.child import Child, child
from benchmarks.clients import Incomplete, Traffic, Window, watch
from cluster.ray import local_ray
from tests.support.free_port import free_port

Mode = Literal["handle", "grpc", "direct", "alone"]
MODES: tuple[Mode, ...] = ("handle", "grpc", "direct", "alone")

_TOKEN = 97
_EVENT = b'data: {"token_ids":[97]}\n\n'
_EVENT_BEGIN = b"data:"
_OBJECT_STORE_BYTES = 100 << 20
_MAX_STREAMS = 1024
#: Settings of Ray Serve: replicas listen for HTTP, and end without waiting for a proxy to drain.
_DIRECT = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


class _StepTimer:
    """Timer that all streams share, as an engine has one step for all sequences."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._due = 0.0
        self._is_due = False
        self._stepped = asyncio.Event()

    async def next(self) -> None:
        """Wait until the next step."""
        if not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            self._due = max(self._due + self._pace_s, loop.time())
            loop.call_at(self._due, self._step)
        await self._stepped.wait()

    def _step(self) -> None:
        self._is_due = False
        self._stepped.set()
        # The event is cleared at once; tasks that already wait for it still wake up.
        self._stepped.clear()


class Model:
    """Deployment that yields a token for every stream in each step.

    Steps are ``pace_s`` apart. If that is 0, a stream yields its next token as soon as the other
    tasks of the event loop have run.
    """

    def __init__(self) -> None:
        self._steps: dict[float, _StepTimer] = {}

    async def generate(self, tokens: int, pace_s: float) -> AsyncIterator[int]:
        steps = self._steps.setdefault(pace_s, _StepTimer(pace_s))
        for _ in range(tokens):
            yield _TOKEN
            await (steps.next() if pace_s else asyncio.sleep(0))

    async def __call__(self, request: Any) -> Any:
        return _streamed(request, self.generate)

    def pid(self) -> int:
        return os.getpid()


class Ingress:
    """Ingress deployment that streams the tokens of a replica of the model."""

    def __init__(self, model: Any) -> None:
        # By default, handles in optimized replicas pass values; this one was made elsewhere.
        self._model = model.options(stream=True, _by_reference=False)

    async def __call__(self, request: Any) -> Any:
        return _streamed(request, self._model.generate.remote)

    def pid(self) -> int:
        return os.getpid()


def _streamed(request: Any, generate: Callable[[int, float], AsyncIterator[int]]) -> Any:
    from starlette.responses import StreamingResponse

    async def events() -> AsyncIterator[bytes]:
        async for _ in generate(int(asked["tokens"]), float(asked["pace_s"])):
            yield _EVENT

    asked = request.query_params
    return StreamingResponse(events(), media_type="text/event-stream")


@dataclass(frozen=True)
class Replica:
    """Pid and HTTP port of a replica."""

    pid: int
    port: int


@dataclass(frozen=True)
class Processes:
    """Processes that are measured, by mode."""

    #: pid of the driver
    driver: int
    replicas: Mapping[Mode, Replica]


class RayServe:
    def __init__(self, processes: Processes, driver: Child) -> None:
        self.processes = processes
        self._driver = driver

    def pid(self, mode: Mode) -> int:
        """Return the pid of the process that is measured in this mode."""
        replica = self.processes.replicas.get(mode)
        return self.processes.driver if replica is None else replica.pid

    async def watch(self, mode: Mode, num: int, tokens: int, pace_s: float) -> Window:
        """Read ``num`` streams of ``tokens`` tokens each, and measure the mode's process."""
        if replica := self.processes.replicas.get(mode):
            path = f"/{mode}?tokens={tokens}&pace_s={pace_s}"
            return await watch(replica.pid, num, partial(_get, replica.port, path, tokens))
        self._driver.pipe.send((mode, num, tokens, pace_s))
        return Window(**await asyncio.to_thread(self._driver.pipe.recv))


async def _get(port: int, path: str, tokens: int, traffic: Traffic) -> None:
    """Read a stream over HTTP. Raises Incomplete if it does not have ``tokens`` events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (f"GET {path} HTTP/1.1", "Host: bench", "Connection: close", "", "")
        writer.write("\r\n".join(head).encode())
        came = 0
        rest = b""
        while data := await reader.read(1 << 16):
            rest += data
            if count := rest.count(_EVENT_BEGIN):
                if not came:
                    traffic.begin()
                came += count
                traffic.add(count)
            rest = rest[1 - len(_EVENT_BEGIN) :]
        if came != tokens:
            raise Incomplete(f"{came} of {tokens} events; the last bytes: {rest!r}")
    finally:
        writer.close()


@contextmanager
def ray_serve() -> Iterator[RayServe]:
    # The path is short, because Ray's sockets are in it, and their paths may have 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="bench-ray-", ignore_cleanup_errors=True) as scratch,
        child(_drive, scratch) as driver,
    ):
        yield RayServe(driver.pipe.recv(), driver)


# the driver


def _drive(scratch: str, pipe: Connection) -> None:
    os.environ.update(_DIRECT)
    local_ray.prepare()
    import ray
    from ray import serve

    local_ray.log_messages()
    try:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"worker_process_setup_hook": local_ray.bind_replicas},
            _temp_dir=scratch,
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        _deploy()
        pipe.send(_processes())
        asyncio.run(_answer(pipe))
    finally:
        ray.shutdown()


def _deploy() -> None:
    from ray import serve

    deployment = serve.deployment(
        max_ongoing_requests=_MAX_STREAMS, ray_actor_options={"num_cpus": 0}
    )
    optimized = {"env_vars": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}}
    fast = {"ray_actor_options": {"num_cpus": 0, "runtime_env": optimized}}
    model = deployment(Model)
    behind = deployment(Ingress).options(**fast).bind(model.options(**fast).bind())
    serve.run(model.bind(), name="handle", route_prefix="/handle")
    serve.run(behind, name="direct", route_prefix="/direct")
    serve.run(model.options(**fast).bind(), name="alone", route_prefix="/alone")


def _processes() -> Processes:
    return Processes(os.getpid(), {"direct": _replica("direct"), "alone": _replica("alone")})


def _replica(app: str) -> Replica:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    pid = serve.get_app_handle(app).pid.remote().result()
    [group] = ray.get(_get_global_client()._controller.get_target_groups.remote(app))
    [target] = group.targets
    return Replica(pid, target.port)


def _handles() -> dict[Mode, Any]:
    """Return the driver's handles by mode; must be called in the event loop that uses them."""
    from ray import serve

    over_grpc = serve.get_app_handle("handle")
    over_grpc._init(_run_router_in_separate_loop=False)
    return {
        "handle": serve.get_app_handle("handle").options(stream=True),
        "grpc": over_grpc.options(stream=True, _by_reference=False),
    }


async def _answer(pipe: Connection) -> None:
    """Read streams as the pipe's messages ask until it is closed, then shut Ray Serve down."""
    from ray import serve

    handles = _handles()
    try:
        while True:
            mode, num, tokens, pace_s = await asyncio.to_thread(pipe.recv)
            read = partial(_read, handles[mode], tokens, pace_s)
            pipe.send(asdict(await watch(os.getpid(), num, read)))
    except EOFError:
        pass
    finally:
        # A handle must be shut down in the event loop that used it.
        await serve.shutdown_async()


async def _read(handle: Any, tokens: int, pace_s: float, traffic: Traffic) -> None:
    came = 0
    async for _ in handle.generate.remote(tokens, pace_s):
        if not came:
            traffic.begin()
        came += 1
        traffic.add(1)
    if came != tokens:
        raise Incomplete(f"{came} of {tokens} tokens")
