"""Where the ledger is and how it is used: every default of it, once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

#: The url of a ledger that the process which starts the cluster runs itself.
EMBEDDED = "embedded"
SCHEMES = ("unix", "redis", "rediss")
MAX_SHARDS = 1024


class LedgerSetupError(Exception):
    """The ledger cannot be used as it is set up. The message says what to change; to try again does
    not help."""


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """Durations are seconds. Routers of one cluster must agree on ``key_prefix`` and ``shards``;
    the ledger refuses others."""

    #: "embedded", or unix:///path, redis://user:password@host:port/db, rediss://...
    url: str = field(default=EMBEDDED, repr=False)
    #: clusters that share a server differ in this
    key_prefix: str = "everlift"
    #: hash tags that the requests are spread over; more than one only pays on Redis Cluster
    shards: int = 1
    #: how long a request is kept after its end
    retention: float = 3600.0
    #: the longest that one call takes, its retries counted in
    timeout: float = 3.0
    #: connections of one process; calls beyond that wait for one
    max_connections: int = 32
    #: what the embedded server may keep; at the limit it refuses writes
    maxmemory_mib: int = 1024

    def __post_init__(self) -> None:
        if self.url != EMBEDDED and urlsplit(self.url).scheme not in SCHEMES:
            # Never the url itself: it may hold a password.
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ValueError(f"url must be {EMBEDDED} or begin with one of {known}")
        if not self.key_prefix or set(self.key_prefix) & set("{}"):
            raise ValueError("key_prefix must not be empty nor contain { or }")
        if not 1 <= self.shards <= MAX_SHARDS:
            raise ValueError(f"shards must be from 1 to {MAX_SHARDS}, not {self.shards}")
        for name in ("retention", "timeout", "max_connections", "maxmemory_mib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name):g}")


DEFAULTS = LedgerConfig()
