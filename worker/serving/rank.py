"""Rank of a worker: an engine in its thread and, on rank 0, the server in the event loop.

The methods are called in this order:

    the only rank                 start -> wait      drain -> stop
    rank 0 of several     open -> start -> wait      drain -> stop
    other ranks                   start -> wait               stop

If one rank ends, all ranks of the worker end.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from everlift import heap, logs, model_files
from everlift.adapters import parse_adapters
from everlift.hashes import BLOCK_SIZE
from everlift.hub import is_commit, is_hub_id
from everlift.progress import show_progress
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.engine.adapter import EngineAdapter
from worker.engine.limits import Limits
from worker.grammar.absent import NoGrammars
from worker.model.huggingface.families import read_spec
from worker.model.spec import UnsupportedArchitecture
from worker.parallel.liveness import LivenessMonitor
from worker.parallel.rendezvous import RankLinks, Rendezvous, join
from worker.serving import prefetch
from worker.serving.engine_thread import EngineThread
from worker.serving.fingerprint import model_fingerprint
from worker.serving.image_queue import ImageQueue
from worker.serving.inbox import Inbox, Successor
from worker.serving.loop import CONFIRM_S, FirstSteps, Report
from worker.serving.reclaim import wait_for_notice
from worker.serving.server import SessionServer
from worker.serving.sessions import Sessions
from worker.serving.startup import ReadyFile, Startup, process_age_s

if TYPE_CHECKING:
    from worker.grammar.compiler import GrammarCompiler

log = logs.get_logger(__name__)


class RankFailed(Exception):
    """Raised if a rank ended although it was not stopped, so that its worker is lost."""


class Server(Protocol):
    """Server of rank 0, to which routers connect.

    ``deliver`` is called after every iteration of the engine's loop.
    """

    @property
    def address(self) -> str: ...

    @property
    def has_no_router(self) -> bool: ...

    async def start(self, info: session_pb2.WorkerInfo) -> None: ...

    def deliver(self, report: Report) -> None: ...

    def announce(self, first: FirstSteps, confirmed: Callable[[], None]) -> None:
        """Notify each router of its sequences whose first step is about to run.

        Call ``confirmed`` when all routers that must confirm have done so or are disconnected; see
        ``Sessions.announce``.
        """
        ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


_NO_MODELS: Mapping[str, WorkerConfig] = {}


class Rank:
    """Rank number ``rank`` of ``config.num_ranks`` ranks; all calls come from one event loop.

    Rank 0's ``open`` is called first if there are several ranks, and returns the ``rendezvous`` for
    the others. All ranks must then be started at the same time, because they wait for each other.

    A worker changes its model by ending all its ranks without an error. ``successor`` then returns
    the rank to start next in each process.
    """

    def __init__(
        self,
        config: WorkerConfig,
        rank: int = 0,
        rendezvous: str = "",
        serve: Callable[[WorkerConfig, Sessions], Server] = SessionServer,
        ray_cluster: str = "",
        models: Mapping[str, WorkerConfig] = _NO_MODELS,
        first_model: str = "",
    ) -> None:
        """Create the rank, without starting anything.

        ``rendezvous`` is the address that rank 0's ``open`` returned; ranks above 0 need it.
        ``serve`` creates rank 0's server; ``ray_cluster`` is the session name of the Ray cluster.
        ``models`` are the models to which the worker can change at run time, by name, with their
        settings. ``first_model`` is the model for which the worker was started; empty if that is
        ``config.name``.

        Raises ModelUnavailable if a local model is not found or its GGUF file cannot be used.
        Raises ValueError if no model is configured, a local model's files are invalid, or a hub
        model's revision is not a commit. Raises ValueError also if ``rank`` is out of range, or if
        a rank above 0 lacks ``rendezvous``.
        """
        if not config.model:
            raise ValueError('model must be set, to a directory, a hub id or "fake"')
        if not 0 <= rank < config.num_ranks:
            raise ValueError(f"rank must be from 0 to {config.num_ranks - 1}, not {rank}")
        if rank and not rendezvous:
            raise ValueError(
                "rendezvous must be the address of rank 0's rendezvous for a rank above 0"
            )
        self.worker_id = secrets.token_hex(8)
        self._config = config
        self._rank = rank
        self._rendezvous_address = rendezvous
        self._files = _files(config)
        self._rendezvous: Rendezvous | None = None
        self._inbox = Inbox()
        self._startup = Startup()
        self._thread: EngineThread | None = None
        self._serve_with = serve
        self._ray_cluster = ray_cluster
        self._models = models
        self._first_model = first_model or config.name
        #: whether this rank replaces one of another model in the same process
        self._is_successor = False
        #: change to another model, and the rank that serves it next
        self._change: asyncio.Task[None] | None = None
        self._next: Rank | None = None
        self._grammars: GrammarCompiler | NoGrammars | None = None
        self._images: ImageQueue | None = None
        self._server: Server | None = None
        self._sessions: Sessions | None = None
        self._liveness: LivenessMonitor | None = None
        self._reclaim: asyncio.Task[None] | None = None
        self._gpu_watch: asyncio.Task[None] | None = None
        #: task that stops the server; the reference protects it from garbage collection
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._thread_exited = asyncio.Event()
        self._error: BaseException | None = None
        self._is_reclaimed = False
        self._is_stopping = False
        self._ready_file = ReadyFile(config.ready_dir)

    @property
    def has_no_router(self) -> bool:
        """Return whether no router is connected, so that possibly none knows this worker."""
        return self._server is None or self._server.has_no_router

    @property
    def is_stuck(self) -> bool:
        """Return whether the engine's thread runs. After ``stop``, a running thread is stuck."""
        return self._thread is not None and not self._thread_exited.is_set()

    async def open(self) -> str:
        """Open the rendezvous on rank 0, and return its address.

        The other ranks need the address to connect.
        """
        self._rendezvous = await asyncio.to_thread(Rendezvous, self._config, self._files)
        return self._rendezvous.address

    async def fetch(self) -> None:
        """Download the files of model and adapters to this machine, if they are missing.

        ``start`` does this too, but started ranks wait for each other only for a limited time. If
        the ranks run on several machines, ``fetch`` must therefore have returned on all of them
        before any rank is started. Raises ModelUnavailable if the model cannot be downloaded.
        """
        config = self._config
        with show_progress("model downloading") as progress:
            await model_files.fetch(
                config.model,
                config.model_revision,
                weights=config.reads_weights,
                progress=progress,
            )
        for source in parse_adapters(config.adapters):
            await model_files.fetch_adapter(source)

    async def start(self) -> session_pb2.WorkerInfo:
        """Start the rank; return the worker's info when it is ready to serve.

        On a rank above 0 the info lacks worker_id and address. Raises ModelUnavailable if the model
        cannot be downloaded, ChannelBroken if ranks are missing, OSError if the port is taken, and
        any error of building the runner.
        """
        self._startup.seconds["process_s"] = 0.0 if self._is_successor else process_age_s()
        with self._startup.part("fetch_s"):
            await self.fetch()
        self._prefetch()
        self._loop = asyncio.get_running_loop()
        self._thread = thread = self._start_thread()
        engine = await asyncio.wrap_future(thread.ready)
        info = self._info(engine.limits)
        if self._rank == 0:
            with self._startup.part("serve_s"):
                await self._serve(engine, info)
        self._liveness = LivenessMonitor(
            thread.watchdog, thread.links.log, self._fail, self._config.rank_silence
        )
        self._liveness.start()
        if not (self._is_reclaimed or self._ended.is_set()):
            self._ready_file.create()
        log.info(
            "rank ready",
            worker_id=info.worker_id,
            rank=self._rank,
            address=info.address,
            **self._startup.seconds,
        )
        return info

    def _prefetch(self) -> None:
        config = self._config
        if not config.is_fake and config.reads_weights:
            prefetch.start(config.model, config.model_revision, self._rank, config.num_ranks)

    def _start_thread(self) -> EngineThread:
        thread = EngineThread(
            self._config,
            self._connector(),
            self._inbox,
            self._report,
            self._announce,
            self._startup,
            self._on_engine_failure,
        )
        thread.ended.add_done_callback(
            lambda ended: self._loop.call_soon_threadsafe(self._on_thread_ended, ended.exception())
        )
        return thread

    async def wait(self) -> None:
        """Wait until this rank has ended, because it or rank 0 was stopped.

        Raises RankFailed if it ended otherwise.
        """
        await self._ended.wait()
        if self._error is not None:
            raise RankFailed(str(self._error)) from self._error

    async def successor(self) -> Rank | None:
        """Stop this rank, and return the one that serves the worker's next model.

        Return None if the worker does not change its model, or if its machine is being reclaimed.
        Call it after ``wait``. Raises RankFailed if the engine does not end, and the errors of the
        constructor.
        """
        await self.stop()
        if self.is_stuck:
            raise RankFailed("the engine did not end, so the worker cannot change its model")
        successor = self._thread.successor if self._thread is not None else None
        if self._is_reclaimed or (self._next is None and successor is None):
            return None
        # The next model may need the memory of this one.
        self._thread = None
        heap.collect_frozen()
        if not self._config.is_fake:
            from worker.device.gpu import release_cached_memory

            release_cached_memory()
        if successor is None:
            return self._next
        return self._of_model(successor.model, successor.rendezvous)

    def _of_model(self, model: str, rendezvous: str = "") -> Rank:
        successor = Rank(
            self._models[model],
            self._rank,
            rendezvous,
            self._serve_with,
            self._ray_cluster,
            self._models,
            self._first_model,
        )
        successor._is_successor = True
        return successor

    def _begin_change(self, model: str) -> None:
        self._change = self._loop.create_task(self._change_model(model))

    async def _change_model(self, model: str) -> None:
        """Make the files of ``model`` available, return all sequences to their routers, and end.

        The worker serves its present model until those files are available. A failure to prepare
        the change is logged and reported to the routers, and the worker keeps its present model.
        """
        assert self._server is not None and self._sessions is not None
        assert self._thread is not None
        sessions, rendezvous = self._sessions, ""
        try:
            successor = self._of_model(model)
            await successor.fetch()
            if sessions.is_draining:
                raise RankFailed("the worker was drained meanwhile")
            if self._config.num_ranks > 1:
                rendezvous = await successor.open()
        except Exception as error:
            sessions.next_model, sessions.change_error = "", f"{model}: {error}"
            log.error("change of the model failed", model=model, error=str(error))
            return
        successor._prefetch()
        self._ready_file.remove()
        await self._server.drain()
        self._next, self._is_stopping = successor, True
        self._thread.stop(Successor(model, rendezvous))

    async def drain(self) -> None:
        """Start no more sequences, and wait until the routers have received every token.

        The wait is limited by the setting ``drain_timeout``. Rank 0 drains for all ranks. The drain
        would be interrupted if another rank ended earlier. The other ranks therefore wait until
        rank 0 has ended, for up to twice ``drain_timeout``.
        """
        self._ready_file.remove()
        if self._rank:
            await _until(self._ended, 2 * self._config.drain_timeout)
        elif self._server is not None and not self._ended.is_set():
            await self._server.drain()

    def reclaim(self) -> None:
        """Return all sequences to their routers and start no more: the machine is being reclaimed.

        Returns at once. Routers stay connected. The call on rank 0 has this effect for all ranks;
        on other ranks only the ready file is removed.
        """
        log.warning("instance reclaimed", worker_id=self.worker_id, rank=self._rank)
        self._is_reclaimed = True
        self._ready_file.remove()
        if self._sessions is not None:
            self._sessions.drain()

    async def stop(self) -> None:
        """End the rank, and with it the worker; wait up to ``drain_timeout`` for its thread.

        May be called at any time, and repeatedly.
        """
        self._is_stopping = True
        self._ready_file.remove()
        self._stop_watching()
        if self._change is not None:
            self._change.cancel()
        if self._server is not None:
            await self._server.stop()
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._thread is not None:
            self._thread.stop()
            await _until(self._thread_exited, self._config.drain_timeout)
            # Closing the links also ends a thread that still runs. Otherwise nothing may close
            # them.
            self._thread.links.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._images is not None:
            self._images.close()

    def _connector(self) -> partial[RankLinks]:
        if self._rank:
            return partial(join, self._config, self._rank, self._rendezvous_address, self._files)
        if self._config.num_ranks == 1:
            return partial(RankLinks)
        assert self._rendezvous is not None, "open must be called before start on rank 0 of several"
        return partial(self._rendezvous.gather)

    async def _serve(self, engine: EngineAdapter, info: session_pb2.WorkerInfo) -> None:
        self._grammars = _build_grammars(self._config, engine.limits.vocab_size)
        if (process := engine.image_processor) is not None:
            self._images = ImageQueue(process)
        self._sessions = Sessions(
            engine.limits, engine.load(), self._inbox, self._grammars, self._images
        )
        self._sessions.other_models = self._other_models
        self._sessions.on_next_model = self._begin_change
        self._server = self._serve_with(self._config, self._sessions)
        if self._is_reclaimed:
            self._sessions.drain()
        info.worker_id = self.worker_id
        info.address = self._server.address
        await self._server.start(info)
        if self._config.reclaim_url:
            self._reclaim = self._loop.create_task(self._reclaim_at(self._config.reclaim_url))
        if not self._config.is_fake:
            self._gpu_watch = self._loop.create_task(self._watch_gpu(self._sessions))

    async def _watch_gpu(self, sessions: Sessions) -> None:
        from worker.device import gpu

        def set_utilization(utilization: float) -> None:
            sessions.gpu_utilization = utilization

        await gpu.watch(self._config.device, set_utilization)

    async def _reclaim_at(self, url: str) -> None:
        await wait_for_notice(url)
        self.reclaim()

    @property
    def _other_models(self) -> list[str]:
        return sorted(self._models.keys() - {self._config.name})

    def _stop_watching(self) -> None:
        if self._liveness is not None:
            self._liveness.close()
        if self._reclaim is not None:
            self._reclaim.cancel()
        if self._gpu_watch is not None:
            self._gpu_watch.cancel()

    def _report(self, report: Report) -> None:
        assert self._server is not None, "the engine reports only after it received an order"
        self._loop.call_soon_threadsafe(self._server.deliver, report)

    def _announce(self, first: FirstSteps) -> None:
        """Notify routers of sequences whose first step is about to run.

        The engine's thread calls this method, which waits up to ``CONFIRM_S`` seconds until the
        routers have confirmed all sequences in ``first.to_confirm``. Confirmation is required for
        sequences that lost a worker since their last new token.
        """
        assert self._server is not None, "the engine runs a step only after it received an order"
        confirmed = threading.Event()
        self._loop.call_soon_threadsafe(self._server.announce, first, confirmed.set)
        if first.to_confirm and not confirmed.wait(CONFIRM_S):
            log.warning("first step not confirmed in time", sequences=len(first.to_confirm))

    def _on_thread_ended(self, error: BaseException | None) -> None:
        self._end(error)
        assert self._thread is not None
        self._thread.links.close()
        self._thread_exited.set()

    def _on_engine_failure(self, cause: str) -> None:
        self._loop.call_soon_threadsafe(self._fail, cause)

    def _fail(self, cause: str) -> None:
        self._end(RankFailed(cause))
        if self._thread is not None:
            self._thread.links.interrupt()

    def _end(self, error: BaseException | None) -> None:
        """Mark the rank as ended and remove its ready file; do nothing on later calls.

        ``error`` is the reason why the rank ended or must end; None if its thread ended without an
        error. Unless the rank is being stopped, an error is logged and kept, and the server is
        stopped.
        """
        if self._ended.is_set():
            return
        self._stop_watching()
        self._ready_file.remove()
        self._ended.set()
        if error is None or self._is_stopping:
            return
        self._error = error
        log.error("rank failed", worker_id=self.worker_id, rank=self._rank, error=str(error))
        if self._server is not None:
            self._closing = self._loop.create_task(self._server.stop())

    def _info(self, limits: Limits) -> session_pb2.WorkerInfo:
        config = self._config
        # Not the limits' max_model_len: it depends on the KV cache, whose size differs between
        # workers of a model if it is measured.
        shape = (self._files, _dtype(config), limits.vocab_size, config.max_model_len)
        return session_pb2.WorkerInfo(
            model=config.name,
            fingerprint=hashlib.sha256(repr(shape).encode()).hexdigest(),
            block_size=BLOCK_SIZE,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            tensor_parallel=config.tensor_parallel,
            pid=os.getpid(),
            max_num_batched_tokens=limits.max_num_batched_tokens,
            device=_device(config),
            ray_cluster=self._ray_cluster,
            host_load_s=limits.host_load_s,
            arithmetic=_arithmetic(config),
            adapters=limits.adapters,
            max_images=limits.max_images,
            adapter_slots=limits.num_adapter_slots,
            other_models=self._other_models,
            first_model=self._first_model,
        )


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _files(config: WorkerConfig) -> str:
    """Return an identifier of the engine, the load format and the model's files.

    The identifier of the fake model consists of its settings. Raises ModelUnavailable if a local
    model is not found or its GGUF file cannot be used. Raises ValueError if a local model's
    files are invalid, or a hub model's revision is not a commit.
    """
    if config.is_fake:
        fake = config.fake
        return f"fake {fake.eos_token_id} {fake.eos_one_in} {fake.surprise_one_in}"
    # The engines compute different tokens.
    engine = "" if config.engine == "everlift" else f"{config.engine} "
    return f"{engine}{config.load_format} {_weights(config.model, config.model_revision)}"


