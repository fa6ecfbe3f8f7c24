"""Limits of the gRPC server for its clients. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server for its clients; sizes are in bytes, durations in seconds."""

    #: maximum size of a message after decompression
    max_message_bytes: int = 64 << 20
    #: maximum size of a call's headers except pseudo-headers: names, values, and 32 bytes for each
    #: header
    max_metadata_bytes: int = 16 << 10
    #: maximum number of concurrent calls of one connection
    max_streams: int = 1 << 14
    #: maximum number of concurrent connections
    max_connections: int = 1 << 14
    #: time after which a connection without calls is closed
    idle: float = 3600.0
    #: interval between checks. A check pings a client that has sent nothing for this long, and
    #: closes the connection if the client has not answered the previous ping
    keepalive: float = 30.0
    #: maximum size of the unread messages of one call; above it, no more data of the call is parsed
    max_unread_bytes: int = 1 << 20
    #: maximum size of the incomplete messages of one connection, in addition to one message of the
    #: maximum size
    max_unfinished_bytes: int = 64 << 20
    #: maximum size of the unsent answers of one call; above it, the call's handler waits
    max_unsent_bytes: int = 64 << 10
    #: sustained rate at which one connection may reset calls, per second; a burst may have twice as
    #: many resets
    resets_per_s: float = 500.0
