"""Connections between clients and routers: their options, and why one failed."""

from __future__ import annotations

#: Of one message, at either end: also between routers and workers.
MAX_MESSAGE_BYTES = 64 << 20
_KEEPALIVE_MS = 10_000

_BOTH_ENDS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_ENDS,
    # A router that froze, or a network that drops, is noticed after 15 s, also by a stream that
    # says nothing because its request waits in the queue.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A router that comes back is found soon: by default gRPC looks away for up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_ENDS,
    # By default a server hangs up on whoever asks more than every five minutes whether it lives.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    # What one connection may have open: a client with more waits for its own streams, and one that
    # opens streams for nothing takes only so much memory.
    ("grpc.max_concurrent_streams", 1 << 14),
    # Two servers must not share a port by accident.
    ("grpc.so_reuseport", 0),
]


#: At this end nothing more is known: the server says nothing, or says it too late.
_HUNG_UP = (
    "connection closed during the handshake; the server may require TLS or a client certificate"
)
#: What gRPC's details contain, and what that means. The first one that fits counts.
_REFUSALS = (
    ("certificate has expired", "the server's certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not signed by a trusted authority"),
    (
        "Hostname Verification Check failed",
        "the server's certificate is for another name or address",
    ),
    ("WRONG_VERSION_NUMBER", "the server does not use TLS"),
    ("Socket closed", _HUNG_UP),
    ("Connection reset", _HUNG_UP),
)


def refusal(details: str) -> str:
    """Return how TLS, or its absence, explains a failed connection; empty if it does not."""
    if "failed to connect" not in details:
        return ""
    return next((reason for sign, reason in _REFUSALS if sign in details), "")
