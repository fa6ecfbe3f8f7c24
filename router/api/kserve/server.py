"""Server of KServe's Open Inference Protocol, with Triton's streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from importlib.metadata import version

import grpc
from google.protobuf.message import Message

from everlift import error_details
from everlift.errors import EverliftError, InvalidRequest, Unimplemented, UnknownModel
from router.api.failures import answerable
from router.api.grpc.handlers import Call, Handlers, parse
from router.api.kserve import description, infer_request, tensors
from router.api.kserve.infer_response import FINAL, Answer
from router.api.kserve.infer_stream import Answers, InferStream
from router.api.kserve.parameters import ParsedRequest
from router.api.kserve.v2 import open_inference_pb2 as pb
from router.api.opened import Opened
from router.api.service import Inference
from router.auth.caller import OPEN, Authenticator, Scope
from router.event_loop import now
from router.requests.manager import Requests
from router.requests.served_models import ServedModels
from router.requests.timing import Journal

#: Parameter of an error response that contains the error's slug.
SLUG = "everlift-error"
#: Reasons why some methods of Triton's contract are not supported.
_REPOSITORY = "a cluster serves only the models that it was started with"
_SHARED_MEMORY = "send tensors in requests, not in shared memory"
_SETTINGS = "logs and traces are configured where the cluster is started"
_NOT_SERVED = {
    "RepositoryModelLoad": _REPOSITORY,
    "RepositoryModelUnload": _REPOSITORY,
    "SystemSharedMemoryStatus": _SHARED_MEMORY,
    "SystemSharedMemoryRegister": _SHARED_MEMORY,
    "SystemSharedMemoryUnregister": _SHARED_MEMORY,
    "CudaSharedMemoryStatus": _SHARED_MEMORY,
    "CudaSharedMemoryRegister": _SHARED_MEMORY,
    "CudaSharedMemoryUnregister": _SHARED_MEMORY,
    "TraceSetting": _SETTINGS,
    "LogSettings": _SETTINGS,
}


class KserveServer:
    def __init__(self, inference: Inference, requests: Requests, models: ServedModels) -> None:
        self._inference = inference
        self._requests = requests
        self._models = models

    # requests

    async def model_infer(self, data: bytes, call: Call) -> pb.ModelInferResponse:
        head = self._head()
        parsed = self._read(data, head)
        if parsed.is_streamed:
            raise InvalidRequest(
                "ModelInfer has one answer: with stream true, use ModelStreamInfer"
            )
        opened = await self._open(parsed, head, call)
        [answer] = [answer async for answer in _answers(opened, is_streamed=False)]
        return _response(head, parsed, answer)

    def model_stream_infer(self, messages: AsyncIterator[bytes], call: Call) -> Answers:
        def answers(data: bytes) -> Answers:
            return self._stream_answers(data, replace(call, arrived_at=now()))

        return InferStream(answers).answers(messages)

    async def _stream_answers(self, data: bytes, call: Call) -> Answers:
        head = self._head()
        try:
            async with aclosing(self._responses(data, head, call)) as responses:
                async for response in responses:
                    yield pb.ModelStreamInferResponse(infer_response=response)
        except Exception as error:
            yield _failure(head, answerable(error))

    async def _responses(
        self, data: bytes, head: pb.ModelInferResponse, call: Call
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        parsed = self._read(data, head)
        opened = await self._open(parsed, head, call)
        is_streamed = parsed.is_streamed is not False
        async with aclosing(_answers(opened, is_streamed=is_streamed)) as answers:
            async for answer in answers:
                response = _response(head, parsed, answer)
                is_last = answer.is_final and not parsed.has_empty_final
                response.parameters[FINAL].bool_param = is_last
                yield response
        if parsed.has_empty_final:
            yield _final(head)

    def _head(self) -> pb.ModelInferResponse:
        return pb.ModelInferResponse(
            model_name=self._models.first.name, model_version=description.VERSION
        )

    def _read(self, data: bytes, head: pb.ModelInferResponse) -> ParsedRequest:
        try:
            request = parse(pb.ModelInferRequest, data)
            head.id = request.id
            head.model_name = self._checked_name(request.model_name, request.model_version)
            return infer_request.read(request)
        except EverliftError as error:
            self._inference.count_rejected(error)
            raise

    async def _open(self, parsed: ParsedRequest, head: pb.ModelInferResponse, call: Call) -> Opened:
        opened = await self._inference.generate(
            call.caller,
            parsed.generate,
            call.headers,
            Journal(call.arrived_at),
            call.timeout_s,
        )
        head.id = head.id or opened.request_id
        return opened

    # the server and its model

    async def server_live(self, data: bytes, call: Call) -> pb.ServerLiveResponse:
        parse(pb.ServerLiveRequest, data)
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, data: bytes, call: Call) -> pb.ServerReadyResponse:
        parse(pb.ServerReadyRequest, data)
        return pb.ServerReadyResponse(ready=self._requests.accepts_requests)

    async def model_ready(self, data: bytes, call: Call) -> pb.ModelReadyResponse:
        """Return whether the router accepts requests for the named model.

        The answer is False if the name or version is unknown, as in Triton. Raises
        InvalidRequest if the message is malformed, and RouterStopping for an unknown name while one
        model replaces another.
        """
        message = parse(pb.ModelReadyRequest, data)
        with suppress(UnknownModel):
            self._checked_name(message.name, message.version)
            return pb.ModelReadyResponse(ready=self._requests.accepts_requests)
        return pb.ModelReadyResponse(ready=False)

    async def server_metadata(self, data: bytes, call: Call) -> pb.ServerMetadataResponse:
        parse(pb.ServerMetadataRequest, data)
        return pb.ServerMetadataResponse(
            name="everlift", version=version("everlift"), extensions=description.EXTENSIONS
        )

    async def model_metadata(self, data: bytes, call: Call) -> pb.ModelMetadataResponse:
        message = parse(pb.ModelMetadataRequest, data)
        return description.metadata(self._checked_name(message.name, message.version))

    async def model_config(self, data: bytes, call: Call) -> pb.ModelConfigResponse:
        message = parse(pb.ModelConfigRequest, data)
        name = self._checked_name(message.name, message.version)
        return pb.ModelConfigResponse(config=description.config(name))

    async def model_statistics(self, data: bytes, call: Call) -> pb.ModelStatisticsResponse:
        """Return how many of this router's requests completed and failed since its start.

        Times are not included; the router's metrics have them.
        """
        message = parse(pb.ModelStatisticsRequest, data)
        name = self._checked_name(message.name, message.version)
        counters, model = self._requests.counters, self._models.requested(name).name
        completed = counters.completed_by_model[model]
        stats = pb.InferStatistics(
            success=pb.StatisticDuration(count=completed),
            fail=pb.StatisticDuration(count=counters.failed_by_model[model]),
        )
        return pb.ModelStatisticsResponse(
            model_stats=[
                pb.ModelStatistics(
                    name=name,
                    version=description.VERSION,
                    inference_count=completed,
                    inference_stats=stats,
                )
            ]
        )

    async def repository_index(self, data: bytes, call: Call) -> pb.RepositoryIndexResponse:
        message, ready = parse(pb.RepositoryIndexRequest, data), self._requests.accepts_requests
        index = pb.RepositoryIndexResponse()
        if ready or not message.ready:
            for name in self._models.names:
                index.models.add(
                    name=name,
                    version=description.VERSION,
                    state="READY" if ready else "UNAVAILABLE",
                )
        return index

    def _checked_name(self, name: str, version: str) -> str:
        """Return ``name``, or the first model's name if ``name`` is empty.

        Raises UnknownModel if no model is served under ``name``, or if ``version`` is neither empty
        nor the model's version. Raises RouterStopping for an unknown name while one model replaces
        another.
        """
        model = self._models.requested(name)
        description.check_version(model.name, version)
        return name or model.name

    def handlers(self, authenticator: Authenticator) -> grpc.GenericRpcHandler:
        """Return the handlers to add to a gRPC server."""
        # Probes have no credentials.
        anyone, handlers = Handlers(OPEN), Handlers(authenticator)
        methods = {
            "ServerLive": anyone.unary(self.server_live, Scope.METRICS),
            "ServerReady": anyone.unary(self.server_ready, Scope.METRICS),
            "ModelReady": handlers.unary(self.model_ready, Scope.INFER),
            "ServerMetadata": handlers.unary(self.server_metadata, Scope.INFER),
            "ModelMetadata": handlers.unary(self.model_metadata, Scope.INFER),
            "ModelInfer": handlers.unary(self.model_infer, Scope.INFER),
            "ModelStreamInfer": handlers.bidirectional(self.model_stream_infer, Scope.INFER),
            "ModelConfig": handlers.unary(self.model_config, Scope.INFER),
            "ModelStatistics": handlers.unary(self.model_statistics, Scope.METRICS),
            "RepositoryIndex": handlers.unary(self.repository_index, Scope.INFER),
        }
        for name, cause in _NOT_SERVED.items():
            methods[name] = handlers.unary(_refusal(name, cause), Scope.INFER)
        service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
        return grpc.method_handlers_generic_handler(service, methods)


def _refusal(method: str, cause: str) -> Callable[[bytes, Call], Awaitable[Message]]:
    async def refuse(data: bytes, call: Call) -> Message:
        raise Unimplemented(f"{method} is not supported: {cause}")

    return refuse


async def _answers(opened: Opened, *, is_streamed: bool) -> AsyncGenerator[Answer, None]:
    whole = Answer()
    async with aclosing(opened.pieces) as pieces:
        async for piece in pieces:
            if not is_streamed:
                whole.add(piece)
            elif not (answer := Answer(piece)).is_empty:
                yield answer
    if not is_streamed:
        yield whole


def _response(
    head: pb.ModelInferResponse, parsed: ParsedRequest, answer: Answer
) -> pb.ModelInferResponse:
    response = _new_response(head)
    has_logprobs = parsed.generate.sampling.HasField("logprobs")
    for tensor in answer.tensors(parsed.outputs, has_logprobs=has_logprobs):
        tensors.add_output(response, tensor)
    return response


def _final(head: pb.ModelInferResponse) -> pb.ModelInferResponse:
    response = _new_response(head)
    response.parameters[FINAL].bool_param = True
    return response


def _failure(head: pb.ModelInferResponse, error: EverliftError) -> pb.ModelStreamInferResponse:
    response = _final(head)
    response.parameters[SLUG].string_param = error.slug
    return pb.ModelStreamInferResponse(
        error_message=error_details.cause(error), infer_response=response
    )


def _new_response(head: pb.ModelInferResponse) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse()
    response.CopyFrom(head)
    return response
