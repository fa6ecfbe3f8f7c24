"""HTTP/2 connections of the gRPC server."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection

from router.api.http2.h2_connection import Http2

HEAD = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/s/m")]


def test_http2_keeps_a_bounded_number_of_closed_streams() -> None:
    server = Http2(H2Configuration(client_side=False))
    client = H2Connection(H2Configuration(client_side=True))
    server.initiate_connection()
    client.initiate_connection()
    for _ in range(Http2.MAX_CLOSED_STREAMS + 100):
        stream_id = client.get_next_available_stream_id()
        client.send_headers(stream_id, HEAD, end_stream=True)
        server.receive_data(client.data_to_send())
        server.send_headers(stream_id, [(":status", "200")], end_stream=True)
        server.drop_stream(stream_id)
        client.receive_data(server.data_to_send())
    assert not server.streams
    assert len(server._closed_streams) == Http2.MAX_CLOSED_STREAMS <= 4096
