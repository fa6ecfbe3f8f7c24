"""Simulated worker, whose steps take virtual time.

Sessions, loop, scheduler and server are the product's; the runner is the fake one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from cluster.local.start_reporter import Announcer
from everlift.engine_policy import EnginePolicy
from everlift.hashes import BLOCK_SIZE, chunk_id
from everlift.sampling import SamplingParams
from everlift.transport import Transport
from everlift.v1 import chaos_pb2, session_pb2
from tests.simulated_cluster.clock import VirtualLoop
from tests.simulated_cluster.grammars import SimGrammars
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.outcome import Abort, SequenceKey
from worker.engine.plan import Runner
from worker.engine.sequence import NO_SLOT, Sequence
from worker.runner.fake_runner import FakeRunner
from worker.serving.inbox import Inbox
from worker.serving.loop import CONFIRM_S, FirstSteps, LeadingLoop, Report
from worker.serving.server import SessionServer
from worker.serving.sessions import Grammars, Sessions


class _Orders(Inbox):
    """Inbox that wakes a task instead of a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.come = asyncio.Event()

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        self.come.set()

    def abort(self, abort: Abort) -> None:
        super().abort(abort)
        self.come.set()

    def set_policy(self, policy: EnginePolicy) -> None:
        super().set_policy(policy)
        self.come.set()

    def drain(self) -> None:
        super().drain()
        self.come.set()


#: Epochs of the sequences that fill a worker's KV cache, above those of requests.
_FILL_EPOCHS = 1 << 40
#: Priority of these sequences, above those of requests.
_FILL_PRIORITY = 1 << 20

#: Builder of runner and grammars; the runner reports the duration of each step in seconds.
Build = Callable[[WorkerConfig, Callable[[float], None]], tuple[Runner, Grammars]]


def build_fake(
    config: WorkerConfig, spend: Callable[[float], None]
) -> tuple[FakeRunner, SimGrammars]:
    """Return the runner and the grammars of the fake model."""
    assert config.num_blocks is not None, "a simulated worker needs num_blocks"
    swap_mib = config.swap_mib if config.preemption == "swap" else 0
    num_host_blocks = swap_mib * 1024 // config.fake.block_kib
    runner = FakeRunner(config.num_blocks, config.fake, num_host_blocks, sleep=spend)
    return runner, SimGrammars(config.fake.eos_token_id)


class SimWorker:
    """Worker in ``process``; it is passed to ``looked_at`` in the middle of each step."""

    def __init__(
        self,
        worker_id: str,
        config: WorkerConfig,
        process: VirtualLoop,
        transport: Transport,
        looked_at: Callable[[SimWorker], None],
        build: Build,
    ) -> None:
        self.worker_id = worker_id
        self.process = process
        self._config = config
        self._looked_at = looked_at
        self._transport = transport
        runner, grammars = build(config, self._spend)
        limits = Limits.of(config, runner)
        self.engine = Engine(runner, limits)
        self._orders = _Orders()
        self.sessions = Sessions(limits, self.engine.load(), self._orders, grammars)
        self.server = SessionServer(config, self.sessions, transport)
        self._loop = LeadingLoop(
            self.engine,
            self._orders,
            self._made,
            None,
            self._now,
            self._spend,
            self._announce,
        )
        self._spent = 0.0
        self._num_fills = 0
        #: unfinished sequences of ``fill``
        self._filling: set[SequenceKey] = set()
        self._report: Report | None = None
        self._confirmed = asyncio.Event()
        self.info = self._info(limits)

    def _info(self, limits: Limits) -> session_pb2.WorkerInfo:
        return session_pb2.WorkerInfo(
            worker_id=self.worker_id,
            address=self.server.address,
            model=self._config.name,
            fingerprint="fake",
            block_size=BLOCK_SIZE,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            tensor_parallel=1,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            device="fake",
        )

    async def run(self, routers: list[str]) -> None:
        """Serve, announce the worker, and step until cancelled."""
        await self.server.start(self.info)
        announcer = Announcer(self.info, routers, self._transport)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._step_for_ever())
            tasks.create_task(self._join(announcer))

    async def _join(self, announcer: Announcer) -> None:
        await announcer.announce()
        await announcer.keep_registered(lambda: self.server.has_no_router)

    def slow_down(self, factor: float, seconds: float) -> None:
        """Let each step take ``factor`` times as long, for ``seconds``."""
        self._orders.inject(
            chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_SLOW, factor=factor, seconds=seconds)
        )

    def preempt(self, request_id: str) -> None:
        """Preempt a request between two steps; it resumes when blocks are free."""
        for sequence in self.engine.sequences():
            if sequence.request_id == request_id and sequence.slot != NO_SLOT:
                self.engine.preempt(sequence)

    def fill(self, num_blocks: int) -> None:
        """Preempt all sequences for one of this worker's own, which fills ``num_blocks`` blocks.

        Cached blocks are evicted for it, and those of the preempted sequences are swapped out. Call
        it between two steps.
        """
        if self.sessions.is_draining:
            return
        for sequence in self.engine.sequences():
            if sequence.slot != NO_SLOT:
                self.engine.preempt(sequence)
        self._num_fills += 1
        key = SequenceKey(_FILL_EPOCHS + self._num_fills, 0)
        self._filling.add(key)
        length = num_blocks * BLOCK_SIZE - 1
        self._orders.start(
            Sequence(
                key=key,
                request_id="fill",
                tokens=[1] * length,
                num_prompt=length,
                max_tokens=1,
                sampling=SamplingParams(temperature=0.0),
                stop_token_ids=frozenset(),
                salt=b"fill %d" % self._num_fills,
                priority=_FILL_PRIORITY,
            )
        )

    @property
    def is_filling(self) -> bool:
        """True if a sequence of ``fill`` is unfinished."""
        return bool(self._filling)

    def device_chunks(self) -> set[int]:
        """Return the chunks in its KV cache."""
        pool = self.engine._scheduler._batch._pool
        hashes = map(pool.hash_of, range(pool.num_blocks))
        return {chunk_id(it) for it in hashes if it in pool._chunks}

    def host_chunks(self) -> set[int]:
        """Return the chunks in its host memory."""
        store = self.engine._scheduler._batch._store
        return {chunk_id(it) for it in store._stored if it in store._chunks}

    async def drain(self) -> None:
        """Drain the worker, and stop its server."""
        await self.server.drain()
        await self.server.stop()

    async def _step_for_ever(self) -> None:
        while True:
            orders = self._orders.wait(timeout_s=0)
            if not orders and not self.engine.has_work:
                self._orders.come.clear()
                await self._orders.come.wait()
                continue
            self._confirmed.set()
            self._loop.run_iteration(orders)
            # The step begins when the routers have confirmed what they must know before it.
            with suppress(TimeoutError):
                async with asyncio.timeout(CONFIRM_S):
                    await self._confirmed.wait()
            self._looked_at(self)
            await asyncio.sleep(self._spent)
            self._spent = 0.0
            self._deliver_report()

    def _deliver_report(self) -> None:
        """Deliver the last step's report, because the step's time is over."""
        if self._report is not None:
            self.server.deliver(self._report)
            self._report = None

    def _announce(self, first: FirstSteps) -> None:
        if first.to_confirm:
            self._confirmed.clear()
        self.server.announce(first, self._confirmed.set)

    def _made(self, report: Report) -> None:
        self._report = report
        if self._filling:
            self._filling -= {it.key for it in report.outcomes if it.stop is not None}

    def _spend(self, seconds: float) -> None:
        self._spent += seconds

    def _now(self) -> float:
        return self.process.time() + self._spent
