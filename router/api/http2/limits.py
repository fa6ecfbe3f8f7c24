"""Limits of a client of the gRPC server. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are bytes, durations seconds."""

    #: one message, after it was decompressed
    max_message_bytes: int = 64 << 20
    #: names and values of a call's metadata, 32 bytes counted beside each
    max_metadata_bytes: int = 16 << 10
    #: calls of one connection
    max_streams: int = 1 << 14
    #: connections
    max_connections: int = 1 << 14
    #: a connection without calls is closed after so long
    idle: float = 3600.0
    #: one that says nothing for so long is asked whether it lives, and closed after as long again
    keepalive: float = 30.0
    #: messages of one call that wait for their handler; more are not let in
    max_unread_bytes: int = 1 << 20
    #: of messages of one connection that are not whole, beside one of the largest
    max_unfinished_bytes: int = 64 << 20
    #: answers of one call that wait for its client; the handler waits beyond that
    max_unsent_bytes: int = 64 << 10
    #: calls that one connection may give up in a second, for longer than a moment
    resets_per_s: float = 500.0
