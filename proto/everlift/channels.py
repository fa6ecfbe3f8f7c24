"""Options of gRPC connections, and explanations of connections that failed."""

from __future__ import annotations

#: Largest gRPC message in bytes. It applies to clients, routers and workers, except that routers
#: limit the messages of clients' calls by the setting router.max_message_bytes.
MAX_MESSAGE_BYTES = 64 << 20
_KEEPALIVE_MS = 10_000

_BOTH_ENDS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_ENDS,
    # These options detect a frozen router or a broken network after 15 s, even on a stream that is
    # silent because its request is queued.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    # This option and not keepalive_timeout_ms limits the wait for the answer to a ping; by default
    # it is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted router is found soon. By default, gRPC waits up to two minutes between attempts to
    # reconnect.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_BOTH_ENDS,
    # By default, a server closes connections with keepalive pings at intervals below five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    # Limit of the open streams of one connection: a client with more requests waits for its own
    # streams to end, and a client that opens useless streams takes a limited amount of memory.
    ("grpc.max_concurrent_streams", 1 << 14),
    # Two servers must not share a port by accident.
    ("grpc.so_reuseport", 0),
]


#: The cause is not known more precisely, because the server sends none, or sends it too late.
_HANDSHAKE_CLOSED = (
    "connection closed during the handshake; the server may require TLS or a client certificate"
)
#: Texts that the details of a gRPC error may contain, and the cause that each implies. The first
#: match is used.
_REFUSALS = (
    ("certificate has expired", "the server's certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not signed by a trusted authority"),
    (
        "Hostname Verification Check failed",
        "the server's certificate is for another name or address",
    ),
    ("WRONG_VERSION_NUMBER", "the server does not use TLS"),
    ("Socket closed", _HANDSHAKE_CLOSED),
    ("Connection reset", _HANDSHAKE_CLOSED),
)


def refusal(details: str) -> str:
    """Return the likely cause of a failed connection if it concerns TLS, else "".

    ``details`` is the text with which gRPC describes its error.
    """
    if "failed to connect" not in details:
        return ""
    return next((reason for text, reason in _REFUSALS if text in details), "")
