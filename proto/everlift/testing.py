"""A router for tests: the real wire on a loopback port, answers from a function, faults by script.

async with FakeRouter(faults=[Break(3), Refuse(RouterStopping())]) as router:
    async with AsyncClient(router.address) as client:
        assert await client.generate("one two three four").text() == "one two three four"
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc

from everlift import wire
from everlift.channels import SERVER_OPTIONS
from everlift.errors import (
    Cancelled,
    DeadlineExceeded,
    EverliftError,
    OffsetOutOfRange,
    RequestConflict,
    UnknownRequest,
)
from everlift.messages import FinishReason, Submission
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """Token ids, each with the text that it releases, and the text that the end releases."""

    tokens: tuple[tuple[int, str], ...]
    tail: str = ""


Answer = Callable[[Submission], Output]


def words(submission: Submission) -> Output:
    """Gives the prompt back, a token a word; of token ids, each as a word."""
    prompt = submission.prompt
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
    first, *others = text.split(" ")
    return Output(tuple(enumerate([first, *(f" {word}" for word in others)])))


@dataclass(frozen=True, slots=True)
class Refuse:
    """The call fails before its first piece."""

    error: EverliftError


@dataclass(frozen=True, slots=True)
class Break:
    """The stream breaks before the token at ``offset``, or before its end."""

    offset: int


@dataclass(frozen=True, slots=True)
class BreakOff:
    """The stream ends before the token at ``offset`` as if all were said."""

    offset: int


@dataclass(frozen=True, slots=True)
class Hold:
    """No piece comes from ``offset`` on, until the request is cancelled."""

    offset: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """The token at ``offset`` is sent twice."""

    offset: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """The token at ``offset`` is sent again in one piece with the next one."""

    offset: int


@dataclass(frozen=True, slots=True)
class Skip:
    """The token at ``offset`` is left out."""

    offset: int


Stop = Break | BreakOff | Hold
Fault = Refuse | Stop | Repeat | Overlap | Skip


@dataclass(slots=True)
class FakeRequest:
    """A request as the fake router knows it."""

    submission: Submission
    output: Output
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_RUNNING
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> tuple[tuple[int, str], ...]:
        return self.output.tokens[: self.submission.max_tokens]

    def piece(self, start: int, stop: int) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            request_id=self.submission.request_id,
            offset=start,
            epoch=1,
            token_ids=[token for token, _ in self.tokens[start:stop]],
            text="".join(text for _, text in self.tokens[start:stop]),
        )

    def last_piece(self) -> pb.GenerateResponse:
        complete = len(self.tokens) == len(self.output.tokens)
        piece = self.piece(len(self.tokens), len(self.tokens))
        piece.text = self.output.tail if complete else ""
        piece.finish_reason = (FinishReason.STOP if complete else FinishReason.LENGTH).value
        piece.usage.CopyFrom(
            pb.Usage(prompt_tokens=len(self.submission.prompt), output_tokens=len(self.tokens))
        )
        piece.timing.attempts = 1
        return piece


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Each Generate and Attach takes the next fault of the script; None, or no more, is health.

    ``requests`` holds what came, by request id; ``calls`` names the calls in their order:
    "Generate", "Attach 3", "Cancel".
    """

    def __init__(self, answer: Answer = words, faults: Iterable[Fault | None] = ()) -> None:
        self.requests: dict[str, FakeRequest] = {}
        self.calls: list[str] = []
        self._answer = answer
        self._faults = deque(faults)
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listens on a free port, and after a ``stop`` on the same one again."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Breaks every connection at once."""
        await self._server.stop(grace=None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.calls.append("Generate")
        try:
            fault = self._next_fault()
            known = self._submit(Submission.from_proto(request, uuid.uuid4().hex, seed=0))
            async for piece in self._stream(known, 0, fault, context):
                yield piece
        except EverliftError as error:
            await wire.abort(context, error)

    async def Attach(
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.calls.append(f"Attach {request.from_offset}")
        try:
            fault = self._next_fault()
            known = self._known(request.request_id)
            if not 0 <= request.from_offset <= len(known.tokens):
                raise OffsetOutOfRange(f"there are {len(known.tokens)} tokens")
            async for piece in self._stream(known, request.from_offset, fault, context):
                yield piece
        except EverliftError as error:
            await wire.abort(context, error)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        self.calls.append("Cancel")
        try:
            known = self._known(request.request_id)
        except UnknownRequest as error:
            await wire.abort(context, error)
        if known.state == pb.REQUEST_STATE_RUNNING:
            known.state = pb.REQUEST_STATE_CANCELLED
            known.cancelled.set()
        return pb.CancelResponse(state=known.state)

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        try:
            known = self._known(request.request_id)
        except UnknownRequest as error:
            await wire.abort(context, error)
        return pb.GetRequestResponse(
            request_id=request.request_id,
            state=known.state,
            model=known.submission.model,
            attempts=1,
            prompt_tokens=len(known.submission.prompt),
            output_tokens=len(known.tokens),
        )

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        states = [known.state for known in self.requests.values()]
        return pb.GetStatusResponse(
            cluster_id="fake",
            running=states.count(pb.REQUEST_STATE_RUNNING),
            completed=states.count(pb.REQUEST_STATE_FINISHED),
        )

    def _next_fault(self) -> Fault | None:
        fault = self._faults.popleft() if self._faults else None
        if isinstance(fault, Refuse):
            raise fault.error
        return fault

    def _submit(self, submission: Submission) -> FakeRequest:
        new = FakeRequest(submission, self._answer(submission))
        known = self.requests.setdefault(submission.request_id, new)
        if known.submission.body_hash != submission.body_hash:
            raise RequestConflict(f"{submission.request_id} is another request")
        return known

    def _known(self, request_id: str) -> FakeRequest:
        if request_id not in self.requests:
            raise UnknownRequest(f"no request {request_id}")
        return self.requests[request_id]

    async def _stream(
        self, known: FakeRequest, start: int, fault: Fault | None, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        if known.cancelled.is_set():
            raise Cancelled("the request was cancelled")
        end = len(known.tokens)
        stop = fault if isinstance(fault, Stop) and start <= fault.offset <= end else None
        yield pb.GenerateResponse(request_id=known.submission.request_id, offset=start)
        for first, last in _ranges(start, stop.offset if stop else end, fault):
            yield known.piece(first, last)
        if stop:
            await _stop(stop, known, context)
            return
        known.state = pb.REQUEST_STATE_FINISHED
        yield known.last_piece()


def _ranges(start: int, end: int, fault: Fault | None) -> Iterator[tuple[int, int]]:
    """The offsets of each piece, from and to before."""
    for at in range(start, end):
        match fault:
            case Skip(offset) if offset == at:
                continue
            case Repeat(offset) if offset == at:
                yield at, at + 1
            case Overlap(offset) if offset == at - 1:
                yield offset, at + 1
                continue
        yield at, at + 1


async def _stop(fault: Stop, known: FakeRequest, context: Context) -> None:
    if isinstance(fault, Break):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")
    if isinstance(fault, Hold):
        await _hold(known)


async def _hold(known: FakeRequest) -> NoReturn:
    try:
        async with asyncio.timeout(known.submission.timeout_s):
            await known.cancelled.wait()
    except TimeoutError:
        known.state = pb.REQUEST_STATE_EXPIRED
        raise DeadlineExceeded("the deadline passed") from None
    raise Cancelled("the request was cancelled")
