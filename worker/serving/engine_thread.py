"""Engine thread of a rank, which builds, runs and closes the runner.

One thread does all of this, because CUDA and OpenMP have state per thread. It is a daemon thread,
so that the process can exit even if a step never returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from everlift import heap, logs
from worker.config import WorkerConfig
from worker.engine.adapter import EngineAdapter
from worker.engine.engine import COLLECTIVE_ERRORS, Engine
from worker.engine.limits import Limits
from worker.engine.plan import Plan, Runner
from worker.engine.step_times import Stopwatch
from worker.parallel.rendezvous import RankLinks
from worker.parallel.step_log import StepLogReader
from worker.parallel.watchdog import Watchdog
from worker.runner.fake_runner import FakeRunner
from worker.serving.inbox import Inbox, Successor
from worker.serving.loop import FirstSteps, LeadingLoop, Report, follow
from worker.serving.startup import Startup

log = logs.get_logger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


class EngineThread:
    """Thread of the engine, which starts at once.

    ``connect`` connects this rank with the others. The attribute ``links`` has its result, which
    the creator of this object must close after the thread has ended. ``inbox`` has the orders to
    the engine. ``report`` and ``announce`` are called in the thread, as LeadingLoop describes.
    ``startup`` records the durations of the parts of the start. Only the vLLM engine calls
    ``on_failure``, in any thread and with the cause, if it can run no further step, even while it
    has no work.

    The result of the future ``ready`` is the engine, set before its first step. The future
    ``ended`` is done when the thread ends, with None or the error that ended it. An error before
    the engine is ready is set on both.

    The attribute ``successor`` names the model that the worker serves next. Only ranks above 0 set
    the attribute, before ``ended`` is done; None means that no model follows.
    """

    def __init__(
        self,
        config: WorkerConfig,
        connect: Callable[[], RankLinks],
        inbox: Inbox,
        report: Callable[[Report], None],
        announce: Callable[[FirstSteps], None],
        startup: Startup,
        on_failure: Callable[[str], None],
    ) -> None:
        self.ready: Future[EngineAdapter] = Future()
        self.ended: Future[None] = Future()
        self.links = RankLinks()
        self.successor: Successor | None = None
        self.watchdog = Watchdog(config.step_timeout)
        self._stopwatch = Stopwatch(time.perf_counter)
        self._config = config
        self._connect = connect
        self._inbox = inbox
        self._report = report
        self._announce = announce
        self._startup = startup
        self._on_failure = on_failure
        # From here on the futures cannot be cancelled.
        self.ready.set_running_or_notify_cancel()
        self.ended.set_running_or_notify_cancel()
        threading.Thread(target=self._main, name="engine", daemon=True).start()

    def stop(self, successor: Successor | None = None) -> None:
        """Make the thread end after the current step; return without waiting for its end.

        On rank 0, ``successor`` tells the other ranks which model the worker serves next.

        On a rank above 0 this breaks the connection to rank 0, if it is open, so that the error
        ChannelBroken is set on ``ended``.
        """
        self._inbox.stop(successor)
        if isinstance(self.links.log, StepLogReader):
            self.links.log.interrupt()

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _run(self) -> None:
        with self._startup.part("meet_s"):
            self.links = self._connect()
        if self._config.engine == "vllm":
            self._run_vllm()
            return
        runner = _build_runner(self._config, self.links, self._startup, self._stopwatch)
        try:
            self._loop(self._build_engine(runner))
        finally:
            _close(runner)

    def _run_vllm(self) -> None:
        # Imported here because only this engine needs vLLM.
        from worker.vllm_engine.build import build_engine

        with self._startup.part("load_s"):
            engine = build_engine(self._config, self._timed, self._stopwatch, self._on_failure)
        try:
            self._loop(engine)
        finally:
            _close(engine)

    def _build_engine(self, runner: Runner) -> Engine:
        limits = Limits.of(self._config, runner)
        launch = runner.launch if limits.can_launch_ahead else None
        survivable = (Exception,) if self._config.num_ranks == 1 else COLLECTIVE_ERRORS
        return Engine(runner, limits, survivable, self._watched, self._stopwatch, launch)

    def _watched(self, plan: Plan) -> AbstractContextManager[None]:
        return self._timed(plan.step, plan.num_tokens)

    @contextmanager
    def _timed(self, step: int, num_tokens: int) -> Iterator[None]:
        self.watchdog.begin_step(step, num_tokens, time.monotonic())
        try:
            yield
        finally:
            self.watchdog.end_step(time.monotonic())

    def _loop(self, engine: EngineAdapter) -> None:
        self.ready.set_result(engine)
        if isinstance(self.links.log, StepLogReader):
            self.successor = follow(engine, self.links.log, self.links.log.rank)
        else:
            LeadingLoop(
                engine,
                self._inbox,
                self._report,
                self.links.log,
                announce=self._announce,
                checks_integrity=self._config.chaos,
            ).run()


def _close(runner: Closable) -> None:
    """Close ``runner``; errors are only logged, so that they do not hide why the loop ended."""
    try:
        runner.close()
    except Exception as error:
        log.warning("closing the runner failed", error=str(error))


def _build_runner(
    config: WorkerConfig, links: RankLinks, startup: Startup, stopwatch: Stopwatch
) -> Runner:
    if config.is_fake:
        num_blocks = config.num_blocks or config.cpu_kv_cache_mib * 1024 // config.fake.block_kib
        swap_mib = config.swap_mib if config.preemption == "swap" else 0
        return FakeRunner(num_blocks, config.fake, swap_mib * 1024 // config.fake.block_kib)
    with startup.part("import_s"), heap.pause_gc():
        from worker.parallel.group import Group
        from worker.runner.build import build_runner
    with startup.part("load_s"):
        return build_runner(config, links.group or Group.single(), stopwatch)
