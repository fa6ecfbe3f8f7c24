"""A client that does not read, over real gRPC: its unread output is buffered only once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc

from everlift.transport import GRPC
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc, session_pb2
from router.api.grpc.inference_server import InferenceServer
from router.api.service import Inference
from router.api.status import Status
from router.auth.caller import OPEN
from router.requests.manager import Requests
from router.requests.request import LiveRequest
from router.requests.stream import LiveSource, RelayedSource
from tests.support.ledger.ledgers import scored
from tests.support.router.gateway_support import Gateway, started_gateway, until
from tests.support.router.session_support import OPTIONS

NUM_TOKENS = 10_000
AT_ONCE = 100
#: Bytes that gRPC buffers for a client that does not read: a connection's window and some more.
MOST_BYTES = 1 << 18


class Counting:
    """The gateway's requests, with a count of the bytes that left each stream."""

    def __init__(self, requests: Requests) -> None:
        self.left: list[int] = []
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    def stream(self, *args: Any, **options: Any) -> RelayedSource:
        return RelayedSource(self._counted(self._requests.stream(*args, **options)))

    async def _counted(self, pieces: LiveSource) -> AsyncGenerator[pb.GenerateResponse, None]:
        number = len(self.left)
        self.left.append(0)
        async for piece in pieces:
            self.left[number] += piece.ByteSize()
            yield piece


@asynccontextmanager
async def serving(gateway: Gateway, requests: Counting) -> AsyncIterator[str]:
    """Serve the gateway; yield the address."""
    gateway.model.max_model_len = NUM_TOKENS + 2
    server = grpc.aio.server()
    inference = Inference(cast("Requests", requests), gateway.models, GRPC)
    handlers = InferenceServer(inference, cast("Status", None)).handlers(OPEN)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def submitted(gateway: Gateway) -> LiveRequest:
    return await gateway.submit(
        max_tokens=NUM_TOKENS,
        sampling=pb.Sampling(logprobs=20),
        on_disconnect=pb.ON_DISCONNECT_CONTINUE,
    )


async def make(gateway: Gateway, epoch: int, first: int, until: int) -> None:
    """Generate tokens of about 200 bytes each, including log probabilities."""
    scores = [it.to_proto() for it in scored(*[-1.0] * AT_ONCE, num_top=20)]
    for offset in range(first, until, AT_ONCE):
        stop = session_pb2.STOP_CAUSE_LENGTH if offset + AT_ONCE == NUM_TOKENS else 0
        gateway.make(epoch, offset, "x" * AT_ONCE, stop, logprobs=scores)
        await asyncio.sleep(0)


async def test_slow_reader_backlog_is_bounded_and_delays_no_other() -> None:
    async with started_gateway() as gateway:
        requests = Counting(gateway.requests)
        async with (
            serving(gateway, requests) as address,
            grpc.aio.insecure_channel(address, options=OPTIONS) as channel,
            grpc.aio.insecure_channel(address, options=OPTIONS) as another,
        ):
            live = await submitted(gateway)
            attach = pb.AttachRequest(request_id="r")
            slow = inference_pb2_grpc.InferenceStub(channel).Attach(attach)
            await slow.read()
            quick = inference_pb2_grpc.InferenceStub(another).Attach(attach)
            reading = asyncio.create_task(read(quick))
            await make(gateway, await gateway.dispatch(), 0, NUM_TOKENS)
            assert await reading == NUM_TOKENS
            await until(lambda: live.is_over)
            # The request has ended, and only its reader still holds it.
            assert not len(gateway.requests)
            first, second = requests.left
            assert first < MOST_BYTES < second
            assert await read(slow) == NUM_TOKENS


async def test_explain_reports_unread_tokens_of_slow_reader() -> None:
    async with started_gateway() as gateway:
        requests = Counting(gateway.requests)
        async with (
            serving(gateway, requests) as address,
            grpc.aio.insecure_channel(address, options=OPTIONS) as channel,
        ):
            live = await submitted(gateway)
            stub = inference_pb2_grpc.InferenceStub(channel)
            slow = stub.Attach(pb.AttachRequest(request_id="r"))
            await slow.read()
            epoch, half = await gateway.dispatch(), NUM_TOKENS // 2
            await make(gateway, epoch, 0, half)
            await until(lambda: live.choices[0].readable == half)
            explain = pb.ExplainRequest(request_id="r")
            first, second = await stub.Explain(explain), await stub.Explain(explain)
            assert first.state == pb.REQUEST_STATE_RUNNING
            assert 0 < first.unread_tokens <= half and first.unread_tokens >= second.unread_tokens
            assert 0 < first.unread_s < second.unread_s
            await make(gateway, epoch, half, NUM_TOKENS)
            assert await read(slow) == NUM_TOKENS
            assert (await stub.Explain(explain)).unread_tokens == 0


async def read(call: Any) -> int:
    """Read a call to its end; return the number of tokens."""
    count = 0
    while (piece := await call.read()) is not grpc.aio.EOF:
        assert piece.offset == count or not piece.token_ids
        count += len(piece.token_ids)
    return count