def _weights(model: str, revision: str) -> str:
    if not is_hub_id(model, revision):
        return model_fingerprint(model_files.locate(model, weights=False))
    if not is_commit(revision):
        raise ValueError(f"model_revision of {model!r} must be a commit, not {revision!r}")
    return revision


def _build_grammars(config: WorkerConfig, vocab_size: int) -> GrammarCompiler | NoGrammars:
    """Return the compiler of grammars; for the fake model, one that refuses every grammar.

    vLLM compiles grammars itself, but receives only those that compile within the limits of this
    compiler.
    """
    if config.is_fake:
        return NoGrammars()
    from worker.grammar.compiler import GrammarCompiler
    from worker.grammar.fork_server import GrammarForkServer

    fork_server = GrammarForkServer(config, vocab_size)
    fork_server.prestart()
    return GrammarCompiler(config.grammar, fork_server, config.step_timeout)


def _dtype(config: WorkerConfig) -> str:
    if config.is_fake:
        return "none"
    from worker.device.device import choose_device, choose_dtype

    dtype = choose_dtype(config.dtype, choose_device(config.device), config.quantization)
    weights = "" if config.quantization == "none" else f", {config.quantization}"
    cache = "" if config.kv_cache_dtype == "auto" else f", {config.kv_cache_dtype} KV cache"
    return f"{dtype}{weights}{cache}"


