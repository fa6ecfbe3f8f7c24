"""Settings of the ledger. Their defaults are defined only here. Pure."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from everlift.settings import CHECKED, Count, Fraction, Positive
from everlift.tls import check_pair, make_absolute
from router.ledger.redis import address

#: Environment variable that contains the ledger's url if the configuration has none.
URL_VARIABLE = "EVERLIFT_LEDGER__URL"
#: Value of ``url`` for a server that is run by the process which starts the cluster.
EMBEDDED = "embedded"
MAX_SHARDS = 1024

#: Durability promises, which README.md describes in detail.
DurabilityClass = Literal["memory", "everysec", "always", "replicated"]
#: Short description of each promise: the faults that an acknowledged move survives.
PROMISES: dict[str, str] = {
    "memory": "writes survive the loss of routers and workers, not the end of the server",
    "everysec": "writes survive a restart of the server, except the last second, which "
    "routers send again",
    "always": "writes survive a restart of the server, not the loss of its disk",
    "replicated": "the beginning and end of requests survive the loss of the server",
}


class LedgerSetupError(Exception):
    """Raised if the ledger cannot be used with its current setup; a retry does not help.

    The message says what to change.
    """


@dataclass(frozen=True, slots=True, config=CHECKED)
class LedgerConfig:
    """Settings of the ledger. Durations are in seconds.

    Routers of one cluster must agree on ``key_prefix`` and ``shards``. A process that has another
    value of ``shards`` than the existing ledger cannot connect.
    """

    #: "embedded", or unix:///path, redis://user:password@host:port/db, rediss://... (TLS),
    #: redis+sentinel://host:port,host:port/service, redis+cluster://host:port,host:port
    url: str = field(default=EMBEDDED, repr=False)
    #: prefix of the cluster's keys; clusters that share a server need different ones
    key_prefix: str = "everlift"
    #: key that clusters of different models share while one replaces another; its value is the
    #: key_prefix of the cluster that serves clients. Not set: all serve
    active_key: str = ""
    #: hash tags over which requests are spread; more than one only helps on Redis Cluster
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    #: seconds for which a request is kept after its end
    retention: Positive = 3600.0
    #: longest duration of a call in seconds, including its retries
    timeout: Positive = 3.0
    #: maximum number of connections of a process for calls that wait for a replica, and as many for
    #: other calls to a Redis Cluster and for heartbeats; further ones wait for a free connection.
    #: Other calls share one connection
    max_connections: Count = 32
    #: memory limit of the embedded server; at the limit it refuses writes
    maxmemory_mib: Count = 1024
    #: share of a server's memory limit above which new requests are refused
    memory_limit: Fraction = 0.8
    #: faults that an acknowledged write survives. The embedded server is started accordingly; other
    #: servers are refused if they promise less
    durability_class: DurabilityClass = "everysec"
    #: PEM file with the authority of the servers' certificates, for rediss://; not set: the
    #: system's
    tls_ca: str = ""
    #: client certificate and key, if the server requires them
    tls_cert: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        if self.url != EMBEDDED:
            address.parse(self.url)
        elif self.durability_class == "replicated":
            raise ValueError(
                "durability_class must not be replicated: the embedded server has no replica"
            )
        check_pair(self.tls_cert, self.tls_key, "tls_")
        make_absolute(self, "tls_ca", "tls_cert", "tls_key")
        if not self.key_prefix or set(self.key_prefix) & set("{}"):
            raise ValueError("key_prefix must not be empty or contain { or }")


DEFAULTS = LedgerConfig()
