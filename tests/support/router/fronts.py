"""Fronts: the APIs of a router, each called as its own clients do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from everlift import wire
from everlift.errors import BY_SLUG, EverliftError
from everlift.v1 import inference_pb2 as pb
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from tests.support.in_process import ROUTER, Cluster, cluster
from tests.support.router.bystander import beside_a_good_stream
from tests.support.router.http_client import JSON, ask
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig

GENERATE = "/everlift.v1.Inference/Generate"
INFER = "/inference.GRPCInferenceService/ModelInfer"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Headers = Mapping[str, str]
Refusal = type[EverliftError]
NO_HEADERS: Headers = {}


@dataclass(frozen=True)
class Fronts:
    """Fronts of one router; each method returns the reason of a refusal, or None on success."""

    grpc: str
    http: str
    model: str

    @classmethod
    def of(cls, parts: Cluster) -> Fronts:
        router = parts.routers[0]
        return cls(router.address, router.http_address, router._models.first.name)

    async def native(
        self, request: pb.GenerateRequest | bytes, headers: Headers = NO_HEADERS
    ) -> Refusal | None:
        """Send a native request; bytes are sent unchanged, even invalid ones."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        async with grpc.aio.insecure_channel(self.grpc) as channel:
            call = channel.unary_stream(GENERATE)(data, metadata=tuple(headers.items()))
            try:
                while await wire.read(call) is not None:
                    pass
            except EverliftError as error:
                assert wire.status(error) is await call.code()
                return type(error)
        return None

    async def kserve(
        self,
        parameters: Mapping[str, object],
        text: bytes | None = b"a",
        headers: Headers = NO_HEADERS,
        more: Sequence[tuple[str, str, Sequence[int], bytes]] = (),
    ) -> Refusal | None:
        """Send a KServe request with the prompt ``text``.

        ``more`` are further tensors: name, datatype, shape and contents.
        """
        request = kserve_pb.ModelInferRequest(model_name=self.model)
        inputs = [("text_input", "BYTES", [1], element(text))] if text is not None else []
        for name, datatype, shape, raw in [*inputs, *more]:
            request.inputs.add(name=name, datatype=datatype, shape=shape)
            request.raw_input_contents.append(raw)
        for name, value in parameters.items():
            _set(request.parameters[name], value)
        async with grpc.aio.insecure_channel(self.grpc) as channel:
            call = channel.unary_unary(INFER)(
                request.SerializeToString(), metadata=tuple(headers.items())
            )
            try:
                await wire.answer(call, call)
            except EverliftError as error:
                assert wire.status(error) is await call.code()
                return type(error)
        return None

    async def over_http(
        self, path: str, body: Any, headers: Headers = NO_HEADERS
    ) -> Refusal | None:
        answer = await ask(self.http, path, body, {**JSON, **headers})
        if answer.status == 200:
            return None
        error = BY_SLUG[answer.error[0]]
        assert answer.status == error.http_status
        return error

    async def completion(self, headers: Headers = NO_HEADERS, **fields: Any) -> Refusal | None:
        return await self.over_http(COMPLETIONS, {"prompt": "a"} | fields, headers)

    async def chat(self, headers: Headers = NO_HEADERS, **fields: Any) -> Refusal | None:
        messages = [{"role": "user", "content": "a"}]
        return await self.over_http(CHAT, {"messages": messages} | fields, headers)


@asynccontextmanager
async def demo_fronts(directory: Path = DEMO_MODEL, **settings: Any) -> AsyncIterator[Fronts]:
    """Run a router with these settings, and a worker whose model supports chats and grammars."""
    worker = WorkerConfig(model=str(directory), device="cpu", num_blocks=64, num_threads=1)
    router = replace(ROUTER, model=str(directory), **settings)
    async with cluster(workers=1, router_config=router, worker_config=worker) as parts:
        yield Fronts.of(parts)


Send = Callable[[Fronts], Awaitable[Refusal | None]]
#: By name: the expected refusal, or None if the request is served; and the sender.
Cases = dict[str, tuple[Refusal | None, Send]]


async def check(fronts: Fronts, cases: Cases) -> None:
    """Check the outcome of each case, one after the other, beside one undisturbed stream."""
    async with beside_a_good_stream(fronts.grpc):
        became = {name: await send(fronts) for name, (_, send) in cases.items()}
    assert became == {name: expected for name, (expected, _) in cases.items()}


def native(**fields: Any) -> Send:
    return lambda fronts: fronts.native(pb.GenerateRequest(**{"text": "a"} | fields))


def raw(number: int, data: bytes) -> Send:
    """Return a sender of a native request whose field ``number`` is ``data``."""
    return lambda fronts: fronts.native(_varint(number << 3 | 2) + _varint(len(data)) + data)


def kserve(text: bytes | None = b"a", **parameters: object) -> Send:
    return lambda fronts: fronts.kserve(parameters, text)


def tensor(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Send:
    """Return a sender of a KServe request with this tensor only."""
    return lambda fronts: fronts.kserve({}, None, more=[(name, datatype, shape, data)])


def completion(**fields: Any) -> Send:
    return lambda fronts: fronts.completion(**fields)


def chat(**fields: Any) -> Send:
    return lambda fronts: fronts.chat(**fields)


def tokenize(**fields: Any) -> Send:
    return lambda fronts: fronts.over_http("/tokenize", fields)


def said(content: object) -> dict[str, object]:
    """Return a chat message of the user."""
    return {"role": "user", "content": content}


def element(text: bytes) -> bytes:
    """Return an element of a BYTES tensor."""
    return len(text).to_bytes(4, "little") + text


def _set(parameter: kserve_pb.InferParameter, value: object) -> None:
    match value:
        case bool():
            parameter.bool_param = value
        case int():
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
        case _:
            raise TypeError(value)


def _varint(value: int) -> bytes:
    """Return a number as a varint of protobuf."""
    septets = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(septet | 0x80 for septet in septets[:-1]), septets[-1]])