def _arithmetic(config: WorkerConfig) -> str:
    """Return a name for the worker's arithmetic; empty if the bits of results depend on the batch.

    Workers with the same name and the same model files compute the same bits.
    """
    if config.is_fake:
        return "fake"
    # Over a network, the order in which more than two ranks are summed depends on the batch.
    if config.engine != "everlift" or config.tensor_parallel > 2 or not _has_decoder(config):
        return ""
    from worker.device.device import arithmetic, choose_device, choose_dtype

    device = choose_device(config.device)
    name = arithmetic(device, choose_dtype(config.dtype, device, config.quantization))
    return f"{name}, {config.tensor_parallel} ranks" if name else ""


def _has_decoder(config: WorkerConfig) -> bool:
    """Return whether the model runs in Everlift's decoder, and not in transformers' modules.

    The products of transformers' modules are torch's, whose bits depend on the batch.
    """
    try:
        read_spec(model_files.locate(config.model, config.model_revision, weights=False))
    except UnsupportedArchitecture:
        return False
    return True


def _device(config: WorkerConfig) -> str:
    if config.is_fake:
        return "fake"
    from worker.device.device import choose_device, name_of

    name = name_of(choose_device(config.device))
    return name if config.engine == "everlift" else f"{name}, {config.engine}"
