"""Keeps a Ray that runs on one machine for itself on the loopback interface.

Ray's own servers listen where their node is, so the node has to be 127.0.0.1; ``ray.init`` turns
that address into the machine's outer one unless clusters are off. Serve's replicas (2.60) open one
more port, for pickled calls between deployments, on every interface and have no setting for it.
"""

from __future__ import annotations

import os
from typing import Any


def prepare() -> None:
    """In the process that starts Ray, before ray is imported; what Ray starts inherits it."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def bind_replicas() -> None:
    """In each of Ray's worker processes, before a replica starts its server."""
    from ray.serve._private import replica

    module: Any = replica
    listen = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, address: listen(
        server, address.replace("[::]", "127.0.0.1")
    )
