"""The Open Inference Protocol on a router's port, with the generated gRPC stubs."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias, cast

import grpc
import pytest

from everlift import error_details, wire
from everlift.errors import Unauthenticated
from everlift.transport import GRPC
from router.api.kserve.server import SLUG, KserveServer
from router.api.kserve.v2 import open_inference_pb2 as pb
from router.api.kserve.v2 import open_inference_pb2_grpc as pb_grpc
from router.api.service import Inference
from router.auth.caller import Authenticator, Caller, Scope
from router.ledger.entry import State
from tests.support.in_process import Cluster, cluster, right_tokens, until
from tests.support.router.gateway_support import started_gateway

SERVICE = "inference.GRPCInferenceService"
Stub: TypeAlias = "pb_grpc.GRPCInferenceServiceAsyncStub"


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield cast("Stub", pb_grpc.GRPCInferenceServiceStub(channel))


def asking(request_id: str, prompt: list[int], count: int, **flags: bool) -> pb.ModelInferRequest:
    """Return a greedy request."""
    request = pb.ModelInferRequest(id=request_id, model_name="fake")
    if request_id:
        request.parameters["request_id"].string_param = request_id
    request.inputs.add(name="input_ids", datatype="UINT32", shape=[len(prompt)])
    request.raw_input_contents.append(struct.pack(f"<{len(prompt)}I", *prompt))
    request.parameters["temperature"].double_param = 0
    request.parameters["max_tokens"].int64_param = count
    for name, flag in flags.items():
        request.parameters[name].bool_param = flag
    return request


def tokens(*responses: pb.ModelInferResponse) -> list[int]:
    return [
        token
        for response in responses
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        if output.name == "output_ids"
        for token in struct.unpack(f"<{output.shape[0]}i", raw)
    ]


async def refused(call: grpc.aio.UnaryUnaryCall) -> tuple[str, str]:  # type: ignore[type-arg]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = error_details.decode(dict(caught.value.trailing_metadata() or ())[wire.DETAILS])
    return caught.value.code().name, details.slug if details else ""


async def read_all(call: grpc.aio.StreamStreamCall) -> list[pb.ModelStreamInferResponse]:  # type: ignore[type-arg]
    return [answer async for answer in call]


async def test_kserve_x_request_id_does_not_merge_requests() -> None:
    metadata = (("x-request-id", "mesh/1"),)
    async with cluster(workers=1) as parts, stub_of(parts.address) as stub:
        for prompt in ([1], [2]):
            call = stub.ModelInfer(asking("", prompt, 3), metadata=metadata)
            assert tokens(await call) == right_tokens(prompt, 3)
            assert dict(await call.initial_metadata())["x-request-id"] == "mesh/1"
        both = iter([asking("", prompt, 3, stream=False) for prompt in ([3], [4])])
        stream = stub.ModelStreamInfer(both, metadata=metadata)
        answers = await read_all(stream)
        assert not any(answer.error_message for answer in answers)
        assert dict(await stream.initial_metadata())["x-request-id"] == "mesh/1"


async def test_kserve_repeated_id_and_body_is_same_request() -> None:
    async with cluster(workers=1) as parts, stub_of(parts.address) as stub:
        request = asking("mine", [1, 2], 6)
        del request.parameters["temperature"]
        first, second = [await stub.ModelInfer(request) for _ in range(2)]
        assert first == second
        assert (first.id, len(tokens(first))) == ("mine", 6)
        assert (await parts.ledger.get("mine")).state is State.FINISHED
        other = asking("mine", [1, 3], 6)
        assert await refused(stub.ModelInfer(other)) == ("ALREADY_EXISTS", "request_conflict")
        [answer] = await read_all(stub.ModelStreamInfer(iter([other])))
        assert answer.error_message.startswith('request id "mine" already exists')
        statistics = await stub.ModelStatistics(pb.ModelStatisticsRequest())
        assert statistics.model_stats[0].inference_count == 1


async def test_kserve_response_has_generated_or_given_id() -> None:
    async with cluster(workers=1) as parts, stub_of(parts.address) as stub:
        made = (await stub.ModelInfer(asking("", [1], 2))).id
        assert (await parts.ledger.get(made)).state is State.FINISHED
        again = asking("", [1], 2)
        again.id = "so odd!"
        assert [(await stub.ModelInfer(again)).id for _ in range(2)] == ["so odd!"] * 2


async def test_kserve_final_response_is_flagged() -> None:
    async with cluster(workers=1) as parts, stub_of(parts.address) as stub:
        for flags, num_empty in (
            ({}, 0),
            ({"stream": False}, 0),
            ({"triton_enable_empty_final_response": True}, 1),
            ({"stream": False, "triton_enable_empty_final_response": True}, 1),
        ):
            call = stub.ModelStreamInfer(iter([asking("", [1, 2], 5, **flags)]))
            responses = [answer.infer_response for answer in await read_all(call)]
            final = [it.parameters["triton_final_response"].bool_param for it in responses]
            assert final == [False] * (len(responses) - 1) + [True]
            assert tokens(*responses) == right_tokens([1, 2], 5)
            assert sum(not it.outputs for it in responses) == num_empty
            assert (len(responses) - num_empty == 1) == ("stream" in flags)


def malformed(number: int) -> bytes:
    """Return one of two hundred malformed requests."""
    request = asking(f"bad-{number}", [1, 2], 3)
    match number % 8:
        case 0:
            return b"\xff" * (number + 1)
        case 1:
            request.inputs[0].shape[:] = [-1]
        case 2:
            request.raw_input_contents[0] = b"\0" * number
        case 3:
            request.inputs[0].shape[:] = [1 << 60, 1 << 60]
        case 4:
            request.parameters["nonsense"].int64_param = number
        case 5:
            request.inputs.extend([request.inputs[0]] * 70)
        case 6:
            request.model_name = "another"
        case 7:
            request.outputs.add(name="nothing")
    return request.SerializeToString()


async def test_kserve_malformed_requests_do_not_disturb_stream() -> None:
    async with cluster(workers=1) as parts:
        [held] = parts.hold()
        async with grpc.aio.insecure_channel(parts.address) as channel:
            call = channel.stream_stream(
                f"/{SERVICE}/ModelStreamInfer",
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )()
            await call.write(asking("good", [5, 6], 9).SerializeToString())
            await until(lambda: held.num_requests == 1)
            held.let(3)
            good = [await call.read()]
            errors = []
            for number in range(200):
                await call.write(malformed(number))
                while not (answer := await call.read()).error_message:
                    good.append(answer)
                errors.append(answer)
            held.release()
            await call.done_writing()
            while (answer := await call.read()) is not grpc.aio.EOF:
                good.append(answer)
    assert [it.infer_response.id for it in errors] == [
        f"bad-{number}" if number % 8 else "" for number in range(200)
    ]
    assert all(it.infer_response.parameters["triton_final_response"].bool_param for it in errors)
    assert {it.infer_response.parameters[SLUG].string_param for it in errors} == {
        "invalid_request",
        "unknown_model",
    }
    assert not any(it.error_message for it in good)
    assert tokens(*(it.infer_response for it in good)) == right_tokens([5, 6], 9)


@pytest.mark.parametrize("how", ["cancelled", "channel closed"])
async def test_kserve_closed_stream_cancels_its_requests(how: str) -> None:
    async with cluster(workers=1) as parts:
        [held] = parts.hold()
        async with stub_of(parts.address) as stub:
            call = stub.ModelStreamInfer()
            for name in ("a", "b"):
                await call.write(asking(name, [1], 100))
            await until(lambda: held.num_requests == 2)
            if how == "cancelled":
                call.cancel()
        held.release()
        await until_cancelled(parts, "a", "b")


async def test_kserve_cancelled_call_cancels_its_request() -> None:
    async with cluster(workers=1) as parts, stub_of(parts.address) as stub:
        [held] = parts.hold()
        call = stub.ModelInfer(asking("a", [1], 100))
        sending = asyncio.ensure_future(call)
        await until(lambda: held.num_requests == 1)
        sending.cancel()
        await until_cancelled(parts, "a")


async def until_cancelled(parts: Cluster, *request_ids: str) -> None:
    async with asyncio.timeout(20):
        for request_id in request_ids:
            while (await parts.ledger.get(request_id)).state is not State.CANCELLED:
                await asyncio.sleep(0.002)


async def test_kserve_timeout_is_in_microseconds() -> None:
    async with cluster(workers=0) as parts, stub_of(parts.address) as stub:
        request = asking("late", [1], 5)
        request.parameters["timeout"].int64_param = 50_000
        assert await refused(stub.ModelInfer(request)) == ("DEADLINE_EXCEEDED", "deadline_exceeded")


async def test_kserve_model_infer_rejects_stream_parameter() -> None:
    async with cluster(workers=0) as parts, stub_of(parts.address) as stub:
        call = stub.ModelInfer(asking("", [1], 5, stream=True))
        assert await refused(call) == ("INVALID_ARGUMENT", "invalid_request")


async def test_kserve_unknown_models_and_versions_are_not_found() -> None:
    async with cluster(workers=0) as parts, stub_of(parts.address) as stub:
        for name, version, is_there in (
            ("fake", "", True),
            ("fake", "1", True),
            ("fake", "2", False),
            ("other", "", False),
        ):
            ready = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))
            assert ready.ready is is_there
            request = pb.ModelMetadataRequest(name=name, version=version)
            if is_there:
                assert (await stub.ModelMetadata(request)).versions == ["1"]
            else:
                assert await refused(stub.ModelMetadata(request)) == ("NOT_FOUND", "unknown_model")


@pytest.mark.parametrize(
    "method", ["RepositoryModelLoad", "CudaSharedMemoryRegister", "TraceSetting", "LogSettings"]
)
async def test_kserve_unsupported_methods_are_unimplemented(method: str) -> None:
    async with cluster(workers=0) as parts:
        async with grpc.aio.insecure_channel(parts.address) as channel:
            call = channel.unary_unary(f"/{SERVICE}/{method}")(b"")
            assert await refused(call) == ("UNIMPLEMENTED", "unimplemented")


class _ByName(Authenticator):
    """Authenticator by name: "infer" may infer, and "watch" may not."""

    def admit(self, headers: Mapping[str, str]) -> Caller:
        scopes = {"infer": Scope.INFER, "watch": Scope.METRICS}
        if (scope := scopes.get(headers.get("authorization", ""))) is None:
            raise Unauthenticated("who is it?")
        return Caller("acme", frozenset({scope}))


async def test_kserve_requires_credentials_except_for_probes() -> None:
    async with started_gateway() as gateway:
        server = grpc.aio.server()
        inference = Inference(gateway.requests, gateway.models, GRPC)
        kserve = KserveServer(inference, gateway.requests, gateway.models)
        server.add_generic_rpc_handlers((kserve.handlers(_ByName()),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with stub_of(f"127.0.0.1:{port}") as stub:
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
            request = asking("r", [1], 5)
            assert (await refused(stub.ModelInfer(request)))[0] == "UNAUTHENTICATED"
            watching = (("authorization", "watch"),)
            call = stub.ModelInfer(request, metadata=watching)
            assert (await refused(call))[0] == "PERMISSION_DENIED"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(stub.ModelStreamInfer(iter([request]), metadata=watching))
            assert caught.value.code().name == "PERMISSION_DENIED"
            stream = stub.ModelStreamInfer(iter([request]), metadata=(("authorization", "infer"),))
            await until(lambda: gateway.line.enqueued)
            assert gateway.line.enqueued[0].request_id == "acme/r"
            stream.cancel()
        await server.stop(None)
