"""Event loop in a background thread, and the worker that runs in it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

import uvloop

from cluster.config import Config
from cluster.llm.completion import Completion
from cluster.llm.worker import LocalWorker, Show, Task
from cluster.model import fetched
from cluster.threads import threads_per_rank
from everlift.adapters import parse_adapters
from router.requests.tokenizer import ServedModel


class Background:
    """Thread with an event loop in which a worker runs, from the creation until ``close``.

    Every method may be called from any thread.
    """

    def __init__(self, config: Config) -> None:
        self._config = single_worker_config(config)
        self._ready: Future[ServedModel] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._worker: LocalWorker
        self._main_task: asyncio.Task[None]
        self._has_loop = threading.Event()
        #: makes sure that every task accepted by ``submit`` is answered before the worker stops
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="everlift-llm", daemon=True)
        self._thread.start()

    def ready(self) -> ServedModel:
        """Wait until the worker has started; return its model. Raises any error of the start."""
        return self._ready.result()

    def submit(self, task: Task, done: Future[Completion], show: Show | None = None) -> None:
        """Start a task at the worker, and return at once. Raises RuntimeError after ``close``.

        ``done`` receives the completion, ClusterFailed if the engine has ended, or Cancelled if the
        worker was stopped. Cancelling ``done`` aborts the task. ``show`` is called with each chunk,
        in the background thread.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this LLM is closed")
            self._loop.call_soon_threadsafe(self._worker.submit, task, done, show)

    def close(self) -> None:
        """Stop the worker and the thread, and cancel running tasks. A second call does nothing."""
        self._has_loop.wait()
        with suppress(RuntimeError):  # raised if the loop is already closed
            self._loop.call_soon_threadsafe(self._main_task.cancel)
        # Garbage collection may call this in the loop's own thread, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            uvloop.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._main_task = task
        self._has_loop.set()
        try:
            await self._serve()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        config = await fetched(self._config)
        model = ServedModel.load(
            config.model,
            config.model_revision,
            sampling_defaults=config.router.sampling_defaults,
        )
        model.clamps_max_tokens = config.router.clamp_max_tokens
        model.max_images = config.router.max_images
        model.max_image_bytes = config.router.max_image_bytes
        model.set_adapters(parse_adapters(config.adapters))
        self._worker = LocalWorker(config, model.tokenizer)
        try:
            info = await self._worker.start()
            model.update_limits([info])
            self._ready.set_result(model)
            await asyncio.Event().wait()
        finally:
            with self._lock:
                self._is_closed = True
            await self._worker.stop()


def single_worker_config(config: Config) -> Config:
    """Return ``config`` with one worker; each rank has ``worker.num_threads`` threads if it is set.

    Otherwise the available cores are divided equally among the ranks. The limit on grammars that
    wait for compilation is removed, so that no request is rejected.
    """
    single = config.single_worker()
    [group] = single.groups
    threads = threads_per_rank([group], group, len(os.sched_getaffinity(0)))
    grammar = replace(single.worker.grammar, max_queued=sys.maxsize)
    return replace(single, worker=replace(single.worker, num_threads=threads, grammar=grammar))
