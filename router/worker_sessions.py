"""Streams between this router and the workers.

The router orders the start and the abort of sequences. A worker sends a frame for each engine step
that produced something for this router, and as a heartbeat if it has sent none for some time.

A worker is up from its first message on a stream until the stream breaks or the worker is silent
for too long. The stream of a silent worker is closed and opened again. When the worker notices the
new stream, it ends the sequences that it still runs for this router. If a worker that was declared
lost sends a frame under the same id, this counts as a false alarm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc

from everlift import logs
from everlift.errors import InvalidRequest, UnknownWorker
from everlift.hashes import BLOCK_SIZE
from everlift.transport import Transport
from everlift.v1 import chaos_pb2, inference_pb2, session_pb2, session_pb2_grpc
from router.config import RouterConfig
from router.event_loop import FREEZE_S, now
from router.outbox import Outbox

log = logs.get_logger(__name__)

#: Seconds between two dials of the same worker.
_RECONNECT_S = 0.2
#: Seconds within which a worker checks an adapter, which it may have to download.
_CHECK_S = 300.0
#: Seconds within which a worker answers a dial, if it answers at all.
_ANSWER_S = 5.0
#: Share of ``worker_silence`` after which a worker is declared lost, so that the loss is handled
#: before ``worker_silence`` is over. With the default settings, five heartbeats are missing by
#: then.
_LOST_SHARE = 0.85
#: Number of checks for silence during ``worker_silence``.
_NUM_CHECKS = 20
#: Number of sequences of a frame that are handled before other tasks get a turn of the event loop,
#: so that the first token of another request, or its dispatch, does not wait for all of a large
#: batch.
_MAX_PER_TURN = 64
#: Starts with more prompt tokens than this are sent in a message of their own.
_LARGE_IDS = 1 << 14
#: A wake-up that is this many seconds late was delayed by a stall of the event loop.
_STALL_S = 0.2


class Listener(Protocol):
    """Receiver of workers' messages; its methods run in the event loop and must not block."""

    def worker_up(self, info: session_pb2.WorkerInfo) -> None: ...

    def worker_frame(self, worker_id: str, frame: session_pb2.WorkerFrame) -> None:
        """Handle a worker's message, except the Progress messages in it.

        Each of these is then passed to ``worker_progress``.
        """
        ...

    def worker_progress(self, worker_id: str, progress: session_pb2.Progress) -> None: ...

    def worker_lost(self, worker_id: str) -> None: ...


class _Replaced(Exception):
    """Raised if another worker answers at the address of a worker."""


