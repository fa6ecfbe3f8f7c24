"""A worker that computes nothing: it makes tokens as fast, or at such a pace, as it is told.

As a process of its own, which the benchmark of the router starts:

    python -m benchmarks.noop_worker INTERNAL_ADDRESS [--pace SECONDS] [--gather N] [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from everlift.channels import SERVER_OPTIONS
from everlift.hashes import BLOCK_SIZE
from everlift.v1 import session_pb2, session_pb2_grpc

#: A worker says something so often, tokens or not.
_BEAT_S = 0.2
_TOKEN = 97
_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class Habits:
    #: seconds between frames; 0: the next one as soon as the last was taken
    pace_s: float
    #: sequences that it has before it begins; then it goes on until these have ended
    gather: int
    #: of each sequence in a frame. Its first one comes alone, as of a prompt that was computed
    tokens: int


class _Sequence:
    __slots__ = ("epoch", "made", "most")

    def __init__(self, start: session_pb2.Start) -> None:
        self.epoch = start.epoch
        self.most = start.max_tokens
        self.made = len(start.output_ids)

    def step(self, progress: session_pb2.Progress, tokens: int) -> bool:
        """Fills it with the next ones; whether they are its last."""
        count = min(tokens, self.most - self.made) if self.made else 1
        progress.epoch = self.epoch
        progress.offset = self.made
        progress.token_ids.extend([_TOKEN] * count)
        self.made += count
        is_last = self.made == self.most
        if is_last:
            progress.stop = session_pb2.STOP_CAUSE_LENGTH
        return is_last


class NoopWorker(session_pb2_grpc.WorkerSessionServicer):
    """Frames with the next tokens of every sequence that it has. A sequence that comes between two
    of them has its first token at once, in a frame of its own."""

    def __init__(self, habits: Habits) -> None:
        self._habits = habits
        self.info = session_pb2.WorkerInfo(
            worker_id=f"noop-{time.time_ns()}",
            model="fake",
            fingerprint="bench",
            block_size=BLOCK_SIZE,
            num_blocks=1 << 24,
            max_num_seqs=_SLOTS,
            max_model_len=1 << 20,
            vocab_size=1024,
            max_num_batched_tokens=8192,
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)

    async def start(self) -> session_pb2.WorkerInfo:
        session_pb2_grpc.add_WorkerSessionServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.info.address = f"127.0.0.1:{port}"
        return self.info

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Connect(
        self, request_iterator: AsyncIterator[session_pb2.RouterFrame], context: Any
    ) -> AsyncIterator[session_pb2.WorkerFrame]:
        session = _Session(self.info, self._habits)
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            async for frame in session.frames():
                yield frame
        finally:
            reading.cancel()


class _Session:
    def __init__(self, info: session_pb2.WorkerInfo, habits: Habits) -> None:
        self._info = info
        self._habits = habits
        self._running: dict[int, _Sequence] = {}
        self._fresh: list[int] = []
        self._changed = asyncio.Event()
        self._number = 0

    async def read(self, frames: AsyncIterator[session_pb2.RouterFrame]) -> None:
        async for frame in frames:
            for start in frame.starts:
                self._running[start.epoch] = _Sequence(start)
                self._fresh.append(start.epoch)
            for abort in frame.aborts:
                self._running.pop(abort.epoch, None)
            self._changed.set()

    async def frames(self) -> AsyncIterator[session_pb2.WorkerFrame]:
        yield session_pb2.WorkerFrame(hello=self._info, state=self._state())
        is_going, due = False, 0.0
        while True:
            has_enough = len(self._running) >= self._habits.gather
            is_going = bool(self._running) and (is_going or has_enough)
            if not is_going:
                due = 0.0
                await self._change(_BEAT_S)
                if len(self._running) < self._habits.gather:
                    yield self._with_state(session_pb2.WorkerFrame())
                continue
            due = max(due + self._habits.pace_s, time.perf_counter())
            while early := await self._came_before(due):
                yield self._step(early)
            yield self._step(list(self._running.values()))

    async def _came_before(self, due: float) -> list[_Sequence]:
        """What has no token yet, as soon as there is something; nothing when it is ``due``."""
        if not self._habits.pace_s:
            await asyncio.sleep(0)
        while (left_s := due - time.perf_counter()) > 0:
            if early := [self._running[epoch] for epoch in self._fresh if epoch in self._running]:
                return early
            await self._change(left_s)
        return []

    async def _change(self, timeout_s: float) -> None:
        """Until something came since the last time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def _step(self, sequences: list[_Sequence]) -> session_pb2.WorkerFrame:
        frame = self._with_state(session_pb2.WorkerFrame())
        for sequence in sequences:
            if sequence.step(frame.progress.add(), self._habits.tokens):
                del self._running[sequence.epoch]
        return frame

    def _with_state(self, frame: session_pb2.WorkerFrame) -> session_pb2.WorkerFrame:
        frame.accepted_epochs.extend(self._fresh)
        self._fresh.clear()
        frame.state.CopyFrom(self._state())
        return frame

    def _state(self) -> session_pb2.WorkerState:
        self._number += 1
        return session_pb2.WorkerState(
            sequence_number=self._number,
            num_running=len(self._running),
            blocks_total=self._info.num_blocks,
        )


async def serve(internal_address: str, habits: Habits) -> None:
    info = await NoopWorker(habits).start()
    async with grpc.aio.insecure_channel(internal_address) as channel:
        announce = session_pb2_grpc.RouterInternalStub(channel).Announce
        await announce(session_pb2.AnnounceRequest(worker=info))
    print("ready", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def working(internal_address: str, habits: Habits) -> AsyncIterator[None]:
    """One such process at a router."""
    module = ("-m", "benchmarks.noop_worker", internal_address)
    options = [f"--pace={habits.pace_s}", f"--gather={habits.gather}", f"--tokens={habits.tokens}"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *module, *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError("a worker ended at its start")
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("internal_address")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--gather", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    habits = Habits(options.pace, options.gather, options.tokens)
    asyncio.run(serve(options.internal_address, habits))


if __name__ == "__main__":
    main()
