"""Settings of a local Ray (2.60) that its interface does not offer.

Its servers listen where their node is, so the node has to be 127.0.0.1; ``ray.init`` turns that
address into the machine's outer one unless clusters are off. Serve's replicas open one more port,
for pickled calls between deployments, on every interface. What Ray has to say of its own accord it
prints to the standard output of whoever started it. And on a machine that the engine needs, what it
looks at ten times a second takes 3 % of a core while nothing happens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everlift import logs

log = logs.get_logger(__name__)

_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
#: Between two looks of Serve's controller, and two times that its metrics are sent. Who has set one
#: has decided.
_INTERVALS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}


def prepare() -> None:
    """Prepare the process that starts Ray, before ray is imported; Ray's processes inherit it."""
    os.environ.update(_SETTINGS)
    for name, value in _INTERVALS.items():
        os.environ.setdefault(name, value)


def bind_replicas() -> None:
    """Bind servers to loopback, in each of Ray's worker processes, before a replica starts."""
    from ray.serve._private import replica

    module: Any = replica
    listen = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, address: listen(
        server, address.replace("[::]", "127.0.0.1")
    )


def log_messages() -> None:
    """Send Ray's messages to our log, in the process that starts Ray."""
    from ray._private import worker

    module: Any = worker
    module.print_to_stdstream = _log_message


def _log_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    log.info("message from Ray", lines=list(data["lines"]))