class WorkerLink:
    """Stream to one worker, which is opened again whenever it breaks, until ``close``.

    Times are in seconds of the router's clock (``event_loop.now``).
    """

    def __init__(
        self,
        info: session_pb2.WorkerInfo,
        hello: session_pb2.RouterHello,
        policy: session_pb2.EnginePolicy | None,
        listener: Listener,
        silence_s: float,
        transport: Transport,
    ) -> None:
        """Create the link, and open the stream; ``policy`` is None if no engine policy was set."""
        self.info = info
        self.state = session_pb2.WorkerState()
        self.running: list[inference_pb2.RunningSequence] = []
        #: copy of ``state.decoding``, so that keeping it does not keep the whole frame
        self.decoding = session_pb2.TimeBreakdown()
        self.arithmetic: str | None = info.arithmetic
        self.adapters = session_pb2.LoadedAdapters()
        self.is_up = False
        #: how often the worker was declared lost and then sent a frame
        self.false_alarms = 0
        self.last_message_at = self._dialled_at = now()
        #: seconds since the last message in which this process was frozen and could receive none
        self._frozen_s = 0.0
        self._was_up = False
        self._hello = hello
        self._policy = policy
        self._listener = listener
        self._silence_s = silence_s
        self._transport = transport
        self._delayed_until = 0.0
        self._outbox = Outbox(session_pb2.RouterFrame())
        self._call: asyncio.Task[None] | None = None
        self._tasks = [
            asyncio.create_task(self._dial()),
            asyncio.create_task(self._monitor_silence()),
        ]

    def start(self, starts: Sequence[session_pb2.Start]) -> None:
        frame = session_pb2.RouterFrame()
        num_ids = sum(len(start.prompt_ids) for start in starts)
        for start in starts:
            # Merging serialises a message, but a list of numbers that is set here is only copied.
            added = frame.starts.add(prompt_ids=start.prompt_ids)
            start.ClearField("prompt_ids")
            added.MergeFrom(start)
        has_images = any(start.images for start in starts)
        self._outbox.add(frame, is_large=has_images or num_ids > _LARGE_IDS)

    def abort(self, epoch: int, choices: Sequence[int]) -> None:
        abort = session_pb2.Abort(epoch=epoch, choices=choices)
        self._outbox.add(session_pb2.RouterFrame(aborts=[abort]))

    def confirm(self, epoch: int) -> None:
        """Confirm to the worker that it may run the first step of the attempt ``epoch``.

        The worker has announced this step, and runs it after the confirmation, or after 0.2 s.
        """
        self._outbox.add(session_pb2.RouterFrame(confirmed_epochs=[epoch]))

    def drain(self) -> None:
        """Tell the worker to drain.

        The worker then accepts no more requests, and returns its requests to their routers.
        """
        self._outbox.add(session_pb2.RouterFrame(drain=True))

    def change_model(self, model: str) -> None:
        """Tell the worker to drain, and to serve ``model`` then."""
        self._outbox.add(session_pb2.RouterFrame(next_model=model))

    def set_policy(self, policy: session_pb2.EnginePolicy) -> None:
        """Send the batching policy of the engine to the worker, now and after each reconnection."""
        self._policy = policy
        self._outbox.add(session_pb2.RouterFrame(engine_policy=policy))

    def change_adapters(self, load: session_pb2.AdapterLoad | None, unload: Sequence[str]) -> None:
        """Tell the worker to load an adapter if it has room, and to unload others when unused."""
        loads = [] if load is None else [load]
        frame = session_pb2.RouterFrame(preload_adapters=loads, unload_adapters=unload)
        self._outbox.add(frame)

    async def check_adapter(self, source: str) -> session_pb2.CheckAdapterResponse:
        """Return the worker's answer whether it can load the adapter of ``source``.

        Raises UnknownWorker if it does not answer.
        """
        request = session_pb2.CheckAdapterRequest(source=source)
        try:
            async with self._transport.channel(self.info.address) as channel:
                stub = session_pb2_grpc.WorkerSessionStub(channel)
                return await stub.CheckAdapter(request, timeout=_CHECK_S)
        except grpc.aio.AioRpcError as error:
            raise UnknownWorker(
                f"worker {self.info.worker_id} did not check the adapter: {error.code().name}"
            ) from None

    def inject(self, fault: chaos_pb2.Fault) -> None:
        self._outbox.add(session_pb2.RouterFrame(fault=fault))

    def delay_messages(self, seconds: float) -> None:
        """Delay all messages in both directions for ``seconds``, as a network failure does."""
        self._delayed_until = max(self._delayed_until, now() + seconds)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _dial(self) -> None:
        while True:
            self._dialled_at = now()
            self._call = asyncio.create_task(self._connect())
            try:
                await asyncio.wait([self._call])
            finally:
                self._call.cancel()
                self._outbox.close()
                self._mark_down()
                await asyncio.gather(self._call, return_exceptions=True)
            if not self._call.cancelled() and isinstance(self._call.exception(), _Replaced):
                log.info("address belongs to another worker", worker_id=self.info.worker_id)
                return
            await asyncio.sleep(_RECONNECT_S)

    async def _connect(self) -> None:
        try:
            async with self._transport.channel(self.info.address) as channel:
                await self._exchange(session_pb2_grpc.WorkerSessionStub(channel))
        except grpc.aio.AioRpcError as error:
            log.debug("stream ended", worker_id=self.info.worker_id, code=error.code().name)
        except _Replaced:
            raise
        except Exception:
            log.exception("message of a worker failed")

    async def _exchange(self, stub: session_pb2_grpc.WorkerSessionAsyncStub) -> None:
        first = session_pb2.RouterFrame(hello=self._hello, engine_policy=self._policy)
        self._outbox = Outbox(first)
        was_up = False
        async for frame in stub.Connect(self._outgoing(self._outbox)):
            await self._wait_for_delay()
            if was_up and not self.is_up:
                # The worker was declared lost while this stream was delayed. It reports its whole
                # state, such as all cached chunks, only at the beginning of a stream.
                return
            if frame.HasField("hello") and frame.hello.worker_id != self.info.worker_id:
                raise _Replaced
            self._note_message()
            if not self.is_up:
                self._mark_up()
            was_up = True
            await self._on_frame(frame)

    async def _outgoing(
        self, outbox: Outbox[session_pb2.RouterFrame]
    ) -> AsyncIterator[session_pb2.RouterFrame]:
        async for frame in outbox.messages():
            await self._wait_for_delay()
            yield frame

    async def _wait_for_delay(self) -> None:
        while (delay_s := self._delayed_until - now()) > 0:
            await asyncio.sleep(delay_s)

    async def _on_frame(self, frame: session_pb2.WorkerFrame) -> None:
        if frame.HasField("state"):
            self.state = frame.state
            self.decoding = session_pb2.TimeBreakdown()
            self.decoding.CopyFrom(frame.state.decoding)
            if frame.state.running or not frame.state.num_running:
                self.running = list(frame.state.running)
        if frame.HasField("loaded_adapters"):
            self.adapters = frame.loaded_adapters
        self._listener.worker_frame(self.info.worker_id, frame)
        for place, progress in enumerate(frame.progress, 1):
            self._listener.worker_progress(self.info.worker_id, progress)
            if not place % _MAX_PER_TURN:
                await asyncio.sleep(0)

    async def _monitor_silence(self) -> None:
        """Declare a worker lost if it is silent for nearly ``silence_s`` seconds.

        The worker's stream is then closed, so that ``_dial`` opens a new one. A check is skipped if
        the event loop was late, because messages that have arrived may not have been read yet.
        """
        interval = self._silence_s / _NUM_CHECKS
        while True:
            due = now() + interval
            await asyncio.sleep(interval)
            if (late := now() - due) < _STALL_S:
                self._check_silence()
            elif late >= FREEZE_S:
                self._frozen_s += late

    def _check_silence(self) -> None:
        silent_s = now() - max(self.last_message_at, self._dialled_at) - self._frozen_s
        if silent_s < (_LOST_SHARE * self._silence_s if self.is_up else _ANSWER_S):
            return
        if self.is_up:
            log.warning(
                "worker not responding", worker_id=self.info.worker_id, seconds=round(silent_s, 2)
            )
            self._mark_down()
        if self._call is not None and now() >= self._delayed_until:
            self._call.cancel()

    def _note_message(self) -> None:
        if not self.is_up and self._was_up:
            self.false_alarms += 1
            late = round(now() - self.last_message_at, 2)
            log.warning("frame from a lost worker", worker_id=self.info.worker_id, seconds=late)
        self.last_message_at, self._frozen_s = now(), 0.0

    def _mark_up(self) -> None:
        self.is_up = self._was_up = True
        self._listener.worker_up(self.info)

    def _mark_down(self) -> None:
        if self.is_up:
            self.is_up = False
            self._listener.worker_lost(self.info.worker_id)


