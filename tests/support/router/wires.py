"""Transports between a client and a fake router: gRPC over loopback, or memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from everlift import AsyncClient, Client
from everlift.testing import Answer, FakeRouter, FakeTransport, Fault, words


class Wire(Protocol):
    def router(
        self, answer: Answer = words, faults: Iterable[Fault | None] = (), **options: Any
    ) -> FakeRouter:
        """Return a router, which the caller must enter."""
        ...

    def client(self, router: FakeRouter, **options: Any) -> AsyncClient: ...

    def blocking(self, router: FakeRouter, **options: Any) -> Client: ...


class GrpcWire:
    def router(
        self, answer: Answer = words, faults: Iterable[Fault | None] = (), **options: Any
    ) -> FakeRouter:
        return FakeRouter(answer, faults, **options)

    def client(self, router: FakeRouter, **options: Any) -> AsyncClient:
        return AsyncClient(router.address, **options)

    def blocking(self, router: FakeRouter, **options: Any) -> Client:
        return Client(router.address, **options)


class MemoryWire:
    def __init__(self) -> None:
        self._transports: dict[int, FakeTransport] = {}

    def router(
        self, answer: Answer = words, faults: Iterable[Fault | None] = (), **options: Any
    ) -> FakeRouter:
        transport = FakeTransport(answer, faults, **options)
        self._transports[id(transport.router)] = transport
        return transport.router

    def client(self, router: FakeRouter, **options: Any) -> AsyncClient:
        return AsyncClient("fake", transport=self._transports[id(router)], **options)

    def blocking(self, router: FakeRouter, **options: Any) -> Client:
        return Client("fake", transport=self._transports[id(router)], **options)


WIRES = [GrpcWire, MemoryWire]
