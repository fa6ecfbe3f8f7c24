"""Settings of a local Ray (2.60) that its public interface does not offer.

Listening addresses: Ray's servers listen on the address of their node, which therefore has to be
127.0.0.1. ``ray.init`` replaces that address by the machine's external one unless Ray's support of
clusters with several nodes is disabled, as ``prepare`` does. Each replica of Serve opens another
port on every interface, for pickled calls between deployments.

Messages: Ray prints its messages to the standard output of the process that started it.

Load: by default Serve's controller runs ten times a second, which takes 3 % of a core even while
the cluster is idle. The engine needs that time on a small machine.

Priority: by default Ray runs routers and workers with a nice value of 15, so that any other busy
process displaces them. With five such processes on two cores, a cluster of one worker did not start
within 300 s; with the nice value 0 it started in 118 s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from everlift import logs

log = logs.get_logger(__name__)

_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
#: Intervals of the loop of Serve's controller and of the export of its metrics, and the nice value
#: of Ray's worker processes. A value that is already set in the environment stays.
_DEFAULTS = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_worker_niceness": "0",
}


def prepare() -> None:
    """Set the environment of the process that starts Ray, which Ray's processes inherit.

    Must be called before ray is imported.
    """
    os.environ.update(_SETTINGS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def bind_replicas() -> None:
    """Make replicas of Serve listen on loopback instead of every interface.

    Must be called in each of Ray's worker processes before a replica starts. Does nothing in an
    environment without Serve, in which only ranks run.
    """
    try:
        from ray.serve._private import replica
    except ImportError:
        return
    module: Any = replica
    listen = module.add_port_to_grpc_server
    module.add_port_to_grpc_server = lambda server, address: listen(
        server, address.replace("[::]", "127.0.0.1")
    )


def log_messages() -> None:
    """Redirect Ray's messages from standard output to Everlift's log.

    Must be called in the process that starts Ray.
    """
    from ray._private import worker

    module: Any = worker
    module.print_to_stdstream = _log_message


def _log_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    log.info("message from Ray", lines=list(data["lines"]))
