"""Worker with all its ranks, for this process only.

    this process   event loop <-> engine's thread: rank 0
    children       ranks 1, 2, ...

The children end when this process ends, even if it is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count

from cluster.config import Config
from cluster.errors import ClusterFailed
from cluster.llm.completion import Completion
from cluster.llm.generation import Generation
from cluster.llm.session import LocalSession
from cluster.local.gpus import gpus_of_ranks, visible_gpus
from cluster.local.launch import RankLaunch
from cluster.local.launcher import Child, SubprocessLauncher
from cluster.threads import rank_environment
from everlift.client.received_output import Chunk
from everlift.errors import Cancelled, DeadlineExceeded, EverliftError
from everlift.messages import Request
from everlift.text import Tokenizer
from everlift.v1 import session_pb2
from worker.config import WorkerConfig
from worker.serving.rank import Rank, RankFailed
from worker.serving.sessions import Sessions

#: Called with each chunk of a request, in the event loop's thread.
Show = Callable[[Chunk], None]

#: Seconds for a child to end after rank 0 has ended.
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Task:
    """Request to run; ``timeout_s`` is its timeout in seconds, None for no timeout."""

    request: Request
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class _Running:
    generation: Generation
    done: Future[Completion]
    show: Show | None
    deadline: asyncio.TimerHandle | None


class LocalWorker:
    """Worker that is called from one event loop; the loop's thread must outlive the worker."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        """Create the worker. Raises ValueError for an invalid configuration."""
        self._config = config
        self._tokenizer = tokenizer
        self._rank = Rank(config.worker, serve=self._join)
        self._loop = asyncio.get_running_loop()
        self._children: list[Child] = []
        self._running: dict[int, _Running] = {}
        self._epochs = count(1)
        self._watch: asyncio.Task[None] | None = None
        #: error with which further tasks fail; None while the worker can run tasks
        self._end_cause: Exception | None = None

    def _join(self, config: WorkerConfig, sessions: Sessions) -> LocalSession:
        self._session = LocalSession(sessions, self._receive)
        return self._session

    async def start(self) -> session_pb2.WorkerInfo:
        """Start all ranks, and return the worker's description.

        Raises the error of rank 0's start, or ClusterFailed if another rank fails.
        """
        rendezvous = await self._rank.open() if self._config.worker.num_ranks > 1 else ""
        # Rank 0 runs in this process, where CUDA uses the first GPU.
        [group] = groups = self._config.groups
        _, *gpus = gpus_of_ranks(groups, group, visible_gpus(groups, os.environ))
        for rank, gpu in enumerate(gpus, 1):
            await self._spawn(rank, rendezvous, gpu)
        others = asyncio.gather(*(child.report() for child in self._children))
        info, _ = await asyncio.gather(self._rank.start(), others)
        self._watch = asyncio.create_task(self._watch_rank())
        return info

    async def _spawn(self, rank: int, rendezvous: str, gpu: str) -> None:
        config = self._config
        log_dir = config.state_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"offline-{os.getpid()}.{rank}"
        launch = RankLaunch(name, config.log_level, config.worker, rank, rendezvous, gpu)
        assert config.worker.num_threads is not None
        launcher = SubprocessLauncher(rank_environment(config.worker.num_threads, config.worker))
        child = Child(launch, launcher, log_dir / f"offline.{rank}.log")
        self._children.append(child)
        await child.start()

    async def _watch_rank(self) -> None:
        try:
            await self._rank.wait()
        except RankFailed as error:
            self._end_all(ClusterFailed(f"the engine has ended: {error}"))

    def _end_all(self, cause: Exception) -> None:
        self._end_cause = cause
        for epoch in list(self._running):
            self._end(epoch, cause)

    async def stop(self) -> None:
        """Stop all ranks, and cancel running tasks. May be called in any state."""
        self._end_all(Cancelled("the engine was stopped"))
        if self._watch is not None:
            self._watch.cancel()
        await self._rank.stop()
        await asyncio.gather(*(child.stop(_STOP_S) for child in self._children))

    def submit(self, task: Task, done: Future[Completion], show: Show | None = None) -> None:
        """Start a task, and return at once.

        ``done`` receives the completion. If the engine has ended, it receives ClusterFailed, and if
        the worker was stopped, Cancelled. Cancelling ``done`` aborts the task. ``show`` is called
        with each chunk.
        """
        if self._end_cause is not None:
            _resolve(done, self._end_cause)
            return
        epoch = next(self._epochs)
        generation = Generation(epoch, task.request, self._tokenizer)
        deadline = self._deadline(epoch, task.timeout_s)
        self._running[epoch] = _Running(generation, done, show, deadline)
        done.add_done_callback(partial(self._on_done, epoch))
        self._session.start_all(generation.starts())

    def _deadline(self, epoch: int, timeout_s: float | None) -> asyncio.TimerHandle | None:
        if timeout_s is None:
            return None
        error = DeadlineExceeded(f"the deadline of {timeout_s:g} s has passed")
        return self._loop.call_later(timeout_s, self._fail, epoch, error)

    def _on_done(self, epoch: int, done: Future[Completion]) -> None:
        if done.cancelled() and epoch in self._running:
            self._loop.call_soon_threadsafe(self._abandon, epoch)

    def _abandon(self, epoch: int) -> None:
        if epoch in self._running:
            self._session.abort(epoch)
            self._forget(epoch)

    def _receive(self, progress: session_pb2.Progress) -> None:
        running = self._running.get(progress.epoch)
        if running is None:
            return
        generation, choice = running.generation, progress.choice
        offset = generation.num_tokens(choice)
        generation.add(progress)
        if running.show is not None and (chunk := generation.chunk(choice, offset)):
            running.show(chunk)
        if generation.error is not None:
            self._fail(progress.epoch, generation.error)
        elif generation.is_over:
            self._session.abort(progress.epoch)
            self._end(progress.epoch, generation.completion())
        elif generation.is_finished(choice):
            self._session.abort(progress.epoch, [choice])

    def _fail(self, epoch: int, error: EverliftError) -> None:
        generation = self._running[epoch].generation
        generation.error = error
        self._session.abort(epoch)
        self._end(epoch, generation.completion())

    def _end(self, epoch: int, result: Completion | Exception) -> None:
        _resolve(self._forget(epoch), result)

    def _forget(self, epoch: int) -> Future[Completion]:
        running = self._running.pop(epoch)
        if running.deadline is not None:
            running.deadline.cancel()
        return running.done


def _resolve(done: Future[Completion], result: Completion | Exception) -> None:
    if not done.set_running_or_notify_cancel():
        return
    if isinstance(result, Completion):
        done.set_result(result)
    else:
        done.set_exception(result)
