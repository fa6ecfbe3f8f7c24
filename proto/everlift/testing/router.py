"""Fake router for tests of clients. A function computes its outputs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias

import grpc

from everlift import wire
from everlift.channels import SERVER_OPTIONS
from everlift.engine_policy import DEFAULT
from everlift.errors import (
    Cancelled,
    ChaosForbidden,
    DataLoss,
    DeadlineExceeded,
    EverliftError,
    ForgottenRequest,
    InvalidRequest,
    OutOfRange,
    RequestConflict,
    TooManyRequests,
    Unauthenticated,
    UnknownModel,
    UnknownRequest,
    UnknownWorker,
)
from everlift.messages import MAX_REQUESTS, Submission
from everlift.testing.faults import (
    Break,
    BreakOff,
    Fault,
    Hold,
    Overlap,
    Refuse,
    Repeat,
    Script,
    Skip,
    Stop,
    applies_to,
)
from everlift.testing.request import Answer, FakeRequest, Output, words
from everlift.transport import GRPC, Transport
from everlift.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    chaos_pb2,
    chaos_pb2_grpc,
    inference_pb2_grpc,
)
from everlift.v1 import inference_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
#: A None among the pieces means that the request is held before its next piece.
_Pieces: TypeAlias = AsyncGenerator[pb.GenerateResponse | None, None]

_WORKER = "worker-0"
_MODEL = pb.Model(name="fake", max_model_len=4096, vocab_size=0x110000)
_PAGE = 100
#: Time breakdown of every request.
_SPANS = (
    pb.Span(kind=pb.SPAN_KIND_PREFILL, seconds=0.125, attempt=1),
    pb.Span(kind=pb.SPAN_KIND_DECODE, seconds=0.375, attempt=1),
)
_TOTAL_S = sum(span.seconds for span in _SPANS)
_CONFIGURED = admin_pb2.SetPolicyResponse(
    order="fifo",
    max_queued=1000,
    undated_due=60.0,
    ageing_factor=1.5,
    class_floor=0.05,
    fair_share=True,
    engine_policy=DEFAULT,
)


class _Broken(Exception):
    pass


class _BrokenOff(Exception):
    pass


class FakeRouter(
    inference_pb2_grpc.InferenceServicer,
    admin_pb2_grpc.AdminServicer,
    chaos_pb2_grpc.ChaosServicer,
):
    """Fake router, which serves the gRPC services of a router with made-up answers.

    ``answer`` returns the output of a request. Each Generate, GenerateMany and Attach takes the
    next element of ``faults``; the call has no fault if this element is None, or if no element is
    left. A Refuse that names a call is taken only by that call, and the faults after it wait until
    then. Callers must present the ``api_key``, if there is one.

    ``requests`` contains the received requests by id. ``calls`` lists the calls in order, for
    example "Generate", "GenerateMany 2", "Attach 3", "Cancel". A GenerateMany is listed with the
    number of its requests, and an Attach with its offsets by choice. ``drained`` lists the drained
    workers. Tokenize makes each character a token.
    """

    def __init__(
        self,
        answer: Answer = words,
        faults: Iterable[Fault | None] = (),
        *,
        api_key: str | None = None,
        transport: Transport = GRPC,
    ) -> None:
        self.requests: dict[str, FakeRequest] = {}
        self._forgotten = set[str]()
        self.calls: list[str] = []
        self.policy = admin_pb2.SetPolicyResponse()
        self.policy.CopyFrom(_CONFIGURED)
        self.drained: list[str] = []
        self.adapters: dict[str, admin_pb2.AdapterInfo] = {}
        self._answer = answer
        self._script = Script(faults)
        self._api_key = api_key
        self._transport = transport
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def listen(self) -> None:
        """Listen on a free port, or after ``stop`` on the same port as before."""
        self._server = self._transport.server(SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        chaos_pb2_grpc.add_ChaosServicer_to_server(self, self._server)
        self._port = self._transport.listen(self._server, self.address)

    async def start(self) -> None:
        self.listen()
        await self._server.start()

    async def stop(self) -> None:
        """Stop the server, and break every connection immediately."""
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

    # streaming calls

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with self._answering("Generate", context) as fault:
            known = self._submit(request)
            async for piece in self._pieces(known, (), fault):
                if piece is not None:
                    yield piece

    async def Attach(
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        call = " ".join(["Attach", *map(str, request.from_offsets)])
        async with self._answering(call, context) as fault:
            known = self._attached(request)
            known.check(request.from_offsets, request.digests)
            async for piece in self._pieces(known, request.from_offsets, fault):
                if piece is not None:
                    yield piece

    async def GenerateMany(
        self, request: pb.GenerateManyRequest, context: Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        async with self._answering(f"GenerateMany {len(request.requests)}", context) as fault:
            _check_many(request)
            active = {
                index: self._start_pieces(each, fault if applies_to(fault, index) else None)
                for index, each in enumerate(request.requests)
            }
            held: dict[int, _Pieces] = {}
            while active or held:
                # A held request does not delay the others.
                current = active or held
                message = pb.GenerateManyResponse()
                try:
                    for index, pieces in tuple(current.items()):
                        await _add_next_piece(message, index, pieces, current, held)
                except (_Broken, _BrokenOff):
                    if message.pieces:
                        yield message
                    raise
                yield message

    async def _start_pieces(self, request: pb.GenerateRequest, fault: Fault | None) -> _Pieces:
        if isinstance(fault, Refuse):
            raise fault.error
        async for piece in self._pieces(self._submit(request), (), fault):
            yield piece

    # single calls

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with self._answering("Cancel", context):
            known = self._known(request.request_id)
            if known.state == pb.REQUEST_STATE_RUNNING:
                known.state = pb.REQUEST_STATE_CANCELLED
                known.cancelled.set()
            return pb.CancelResponse(state=known.state)

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        async with self._answering("Forget", context):
            self._known(request.request_id).cancelled.set()
            del self.requests[request.request_id]
            self._forgotten.add(request.request_id)
            return pb.ForgetResponse()

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        async with self._answering("GetRequest", context):
            known = self._known(request.request_id)
            return pb.GetRequestResponse(
                request_id=request.request_id,
                state=known.state,
                model=known.submission.model,
                attempts=1,
                prompt_tokens=len(known.submission.prompt),
                output_tokens=known.num_tokens,
            )

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Explanation:
        async with self._answering("Explain", context):
            known = self._known(request.request_id)
            return pb.Explanation(
                request_id=request.request_id,
                state=known.state,
                total_s=_TOTAL_S,
                spans=_SPANS,
                prompt_tokens=len(known.submission.prompt),
                output_tokens=known.num_tokens,
            )

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        async with self._answering("ListRequests", context):
            selected = [
                known
                for known in reversed(self.requests.values())
                if not request.states or known.state in request.states
            ]
            first = int(request.page_token or 0)
            end = first + (request.page_size or _PAGE)
            return pb.ListRequestsResponse(
                requests=[_summary(known) for known in selected[first:end]],
                next_page_token=str(end) if end < len(selected) else "",
            )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._answering("Tokenize", context):
            return pb.TokenizeResponse(
                token_ids=map(ord, request.text), max_model_len=_MODEL.max_model_len
            )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        async with self._answering("Detokenize", context):
            if any(token >= _MODEL.vocab_size for token in request.token_ids):
                raise OutOfRange("a token id is not in the model's vocabulary")
            return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        async with self._answering("ListModels", context):
            return pb.ListModelsResponse(models=[_MODEL])

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        async with self._answering("GetStatus", context):
            states = [known.state for known in self.requests.values()]
            return pb.GetStatusResponse(
                cluster_id="fake",
                running=states.count(pb.REQUEST_STATE_RUNNING),
                completed=states.count(pb.REQUEST_STATE_FINISHED),
            )

    async def ChangeModel(
        self, request: admin_pb2.ChangeModelRequest, context: Context
    ) -> admin_pb2.ChangeModelResponse:
        async with self._answering("ChangeModel", context):
            if not request.worker_id or not _WORKER.startswith(request.worker_id):
                raise UnknownWorker(f"no worker {request.worker_id!r} is connected")
            self.drained.append(_WORKER)
            return admin_pb2.ChangeModelResponse(worker_id=_WORKER, model=request.model)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        async with self._answering("Drain", context):
            if not request.worker_id or not _WORKER.startswith(request.worker_id):
                raise UnknownWorker(f"no worker {request.worker_id!r} is connected")
            self.drained.append(_WORKER)
            return admin_pb2.DrainResponse(worker_id=_WORKER)

    async def SetPolicy(
        self, request: admin_pb2.SetPolicyRequest, context: Context
    ) -> admin_pb2.SetPolicyResponse:
        async with self._answering("SetPolicy", context):
            values = {name: getattr(self.policy, name) for name in self.policy.overridden}
            values |= {field.name: value for field, value in request.ListFields()}
            for name in values.pop("reset", ()):
                values.pop(name, None)
            self.policy.CopyFrom(_CONFIGURED)
            for name, value in values.items():
                setattr(self.policy, name, value)
            self.policy.overridden.extend(values)
            return self.policy

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        async with self._answering("LoadAdapter", context):
            adapter = admin_pb2.AdapterInfo(name=request.name, source=request.source)
            self.adapters[request.name] = adapter
            return admin_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        async with self._answering("UnloadAdapter", context):
            if self.adapters.pop(request.name, None) is None:
                raise UnknownModel(f"no adapter {request.name!r} is loaded", field="name")
            return admin_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        async with self._answering("ListAdapters", context):
            return admin_pb2.ListAdaptersResponse(adapters=self.adapters.values())

    async def Capacity(
        self, request: admin_pb2.CapacityRequest, context: Context
    ) -> admin_pb2.CapacityResponse:
        async with self._answering("Capacity", context):
            states = [known.state for known in self.requests.values()]
            running = states.count(pb.REQUEST_STATE_RUNNING)
            return admin_pb2.CapacityResponse(workers=1, slots=256, slots_used=running)

    async def Inject(self, request: chaos_pb2.Fault, context: Context) -> chaos_pb2.InjectResponse:
        async with self._answering("Inject", context):
            raise ChaosForbidden("the cluster was started without chaos")

    # shared by the calls

    @asynccontextmanager
    async def _answering(self, call: str, context: Context) -> AsyncIterator[Fault | None]:
        self.calls.append(call)
        try:
            self._authenticate(context)
            yield self._script.next(call.partition(" ")[0])
        except EverliftError as error:
            await wire.abort(context, error)
        except _Broken:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")
        except _BrokenOff:
            return

    def _authenticate(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if self._api_key and metadata.get("authorization") != f"Bearer {self._api_key}":
            raise Unauthenticated("the API key is missing or wrong")

    def _submit(self, message: pb.GenerateRequest) -> FakeRequest:
        request_id = message.request_id or uuid.uuid4().hex
        submission = Submission.from_proto(message, request_id, seed=0)
        answer = self._answer(submission)
        outputs = (answer,) * submission.n if isinstance(answer, Output) else tuple(answer)
        known = self.requests.setdefault(request_id, FakeRequest(submission, outputs))
        if known.submission.body_hash != submission.body_hash:
            raise RequestConflict(f"request {request_id} exists with a different body")
        return known

    def _attached(self, message: pb.AttachRequest) -> FakeRequest:
        request_id = message.request_id
        if request_id not in self.requests and request_id in self._forgotten:
            raise ForgottenRequest(f"request {request_id} was forgotten")
        if request_id not in self.requests and any(message.from_offsets):
            raise DataLoss(f"the output of request {request_id} is lost")
        return self._known(request_id)

    def _known(self, request_id: str) -> FakeRequest:
        if request_id not in self.requests:
            raise UnknownRequest(f"no request {request_id}")
        return self.requests[request_id]

    async def _pieces(
        self, known: FakeRequest, offsets: Sequence[int], fault: Fault | None
    ) -> _Pieces:
        if known.cancelled.is_set():
            raise Cancelled("the request was cancelled")
        start = offsets[0] if offsets else 0
        yield pb.GenerateResponse(request_id=known.submission.request_id, offset=start)
        *positions, last = known.positions(offsets)
        for choice, at in (*positions, last):
            if isinstance(fault, Stop) and (fault.choice, fault.offset) == (choice, at):
                if isinstance(fault, Hold):
                    yield None
                await _stop(fault, known)
            if at < len(known.tokens(choice)):
                for first, stop in _ranges(choice, at, fault):
                    yield known.piece(choice, first, stop)
            else:
                yield known.end(choice, is_last=(choice, at) == last)


def _check_many(request: pb.GenerateManyRequest) -> None:
    if len(request.requests) > MAX_REQUESTS:
        raise TooManyRequests(f"at most {MAX_REQUESTS} requests in one call")
    ids = [each.request_id for each in request.requests if each.request_id]
    if len(ids) != len(set(ids)):
        raise InvalidRequest("a request_id occurs twice")


async def _add_next_piece(
    message: pb.GenerateManyResponse,
    index: int,
    pieces: _Pieces,
    active: dict[int, _Pieces],
    held: dict[int, _Pieces],
) -> None:
    try:
        piece = await anext(pieces)
    except StopAsyncIteration:
        del active[index]
    except EverliftError as error:
        failure = pb.Failure(slug=error.slug, message=str(error), retry_after_s=error.retry_after_s)
        message.pieces.add(index=index, failure=failure)
        del active[index]
    else:
        if piece is None:
            held[index] = active.pop(index)
        else:
            message.pieces.add(index=index, piece=piece)


def _summary(known: FakeRequest) -> pb.RequestSummary:
    return pb.RequestSummary(
        request_id=known.submission.request_id,
        state=known.state,
        attempts=1,
        output_tokens=known.num_tokens,
    )


def _ranges(choice: int, at: int, fault: Fault | None) -> Iterator[tuple[int, int]]:
    match fault:
        case Skip(offset, which) if (which, offset) == (choice, at):
            return
        case Repeat(offset, which) if (which, offset) == (choice, at):
            yield at, at + 1
        case Overlap(offset, which) if (which, offset) == (choice, at - 1):
            yield offset, at + 1
            return
    yield at, at + 1


async def _stop(fault: Stop, known: FakeRequest) -> NoReturn:
    match fault:
        case Break():
            raise _Broken
        case BreakOff():
            raise _BrokenOff
        case Hold():
            await _hold(known)


async def _hold(known: FakeRequest) -> NoReturn:
    try:
        async with asyncio.timeout(known.submission.timeout_s):
            await known.cancelled.wait()
    except TimeoutError:
        known.state = pb.REQUEST_STATE_EXPIRED
        raise DeadlineExceeded("the deadline passed") from None
    raise Cancelled("the request was cancelled")
