"""A router for tests: the real wire on a loopback port, answers from a function, faults by script.

async with FakeRouter(faults=[Break(3), Refuse(RouterStopping())]) as router:
    async with AsyncClient(router.address) as client:
        assert await client.generate("one two three four").text() == "one two three four"
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc

from everlift import wire
from everlift.channels import SERVER_OPTIONS
from everlift.digest import token_digest
from everlift.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    EverliftError,
    OffsetOutOfRange,
    RequestConflict,
    UnknownRequest,
)
from everlift.messages import FinishReason, Submission
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """Token ids, each with the text that it releases, and the text that the end releases.
    ``logprobs`` are those of the tokens, or none."""

    tokens: tuple[tuple[int, str], ...]
    tail: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


#: What comes of a request: of each of its choices the same, or of each its own.
Answer = Callable[[Submission], Output | Sequence[Output]]


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
    """The stream breaks before the token of ``choice`` at ``offset``, or before its end."""

    offset: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class BreakOff:
    """The stream ends before the token of ``choice`` at ``offset`` as if all were said."""

    offset: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """No piece comes from ``offset`` of ``choice`` on, until the request is cancelled."""

    offset: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Repeat:
    """The token of ``choice`` at ``offset`` is sent twice."""

    offset: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Overlap:
    """The token of ``choice`` at ``offset`` is sent again in one piece with the next one."""

    offset: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Skip:
    """The token of ``choice`` at ``offset`` is left out."""

    offset: int
    choice: int = 0


Stop = Break | BreakOff | Hold
Fault = Refuse | Stop | Repeat | Overlap | Skip


@dataclass(slots=True)
class FakeRequest:
    """A request as the fake router knows it. ``outputs`` are by choice."""

    submission: Submission
    outputs: tuple[Output, ...]
    state: pb.RequestState.ValueType = pb.REQUEST_STATE_RUNNING
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def tokens(self, choice: int) -> tuple[tuple[int, str], ...]:
        return self.outputs[choice].tokens[: self.submission.max_tokens]

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(len(self.tokens(choice)) for choice in range(len(self.outputs)))

    def piece(self, choice: int, start: int, stop: int) -> pb.GenerateResponse:
        output, tokens = self.outputs[choice], self.tokens(choice)[start:stop]
        prompt_logprobs = output.prompt_logprobs if (choice, start) == (0, 0) else ()
        return pb.GenerateResponse(
            request_id=self.submission.request_id,
            choice=choice,
            offset=start,
            epoch=1,
            token_ids=[token for token, _ in tokens],
            text="".join(text for _, text in tokens),
            logprobs=[it.to_proto() for it in output.logprobs[start:stop]],
            prompt_logprobs=[it.to_proto() for it in prompt_logprobs],
        )

    def end(self, choice: int, *, is_last: bool) -> pb.GenerateResponse:
        """The last piece of a choice, and maybe of the stream."""
        output, count = self.outputs[choice], len(self.tokens(choice))
        complete = count == len(output.tokens)
        piece = self.piece(choice, count, count)
        piece.text = output.tail if complete else ""
        piece.finish_reason = (FinishReason.STOP if complete else FinishReason.LENGTH).value
        if is_last:
            self.state = pb.REQUEST_STATE_FINISHED
            piece.usage.prompt_tokens = len(self.submission.prompt)
            piece.usage.output_tokens = self.num_tokens
            piece.timing.attempts = 1
        return piece


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Each Generate and Attach takes the next fault of the script; None, or no more, is health.

    ``requests`` holds what came, by request id; ``calls`` names the calls in their order:
    "Generate", "Attach 3", "Cancel", "Forget"; an Attach with its offsets by choice.
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
            known = self._submit(
                Submission.from_proto(request, request.request_id or uuid.uuid4().hex, seed=0)
            )
            async for piece in self._stream(known, (), fault, context):
                yield piece
        except EverliftError as error:
            await wire.abort(context, error)

    async def Attach(
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.calls.append(" ".join(["Attach", *map(str, request.from_offsets)]))
        try:
            fault = self._next_fault()
            known = self._known(request.request_id)
            _check_offsets(known, request.from_offsets, request.digests)
            async for piece in self._stream(known, request.from_offsets, fault, context):
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

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        self.calls.append("Forget")
        try:
            known = self._known(request.request_id)
        except UnknownRequest as error:
            await wire.abort(context, error)
        known.cancelled.set()
        del self.requests[request.request_id]
        return pb.ForgetResponse()

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
            output_tokens=known.num_tokens,
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
        answer = self._answer(submission)
        outputs = (answer,) * submission.n if isinstance(answer, Output) else tuple(answer)
        new = FakeRequest(submission, outputs)
        known = self.requests.setdefault(submission.request_id, new)
        if known.submission.body_hash != submission.body_hash:
            raise RequestConflict(f"{submission.request_id} is another request")
        return known

    def _known(self, request_id: str) -> FakeRequest:
        if request_id not in self.requests:
            raise UnknownRequest(f"no request {request_id}")
        return self.requests[request_id]

    async def _stream(
        self, known: FakeRequest, offsets: Sequence[int], fault: Fault | None, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        if known.cancelled.is_set():
            raise Cancelled("the request was cancelled")
        starts = [*offsets, *[0] * (len(known.outputs) - len(offsets))]
        yield pb.GenerateResponse(request_id=known.submission.request_id, offset=starts[0])
        *places, last = _places(known, starts)
        for choice, at in (*places, last):
            if isinstance(fault, Stop) and (fault.choice, fault.offset) == (choice, at):
                await _stop(fault, known, context)
                return
            if at < len(known.tokens(choice)):
                for first, stop in _ranges(choice, at, fault):
                    yield known.piece(choice, first, stop)
            else:
                yield known.end(choice, is_last=(choice, at) == last)


def _check_offsets(known: FakeRequest, offsets: Sequence[int], digests: Sequence[int]) -> None:
    """Whoever says what it has cannot be out of range; it has something else."""
    for choice, offset in enumerate(offsets):
        if choice >= len(known.outputs) or offset < 0:
            raise OffsetOutOfRange(f"choice {choice} has no offset {offset}")
        tokens = [token for token, _ in known.tokens(choice)[:offset]]
        if choice < len(digests):
            if offset > len(tokens) or token_digest(tokens) != digests[choice]:
                raise DataLoss(f"choice {choice} cannot be continued at offset {offset}")
        elif offset > len(tokens):
            raise OffsetOutOfRange(f"choice {choice} has no offset {offset}")


def _places(known: FakeRequest, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Choice and offset of each token and each end, as they would be made: step by step."""
    ends = [len(known.tokens(choice)) for choice in range(len(known.outputs))]
    for at in range(max(ends) + 1):
        for choice, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start <= at <= end:
                yield choice, at


def _ranges(choice: int, at: int, fault: Fault | None) -> Iterator[tuple[int, int]]:
    """The offsets of each piece that the token there makes, from and to before."""
    match fault:
        case Skip(offset, which) if (which, offset) == (choice, at):
            return
        case Repeat(offset, which) if (which, offset) == (choice, at):
            yield at, at + 1
        case Overlap(offset, which) if (which, offset) == (choice, at - 1):
            yield offset, at + 1
            return
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
