"""Where channels and servers come from: gRPC, or what a simulated cluster has in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from everlift.channels import CLIENT_OPTIONS

Options = Sequence[tuple[str, int]]


class Transport(Protocol):
    def channel(self, address: str) -> grpc.aio.Channel:
        """To the server at ``address``; it connects at the first call."""
        ...

    def server(self, options: Options) -> grpc.aio.Server: ...


class _Grpc:
    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)

    def server(self, options: Options) -> grpc.aio.Server:
        return grpc.aio.server(options=options)


GRPC: Transport = _Grpc()
