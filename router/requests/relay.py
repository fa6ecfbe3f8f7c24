"""What a client asks this gateway of a request that another one has in its hands."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TypeVar

import grpc

from everlift import wire
from everlift.transport import Transport
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc

Q = TypeVar("Q")
A = TypeVar("A")
_Method = Callable[
    ["inference_pb2_grpc.InferenceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[Q, A]
]

#: On a call that one gateway makes for its client at another one.
_RELAYED = ("everlift-relayed", "1")


def is_relayed(headers: Mapping[str, str]) -> bool:
    name, value = _RELAYED
    return headers.get(name) == value


class Relay:
    """``address`` is the other gateway's internal one. Its errors become ours."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def attach(
        self, address: str, message: pb.AttachRequest
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with self._transport.channel(address) as channel:
            call = _stub(channel).Attach(message, metadata=(_RELAYED,))
            while (piece := await wire.read(call)) is not None:
                yield piece

    async def ask(self, address: str, method: _Method[Q, A], message: Q) -> A:
        async with self._transport.channel(address) as channel:
            call = method(_stub(channel))(message)
            return await wire.answer(call, call)


def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceAsyncStub:
    return inference_pb2_grpc.InferenceStub(channel)