class Sessions:
    """Links to the workers in the ledger's worker table."""

    def __init__(
        self,
        config: RouterConfig,
        hello: session_pb2.RouterHello,
        listener: Listener,
        transport: Transport,
    ) -> None:
        self._config = config
        self._hello = hello
        self._listener = listener
        self._transport = transport
        self._links: dict[str, WorkerLink] = {}
        #: batching policy of the engines; None if none was ever set
        self._policy: session_pb2.EnginePolicy | None = None
        self._past_false_alarms = 0

    @property
    def false_alarms(self) -> int:
        """Number of times that a worker was declared lost and then sent a frame."""
        return self._past_false_alarms + sum(link.false_alarms for link in self._links.values())

    def is_any_up(self, model: str) -> bool:
        """Return whether a worker of the model is connected."""
        return any(link.is_up and link.info.model == model for link in self._links.values())

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def start(self, worker_id: str, starts: Sequence[session_pb2.Start]) -> bool:
        link = self._links.get(worker_id)
        if link is None or not link.is_up:
            return False
        link.start(starts)
        return True

    def abort(self, worker_id: str, epoch: int, choices: Sequence[int] = ()) -> None:
        link = self._links.get(worker_id)
        if link is not None and link.is_up:
            link.abort(epoch, choices)

    def confirm(self, worker_id: str, epoch: int) -> None:
        link = self._links.get(worker_id)
        if link is not None and link.is_up:
            link.confirm(epoch)

    def connection(self, worker_id: str) -> WorkerLink | None:
        """Return the link to this worker; None if there is none."""
        return self._links.get(worker_id)

    def drain(self, worker_id: str) -> int:
        """Tell a worker to drain; return how many sequences it had in its last report.

        The worker then accepts no more requests, and returns its requests to their routers. Raises
        UnknownWorker if it is not connected.
        """
        link = self._connected(worker_id)
        link.drain()
        return link.state.num_running + link.state.num_waiting

    def change_model(self, worker_id: str, model: str) -> int:
        """Tell a worker to serve another model; return how many sequences its last report had.

        Raises UnknownWorker if the worker is not connected. Raises InvalidRequest if it cannot
        change to ``model``, is draining, or is already changing its model.
        """
        link = self._connected(worker_id)
        others = link.info.other_models
        if model not in others:
            can = f"only to {' or '.join(map(repr, others))}" if others else "to no other model"
            raise InvalidRequest(
                f"worker {worker_id} serves {link.info.model!r} and can change {can}, not to "
                f"{model!r}",
                field="model",
            )
        state = link.state
        if state.draining or state.next_model:
            cause = f"is changing to {state.next_model!r}" if state.next_model else "is draining"
            raise InvalidRequest(f"worker {worker_id} {cause}", field="worker_id")
        link.change_model(model)
        return link.state.num_running + link.state.num_waiting

    def set_policy(self, policy: session_pb2.EnginePolicy) -> None:
        """Set the batching policy of all engines, including those of workers that join later."""
        self._policy = policy
        for link in self._links.values():
            link.set_policy(policy)

    def inject(self, worker_id: str, fault: chaos_pb2.Fault) -> None:
        """Inject a fault into a worker. Raises UnknownWorker if it is not connected."""
        self._connected(worker_id).inject(fault)

    def _connected(self, worker_id: str) -> WorkerLink:
        link = self._links.get(worker_id)
        if link is None or not link.is_up:
            raise UnknownWorker(f"no worker {worker_id!r} is connected")
        return link

    async def reconcile(self, workers: list[session_pb2.WorkerInfo]) -> None:
        """Connect to the workers in ``workers``, and disconnect from all others.

        ``workers`` is the ledger's worker table. A worker whose KV blocks do not have BLOCK_SIZE
        tokens is ignored.
        """
        named = {info.worker_id: info for info in workers if _has_our_block_size(info)}
        for worker_id in self._links.keys() - named.keys():
            await self._close_link(worker_id)
        for worker_id in named.keys() - self._links.keys():
            self._links[worker_id] = WorkerLink(
                named[worker_id],
                self._hello,
                self._policy,
                self._listener,
                self._config.worker_silence,
                self._transport,
            )

    def unreachable(self) -> list[str]:
        """Return the ids of workers that are down and have been silent for too long.

        The limit is the setting ``worker_forget``, in seconds since the worker's last message.
        """
        oldest = now() - self._config.worker_forget
        return [
            worker_id
            for worker_id, link in self._links.items()
            if not link.is_up and link.last_message_at < oldest
        ]

    async def _close_link(self, worker_id: str) -> None:
        link = self._links.pop(worker_id)
        self._past_false_alarms += link.false_alarms
        await link.close()

    async def close(self) -> None:
        await asyncio.gather(*(self._close_link(worker_id) for worker_id in list(self._links)))


def _has_our_block_size(info: session_pb2.WorkerInfo) -> bool:
    return info.block_size == BLOCK_SIZE
