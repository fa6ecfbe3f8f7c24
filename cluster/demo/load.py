"""Clients of the demo: gRPC requests, with a transcript of everything that arrives.

The clients call the gRPC API directly. The client library would drop repeated tokens, but the demo
has to count them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import quantiles
from typing import TypedDict

import grpc

from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc


class Percentiles(TypedDict):
    """50th and 99th percentile in milliseconds; None if there were no values."""

    p50: float | None
    p99: float | None


class Summary(TypedDict):
    """Summary that `everlift demo --json` writes; latencies are measured by the clients."""

    requests: int
    completed: int
    #: outputs equal to the expected ones: the right answers, or the outputs of the undisturbed run
    identical: int
    output_tokens: int
    migrated: int
    tokens_lost: int
    tokens_repeated: int
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """Request to send, with its expected output; ``shown`` is the prompt as the live view shows it.

    ``expected`` is the expected text and ``expected_ids`` are its token ids; None if unknown.
    """

    shown: str
    request: pb.GenerateRequest
    expected: str | None = None
    expected_ids: tuple[int, ...] | None = None


@dataclass
class Transcript:
    """Record of everything that the client of one request received.

    Times are those of the monotonic clock, in seconds.
    """

    task: Task
    request_id: str = ""
    started_at: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: arrival of each token, in the order of arrival
    times: list[float] = field(default_factory=list)
    #: offset of each token, in the order of arrival
    offsets: list[int] = field(default_factory=list)
    #: epochs of the attempts that generated the tokens, in order
    epochs: list[int] = field(default_factory=list)
    finished: bool = False
    stored_tokens: int = 0
    error: str = ""

    def add(self, piece: pb.GenerateResponse, now: float) -> None:
        self.request_id = piece.request_id
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        count = len(piece.token_ids)
        self.times.extend([now] * count)
        self.offsets.extend(range(piece.offset, piece.offset + count))
        if count and piece.epoch not in self.epochs[-1:]:
            self.epochs.append(piece.epoch)
        self.finished = bool(piece.finish_reason)

    @property
    def migrated(self) -> bool:
        """Return whether more than one attempt generated the request's tokens."""
        return len(self.epochs) > 1

    @property
    def lost_tokens(self) -> int:
        """Number of tokens that the ledger has stored and the client never received."""
        return self.stored_tokens - len(set(self.offsets))

    @property
    def repeated_tokens(self) -> int:
        return len(self.offsets) - len(set(self.offsets))

    @property
    def is_identical(self) -> bool:
        task = self.task
        has_ids = task.expected_ids is None or tuple(self.token_ids) == task.expected_ids
        return self.finished and self.text == task.expected and has_ids

    def as_task(self) -> Task:
        """Return the same request with the output of this run as the expected output."""
        return replace(self.task, expected=self.text, expected_ids=tuple(self.token_ids))


class Load:
    """Clients that send all tasks to one router at the same time, and record their transcripts."""

    def __init__(self, address: str, tasks: Sequence[Task]) -> None:
        self.transcripts = [Transcript(task) for task in tasks]
        self.started_at = self.ended = 0.0
        self._address = address

    @property
    def output_tokens(self) -> int:
        return sum(len(t.offsets) for t in self.transcripts)

    @property
    def completed(self) -> int:
        return sum(t.finished for t in self.transcripts)

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            self.started_at = time.monotonic()
            await asyncio.gather(*(_follow(stub, t) for t in self.transcripts))
            self.ended = time.monotonic()
            for transcript in self.transcripts:
                # A request that was refused before its first response has no id, and the ledger
                # has no tokens of it.
                if transcript.request_id:
                    await _count_stored(stub, transcript)

    def summary(self) -> Summary:
        done = self.transcripts
        gaps = [later - earlier for t in done for earlier, later in pairwise(t.times)]
        return Summary(
            requests=len(done),
            completed=self.completed,
            identical=sum(t.is_identical for t in done),
            output_tokens=self.output_tokens,
            migrated=sum(t.migrated for t in done),
            tokens_lost=sum(t.lost_tokens for t in done),
            tokens_repeated=sum(t.repeated_tokens for t in done),
            ttft_ms=_percentiles([t.times[0] - t.started_at for t in done if t.times]),
            inter_token_ms=_percentiles(gaps),
            output_tokens_per_s=round(self.output_tokens / (self.ended - self.started_at), 1),
        )


async def _follow(stub: inference_pb2_grpc.InferenceAsyncStub, transcript: Transcript) -> None:
    transcript.started_at = time.monotonic()
    try:
        async for piece in stub.Generate(transcript.task.request):
            transcript.add(piece, time.monotonic())
    except grpc.aio.AioRpcError as error:
        transcript.error = f"{error.code().name}: {error.details()}"


async def _count_stored(
    stub: inference_pb2_grpc.InferenceAsyncStub, transcript: Transcript
) -> None:
    known = await stub.GetRequest(pb.GetRequestRequest(request_id=transcript.request_id))
    transcript.stored_tokens = known.output_tokens


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    if not seconds:
        return Percentiles(p50=None, p99=None)
    # ``quantiles`` needs at least two values.
    values = seconds if len(seconds) > 1 else [*seconds, *seconds]
    cuts = quantiles(values, n=100, method="inclusive")
    return Percentiles(p50=round(cuts[49] * 1e3, 2), p99=round(cuts[98] * 1e3, 2))
