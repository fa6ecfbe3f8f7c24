"""A worker that computes nothing: it makes tokens as fast, or at such a pace, as it is told.

As a process of its own, which the benchmark of the router starts:

    python -m tests.perf.noop_worker INTERNAL_ADDRESS [--pace SECONDS] [--gather N] [--slots N]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from everlift.blockhash import BLOCK_SIZE
from everlift.channels import SERVER_OPTIONS
from everlift.v1 import session_pb2, session_pb2_grpc

#: A worker says something so often, tokens or not.
_BEAT_S = 0.2
_TOKEN = 97


class _Sequence:
    __slots__ = ("epoch", "made", "most")

    def __init__(self, start: session_pb2.Start) -> None:
        self.epoch = start.epoch
        self.most = start.max_tokens
        self.made = len(start.output_ids)


class NoopWorker(session_pb2_grpc.WorkerSessionServicer):
    """Every ``pace_s`` one frame with the next token of each sequence that it has; with 0 as soon
    as the last frame was taken. It begins a frame when it has ``gather`` sequences, and goes on
    until these have ended."""

    def __init__(self, pace_s: float = 0.0, gather: int = 1, slots: int = 4096) -> None:
        self._pace_s = pace_s
        self._gather = gather
        self.info = session_pb2.WorkerInfo(
            worker_id=f"noop-{time.time_ns()}",
            model="fake",
            fingerprint="bench",
            block_size=BLOCK_SIZE,
            num_blocks=1 << 24,
            max_num_seqs=slots,
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
        session = _Session(self.info, self._pace_s, self._gather)
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            async for frame in session.frames():
                yield frame
        finally:
            reading.cancel()


class _Session:
    def __init__(self, info: session_pb2.WorkerInfo, pace_s: float, gather: int) -> None:
        self._info = info
        self._pace_s = pace_s
        self._gather = gather
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
            is_going = bool(self._running) and (is_going or len(self._running) >= self._gather)
            if not is_going:
                yield await self._idle()
                continue
            due = max(due + self._pace_s, time.perf_counter())
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            else:
                await asyncio.sleep(0)
            yield self._step()

    async def _idle(self) -> session_pb2.WorkerFrame:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), _BEAT_S)
        except TimeoutError:
            pass
        return self._with_state(session_pb2.WorkerFrame())

    def _step(self) -> session_pb2.WorkerFrame:
        frame = self._with_state(session_pb2.WorkerFrame())
        ended = []
        for sequence in self._running.values():
            is_last = sequence.made + 1 >= sequence.most
            frame.progress.add(
                epoch=sequence.epoch,
                offset=sequence.made,
                token_ids=(_TOKEN,),
                stop=session_pb2.STOP_CAUSE_LENGTH if is_last else 0,
            )
            sequence.made += 1
            if is_last:
                ended.append(sequence.epoch)
        for epoch in ended:
            del self._running[epoch]
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


async def serve(internal_address: str, pace_s: float, gather: int, slots: int) -> None:
    info = await NoopWorker(pace_s, gather, slots).start()
    async with grpc.aio.insecure_channel(internal_address) as channel:
        announce = session_pb2_grpc.RouterInternalStub(channel).Announce
        await announce(session_pb2.AnnounceRequest(worker=info))
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("internal_address")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--gather", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4096)
    options = parser.parse_args()
    asyncio.run(serve(options.internal_address, options.pace, options.gather, options.slots))


if __name__ == "__main__":
    main()
