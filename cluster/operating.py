"""What operators tell a cluster: over the first of its routers that answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeVar

import grpc

from everlift import wire
from everlift.errors import DeadlineExceeded, EverliftError, Unreachable
from everlift.routers import authorization
from everlift.tls import Tls
from everlift.transport import secured
from everlift.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    chaos_pb2,
    chaos_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

Q = TypeVar("Q")
A = TypeVar("A")
_Method: TypeAlias = Callable[[grpc.aio.Channel], grpc.aio.UnaryUnaryMultiCallable[Q, A]]

#: A router that does not answer in time may be stopped: the next one is asked.
_TIMEOUT_S = 5.0


class Operator:
    """Errors are those of ``everlift.errors``."""

    def __init__(self, routers: Sequence[str], tls: Tls | None, api_key: str | None) -> None:
        """Raises SettingsError."""
        transport = secured(tls)
        self._metadata = authorization(api_key)
        self._channels = [transport.channel(router) for router in routers]

    async def drain(self, worker: str) -> admin_pb2.DrainResponse:
        """``worker`` is an id or a beginning of one. Raises UnknownWorker, Unreachable."""
        return await self._ask(_drain, admin_pb2.DrainRequest(worker_id=worker))

    async def set_policy(
        self, order: str | None = None, max_queued: int | None = None
    ) -> admin_pb2.SetPolicyResponse:
        """Changes what is given, and answers what holds then. An empty order or 0 goes back to the
        configuration. Raises InvalidRequest, LedgerUnavailable, Unreachable."""
        request = admin_pb2.SetPolicyRequest(order=order, max_queued=max_queued)
        return await self._ask(_set_policy, request)

    async def capacity(self) -> admin_pb2.CapacityResponse:
        """Raises LedgerUnavailable, Unreachable."""
        return await self._ask(_capacity, admin_pb2.CapacityRequest())

    async def list_requests(
        self, request: inference_pb2.ListRequestsRequest
    ) -> inference_pb2.ListRequestsResponse:
        """One page. Raises InvalidRequest, OutOfRange, Forbidden, LedgerUnavailable,
        Unreachable."""
        return await self._ask(_list_requests, request)

    async def inject(self, fault: chaos_pb2.Fault) -> str:
        """Whom it strikes. Raises ChaosForbidden, InvalidRequest, OutOfRange, UnknownWorker,
        Unreachable."""
        return (await self._ask(_inject, fault)).target

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _ask(self, method: _Method[Q, A], request: Q) -> A:
        last: EverliftError = Unreachable("there is no router to ask")
        for channel in self._channels:
            call = method(channel)(request, timeout=_TIMEOUT_S, metadata=self._metadata)
            try:
                return await wire.answer(call, call)
            except (Unreachable, DeadlineExceeded) as error:
                last = error
        raise last


def _drain(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[admin_pb2.DrainRequest, admin_pb2.DrainResponse]:
    stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
    return stub.Drain


def _set_policy(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[admin_pb2.SetPolicyRequest, admin_pb2.SetPolicyResponse]:
    stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
    return stub.SetPolicy


def _capacity(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[admin_pb2.CapacityRequest, admin_pb2.CapacityResponse]:
    stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
    return stub.Capacity


def _list_requests(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[
    inference_pb2.ListRequestsRequest, inference_pb2.ListRequestsResponse
]:
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    return stub.ListRequests


def _inject(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[chaos_pb2.Fault, chaos_pb2.InjectResponse]:
    stub: chaos_pb2_grpc.ChaosAsyncStub = chaos_pb2_grpc.ChaosStub(channel)
    return stub.Inject


@asynccontextmanager
async def operating(
    routers: Sequence[str], tls: Tls | None = None, api_key: str | None = None
) -> AsyncIterator[Operator]:
    operator = Operator(routers, tls, api_key)
    try:
        yield operator
    finally:
        await operator.close()
