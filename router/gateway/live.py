"""A request that this gateway answers for, from its acceptance to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from everlift.errors import EverliftError
from everlift.messages import FinishReason, Request
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.gateway.output import Output
from router.ledger.entry import Entry


class Phase(Enum):
    #: in the admission queue, or on its way there
    WAITING = "waiting"
    #: a worker has it
    RUNNING = "running"
    #: its last tokens are on their way into the ledger
    FINISHING = "finishing"
    #: its end, not by its last token, is on its way into the ledger
    ENDING = "ending"
    #: finished, or ended with an error
    OVER = "over"


class LiveRequest:
    """``now`` is the monotonic clock of the router in seconds.

    Three counts of tokens, each at most the one before: ``len(output)`` came from workers,
    ``stored`` are in the ledger, and ``readable`` may be seen by clients: what is stored, or more
    while the ledger is away and deliveries are marked.
    """

    def __init__(self, request: Request, entry: Entry, output: Output, now: float) -> None:
        self.request = request
        self.entry = entry
        self.output = output
        self.phase = Phase.WAITING
        self.on_disconnect = request.on_disconnect
        self.stored = self.readable = len(output)
        self.epoch = 0
        self.worker_id = ""
        self.finish_reason: FinishReason | None = None
        self.error: EverliftError | None = None
        self.attempts = entry.attempts
        self.migrations = 0
        #: the leader has had it before
        self.accepted = False
        #: a worker that could not be reached
        self.avoid = ""
        self.deadline: asyncio.TimerHandle | None = None
        self.grace: asyncio.TimerHandle | None = None
        self._epochs: list[tuple[int, int]] = [(0, 0)]
        self._unledgered_from: int | None = None
        self._watchers: set[asyncio.Event] = set()
        self._num_readers = 0
        self._began = self._waiting_since = now
        self._queued_s = 0.0
        self._first_token: float | None = None
        self._ended: float | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def is_ending(self) -> bool:
        """Over, or about to be: nothing else may happen to it."""
        return self.phase in (Phase.ENDING, Phase.OVER)

    @property
    def has_readers(self) -> bool:
        return self._num_readers > 0

    def runs_under(self, epoch: int) -> bool:
        return self.phase is Phase.RUNNING and self.epoch == epoch

    # what happens to it

    def begin(self, epoch: int, worker_id: str, attempt: int, now: float) -> None:
        """A worker gets it, under a fresh epoch."""
        self.phase = Phase.RUNNING
        self.accepted, self.avoid = True, ""
        self.epoch, self.worker_id, self.attempts = epoch, worker_id, attempt
        self.migrations += bool(len(self.output))
        self._epochs.append((len(self.output), epoch))
        self._queued_s += now - self._waiting_since

    def wait_again(self, now: float) -> None:
        """Its worker is gone or gave it back."""
        self.phase = Phase.WAITING
        self.epoch, self.worker_id = 0, ""
        self._waiting_since = now

    def mark_stored(self, count: int, now: float) -> None:
        """The first ``count`` tokens are in the ledger."""
        self.stored = max(self.stored, count)
        if self.stored >= self.readable:
            self._unledgered_from = None
        self._make_readable(self.stored, now)

    def mark_unledgered(self, now: float) -> None:
        """All tokens may be seen although the ledger is away."""
        if len(self.output) > self.stored and self._unledgered_from is None:
            self._unledgered_from = self.stored
        self._make_readable(len(self.output), now)

    def _make_readable(self, count: int, now: float) -> None:
        if count > self.readable:
            self._first_token = self._first_token or now
            self.readable = count
        self.wake()

    def settle(self, now: float, error: EverliftError | None = None) -> None:
        """The end: complete, or with ``error``."""
        if self.is_over:
            return
        self.phase, self.error, self._ended = Phase.OVER, error, now
        self.end_grace()
        if self.deadline is not None:
            self.deadline.cancel()
        self.wake()

    def end_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    # who reads it

    @contextmanager
    def reader(self) -> Iterator[asyncio.Event]:
        """A client that reads: an event that is set whenever there may be more."""
        self._num_readers += 1
        self.end_grace()
        try:
            with self._watch() as wake:
                yield wake
        finally:
            self._num_readers -= 1

    @contextmanager
    def _watch(self) -> Iterator[asyncio.Event]:
        wake = asyncio.Event()
        self._watchers.add(wake)
        try:
            yield wake
        finally:
            self._watchers.discard(wake)

    def wake(self) -> None:
        for event in self._watchers:
            event.set()

    async def all_stored(self) -> None:
        """Waits until the ledger has every token that came so far, or the request is over."""
        with self._watch() as wake:
            while self.stored < len(self.output) and not self.is_over:
                wake.clear()
                await wake.wait()

    # what it looks like outside

    def head(self, offset: int) -> pb.GenerateResponse:
        """The first piece of a stream: the request is known."""
        return pb.GenerateResponse(request_id=self.request_id, offset=offset)

    def piece(self, offset: int) -> pb.GenerateResponse | None:
        """What can be read from ``offset`` on, up to the next change of epoch; None if there is
        nothing."""
        complete = self.is_over and self.error is None
        if offset >= self.readable and not complete:
            return None
        end, epoch = self._segment(offset)
        piece = pb.GenerateResponse(
            request_id=self.request_id,
            offset=offset,
            epoch=epoch,
            token_ids=self.output.tokens[offset:end],
            text=self.output.text(offset, end),
            unledgered=self._unledgered_from is not None and end > self._unledgered_from,
        )
        if complete and end == len(self.output):
            self._close(piece)
        return piece

    def _segment(self, offset: int) -> tuple[int, int]:
        end = self.readable
        for start, epoch in reversed(self._epochs):
            if start <= offset:
                return end, epoch
            end = min(end, start)
        raise AssertionError("the first segment starts at 0")

    def _close(self, piece: pb.GenerateResponse) -> None:
        assert self.finish_reason is not None
        piece.text += self.output.tail
        piece.finish_reason = self.finish_reason.value
        piece.usage.CopyFrom(
            pb.Usage(prompt_tokens=len(self.request.prompt_ids), output_tokens=len(self.output))
        )
        if self._ended is not None:
            piece.timing.CopyFrom(self._timing(self._ended))

    def _timing(self, ended: float) -> pb.Timing:
        return pb.Timing(
            queued_s=self._queued_s,
            time_to_first_token_s=(self._first_token or ended) - self._began,
            total_s=ended - self._began,
            attempts=self.attempts,
            migrations=self.migrations,
        )

    def start(self) -> session_pb2.Start:
        """The message that lets a worker begin it, or go on exactly where its tokens end."""
        request = self.request
        return session_pb2.Start(
            epoch=self.epoch,
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=self.output.tokens,
            max_tokens=request.max_tokens,
            sampling=request.sampling.to_proto(),
            stop_token_ids=request.stop_token_ids,
            salt=request.salt,
        )

    def waiting(self) -> session_pb2.Waiting:
        return session_pb2.Waiting(
            request_id=self.request_id,
            arrived=self.entry.arrived,
            prompt_tokens=len(self.request.prompt_ids) + len(self.output),
            max_tokens=self.request.max_tokens - len(self.output),
            attempt=self.attempts,
            accepted=self.accepted,
            avoid=self.avoid,
        )
