"""Lower bounds of a router's cost: grpc.aio servers of the client interface without any logic.

One server answers at once, so its cost is that of the transport. The other also makes the ledger
calls of a request. Both run in one process, which ends when its parent closes the pipe.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from benchmarks.child import child
from everlift import heap
from everlift.channels import SERVER_OPTIONS
from everlift.messages import FinishReason
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import inference_pb2_grpc
from router.ledger.config import LedgerConfig
from router.ledger.entry import Append
from router.ledger.redis.redis_ledger import RedisLedger, connect
from tests.support.ledger.ledgers import make_request

_TOKEN = 97
_LEASE_S = 3600.0


@dataclass(frozen=True)
class Floor:
    """Addresses of both servers, and the pid of their process."""

    transport: str
    ledger: str
    pid: int


class _Transport(inference_pb2_grpc.InferenceServicer):
    """Server that sends the first token at once, and each further one ``pace_s`` later."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(request_id=request.request_id)
        for offset in range(request.max_tokens):
            if offset:
                await asyncio.sleep(self._pace_s)
            yield _piece(request.request_id, offset, is_last=offset + 1 == request.max_tokens)


class _LedgerCalls(inference_pb2_grpc.InferenceServicer):
    """Server of one-token requests, which opens, dispatches and ends each in the ledger."""

    def __init__(self, ledger: RedisLedger, term: int) -> None:
        self._ledger = ledger
        self._term = term
        self._request = make_request(max_tokens=1)

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        request_id, epoch = secrets.token_hex(16), secrets.randbits(63) + 1
        await self._ledger.open(replace(self._request, request_id=request_id), "floor")
        yield pb.GenerateResponse(request_id=request_id)
        await self._ledger.dispatch(request_id, "worker", epoch, self._term)
        end = Append(request_id, epoch, 0, (_TOKEN,), finish_reason=FinishReason.LENGTH)
        await self._ledger.append([end])
        yield _piece(request_id, 0, is_last=True)


def _piece(request_id: str, offset: int, *, is_last: bool) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        offset=offset,
        token_ids=(_TOKEN,),
        text="a",
        finish_reason=pb.FINISH_REASON_LENGTH if is_last else pb.FINISH_REASON_UNSPECIFIED,
    )


async def _listen(servicer: inference_pb2_grpc.InferenceServicer) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def _serve(config: LedgerConfig, pace_s: float, pipe: Connection) -> None:
    async def run() -> None:
        ledger = await connect(config)
        term = secrets.randbits(63) + 1
        assert await ledger.lead("floor", "nowhere:1", term, _LEASE_S)
        transport, transport_address = await _listen(_Transport(pace_s))
        ledger_calls, ledger_address = await _listen(_LedgerCalls(ledger, term))
        heap.freeze_heap()
        pipe.send((transport_address, ledger_address))
        await asyncio.to_thread(pipe.poll, None)
        await transport.stop(None)
        await ledger_calls.stop(None)
        await ledger.close()

    uvloop.run(run())


@contextmanager
def floor_process(config: LedgerConfig, pace_s: float) -> Iterator[Floor]:
    """Start both servers and yield them; later tokens of a stream are ``pace_s`` apart."""
    with child(_serve, config, pace_s) as process:
        transport, ledger = process.pipe.recv()
        yield Floor(transport, ledger, process.pid)
