"""The same streams without Everlift: through Ray Serve alone.

Ray, and a driver that reads a deployment's handle, are a process of their own; what the driver is
asked comes over a pipe. The deployment makes tokens without computing anything, one an item. Its
streams are read

    handle   by the driver, through a DeploymentHandle: what an ingress deployment does before it
             answers anybody. The driver's process is counted, the deployment's is the model
    grpc     the same with the handle's calls over gRPC, as RAY_SERVE_THROUGHPUT_OPTIMIZED has them
    direct   by HTTP clients, through an ingress deployment that reads the model's replica, as a
             router reads its workers: direct ingress, with RAY_SERVE_THROUGHPUT_OPTIMIZED for both.
             The ingress replica's process is counted
    alone    by HTTP clients, from the model's own replica, with nothing between: the same settings.
             There is no router at all that could queue, or go on elsewhere. The model's process is
             counted

No proxy is on the way of the last two; in a cluster HAProxy would be.
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

Way = Literal["handle", "grpc", "direct", "alone"]
WAYS: tuple[Way, ...] = ("handle", "grpc", "direct", "alone")

_TOKEN = 97
_EVENT = b'data: {"token_ids":[97]}\n\n'
_EVENT_BEGIN = b"data:"
_OBJECT_STORE_BYTES = 100 << 20
_MAX_STREAMS = 1024
#: Serve's own settings: replicas listen themselves, and end without waiting for a proxy.
_DIRECT = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


class _Steps:
    """One timer for all streams, as an engine has one step for them."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._due = 0.0
        self._is_due = False
        self._stepped = asyncio.Event()

    async def next(self) -> None:
        """Until the next step."""
        if not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            self._due = max(self._due + self._pace_s, loop.time())
            loop.call_at(self._due, self._step)
        await self._stepped.wait()

    def _step(self) -> None:
        self._is_due = False
        self._stepped.set()
        # Who waits by now goes on all the same.
        self._stepped.clear()


class Model:
    """A step gives every stream a token. ``pace_s`` lies between steps; 0: each stream has its next
    token whenever the others had their turn."""

    def __init__(self) -> None:
        self._steps: dict[float, _Steps] = {}

    async def generate(self, tokens: int, pace_s: float) -> AsyncIterator[int]:
        steps = self._steps.setdefault(pace_s, _Steps(pace_s))
        for _ in range(tokens):
            yield _TOKEN
            await (steps.next() if pace_s else asyncio.sleep(0))

    async def __call__(self, request: Any) -> Any:
        return _streamed(request, self.generate)

    def pid(self) -> int:
        return os.getpid()


class Ingress:
    """Streams what a replica of the model makes."""

    def __init__(self, model: Any) -> None:
        # As its own replicas have it by default; the handle was made where that is not set.
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
class Place:
    """Pid and port of a replica that HTTP clients ask."""

    pid: int
    port: int


@dataclass(frozen=True)
class Places:
    #: the driver's pid
    driver: int
    replicas: Mapping[Way, Place]


class RayServe:
    def __init__(self, places: Places, driver: Child) -> None:
        self.places = places
        self._driver = driver

    def pid(self, way: Way) -> int:
        """Of the process that is measured."""
        place = self.places.replicas.get(way)
        return self.places.driver if place is None else place.pid

    async def watch(self, way: Way, num: int, tokens: int, pace_s: float) -> Window:
        """``num`` streams of so many tokens."""
        if place := self.places.replicas.get(way):
            path = f"/{way}?tokens={tokens}&pace_s={pace_s}"
            return await watch(place.pid, num, partial(_get, place.port, path, tokens))
        self._driver.pipe.send((way, num, tokens, pace_s))
        return Window(**await asyncio.to_thread(self._driver.pipe.recv))


async def _get(port: int, path: str, tokens: int, traffic: Traffic) -> None:
    """Raises Incomplete."""
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
    # Short, since Ray's sockets lie in it: a socket's path has 107 bytes at most.
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
        pipe.send(_places())
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


def _places() -> Places:
    return Places(os.getpid(), {"direct": _place("direct"), "alone": _place("alone")})


def _place(app: str) -> Place:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    pid = serve.get_app_handle(app).pid.remote().result()
    [group] = ray.get(_get_global_client()._controller.get_target_groups.remote(app))
    [target] = group.targets
    return Place(pid, target.port)


def _handles() -> dict[Way, Any]:
    """Call it in an event loop."""
    from ray import serve

    over_grpc = serve.get_app_handle("handle")
    over_grpc._init(_run_router_in_separate_loop=False)
    return {
        "handle": serve.get_app_handle("handle").options(stream=True),
        "grpc": over_grpc.options(stream=True, _by_reference=False),
    }


async def _answer(pipe: Connection) -> None:
    """Reads as it is told until the pipe ends, and shuts Serve down."""
    from ray import serve

    handles = _handles()
    try:
        while True:
            way, num, tokens, pace_s = await asyncio.to_thread(pipe.recv)
            read = partial(_read, handles[way], tokens, pace_s)
            pipe.send(asdict(await watch(os.getpid(), num, read)))
    except EOFError:
        pass
    finally:
        # Here, since a handle is shut down in the event loop that it was used in.
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
