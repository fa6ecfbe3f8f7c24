"""Simulated network as one process sees it."""

from __future__ import annotations

from typing import cast

import grpc

from everlift.transport import Options
from tests.simulated_cluster.call import SimChannel
from tests.simulated_cluster.clock import VirtualLoop
from tests.simulated_cluster.network import Network
from tests.simulated_cluster.server import SimServer


class SimTransport:
    credentials = None

    def __init__(self, network: Network, process: VirtualLoop) -> None:
        self._network = network
        self._process = process

    def channel(self, address: str) -> grpc.aio.Channel:
        return cast("grpc.aio.Channel", SimChannel(self._network, self._process, address))

    def server(self, options: Options) -> grpc.aio.Server:
        return cast("grpc.aio.Server", SimServer(self._network, self._process))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return cast("SimServer", server).listen(address)
