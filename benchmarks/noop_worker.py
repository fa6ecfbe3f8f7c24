"""Worker without a model, which sends tokens at a given pace or as fast as possible.

The benchmarks of the router start it as a process of its own:

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

#: Longest time between two frames, with or without tokens, in seconds.
_HEARTBEAT_S = 0.2
_TOKEN = 97
_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class TokenPacing:
    """Pace of a worker's tokens."""

    #: seconds between frames; 0: the next frame is sent as soon as the last one was taken
    pace_s: float
    #: number of sequences that the worker waits for before it sends tokens. It then sends tokens
    #: until all its sequences have ended
    gather: int
    #: tokens of each sequence in a frame; the first token of a sequence comes alone
    tokens: int


class _Sequence:
    __slots__ = ("epoch", "made", "most")

    def __init__(self, start: session_pb2.Start) -> None:
        self.epoch = start.epoch
        self.most = start.max_tokens
        self.made = len(start.output_ids)

    def step(self, progress: session_pb2.Progress, tokens: int) -> bool:
        """Write the next tokens to ``progress``; return whether the sequence has ended."""
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
    """Server of worker sessions, whose frames have the next tokens of every sequence.

    If a sequence starts between two frames, its first token is sent at once, in an extra frame.
    """

    def __init__(self, pacing: TokenPacing, model: str) -> None:
        self._pacing = pacing
        self.info = session_pb2.WorkerInfo(
            worker_id=f"noop-{time.time_ns()}",
            model=model,
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
        session = _Session(self.info, self._pacing)
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            async for frame in session.frames():
                yield frame
        finally:
            reading.cancel()


class _Session:
    def __init__(self, info: session_pb2.WorkerInfo, pacing: TokenPacing) -> None:
        self._info = info
        self._pacing = pacing
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
            has_enough = len(self._running) >= self._pacing.gather
            is_going = bool(self._running) and (is_going or has_enough)
            if not is_going:
                due = 0.0
                await self._wait_for_change(_HEARTBEAT_S)
                if len(self._running) < self._pacing.gather:
                    yield self._with_state(session_pb2.WorkerFrame())
                continue
            due = max(due + self._pacing.pace_s, time.perf_counter())
            while early := await self._new_sequences(due):
                yield self._step(early)
            yield self._step(list(self._running.values()))

    async def _new_sequences(self, due: float) -> list[_Sequence]:
        """Wait for new sequences until ``due``, and return them; empty if there are none.

        With a pace of 0, return an empty list at once.
        """
        if not self._pacing.pace_s:
            await asyncio.sleep(0)
        while (left_s := due - time.perf_counter()) > 0:
            if early := [self._running[epoch] for epoch in self._fresh if epoch in self._running]:
                return early
            await self._wait_for_change(left_s)
        return []

    async def _wait_for_change(self, timeout_s: float) -> None:
        """Wait until sequences have started or been aborted since the last call."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def _step(self, sequences: list[_Sequence]) -> session_pb2.WorkerFrame:
        frame = self._with_state(session_pb2.WorkerFrame())
        for sequence in sequences:
            if sequence.step(frame.progress.add(), self._pacing.tokens):
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


async def serve(internal_address: str, pacing: TokenPacing, model: str) -> None:
    info = await NoopWorker(pacing, model).start()
    async with grpc.aio.insecure_channel(internal_address) as channel:
        announce = session_pb2_grpc.RouterInternalStub(channel).Announce
        await announce(session_pb2.AnnounceRequest(worker=info))
    print("ready", flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def noop_worker(
    internal_address: str, pacing: TokenPacing, model: str = "fake"
) -> AsyncIterator[None]:
    """Run a worker of ``model`` in a process of its own, connected to a router.

    Raises RuntimeError if the process ends during its start.
    """
    module = ("-m", "benchmarks.noop_worker", internal_address)
    options = [f"--pace={pacing.pace_s}", f"--gather={pacing.gather}", f"--tokens={pacing.tokens}"]
    options.append(f"--model={model}")
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
    parser.add_argument("--model", default="fake")
    options = parser.parse_args()
    pacing = TokenPacing(options.pace, options.gather, options.tokens)
    asyncio.run(serve(options.internal_address, pacing, options.model))


if __name__ == "__main__":
    main()
