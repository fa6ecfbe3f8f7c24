"""Errors as google.rpc details: exchange with Google's classes, and limits of size."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from everlift import error_details, wire
from everlift.errors import BY_SLUG, EverliftError, OutOfRange, QueueFull, UnknownRequest
from everlift.v1 import status_pb2 as pb

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]


def google(error: EverliftError) -> status_pb2.Status:
    return status_pb2.Status.FromString(error_details.encode(error, INVALID_ARGUMENT))


def unpacked(status: status_pb2.Status, kind: type[Any]) -> Any:
    """Return a detail as Google's libraries decode it."""
    [detail] = [it for it in status.details if it.Is(kind.DESCRIPTOR)]
    message = kind()
    assert detail.Unpack(message)
    return message


@pytest.mark.parametrize("slug", BY_SLUG)
def test_error_details_round_trip(slug: str) -> None:
    sent = BY_SLUG[slug]("why", retry_after_s=1.25, field="top_p")
    received = error_details.decode(error_details.encode(sent, 3))
    assert received is not None
    assert (type(received), str(received)) == (type(sent), "why")
    assert (received.retry_after_s, received.field) == (1.25, "top_p")


def test_error_details_are_readable_by_google_rpc() -> None:
    status = google(QueueFull("full", retry_after_s=1.5))
    assert (status.code, status.message) == (INVALID_ARGUMENT, "full")
    info = unpacked(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("queue_full", "everlift")
    assert unpacked(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1500
    [violation] = unpacked(
        google(OutOfRange("too hot", field="temperature")), error_details_pb2.BadRequest
    ).field_violations
    assert (violation.field, violation.description) == ("temperature", "too hot")


def test_error_details_omit_unset_fields() -> None:
    assert len(google(UnknownRequest("who")).details) == 1
    received = error_details.decode(error_details.encode(UnknownRequest("who"), 5))
    assert received is not None
    assert (received.retry_after_s, received.field) == (None, "")


def test_error_details_decode_google_rpc_status() -> None:
    status = status_pb2.Status(code=8, message="full")
    status.details.add().Pack(error_details_pb2.Help())
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason="queue_full", domain="everlift", metadata={"queued": "3"}
        )
    )
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(250)
    status.details.add().Pack(retry)
    error = error_details.decode(status.SerializeToString())
    assert isinstance(error, QueueFull)
    assert (str(error), error.retry_after_s) == ("full", 0.25)


def test_error_messages_have_google_rpc_fields() -> None:
    for ours, theirs in (
        (pb.Status, status_pb2.Status),
        (pb.ErrorInfo, error_details_pb2.ErrorInfo),
        (pb.RetryInfo, error_details_pb2.RetryInfo),
        (pb.BadRequest, error_details_pb2.BadRequest),
    ):
        their_fields = theirs.DESCRIPTOR.fields_by_name
        for field in ours.DESCRIPTOR.fields:
            assert field.number == their_fields[field.name].number
            assert field.type == their_fields[field.name].type


@pytest.mark.parametrize("domain", ["", "googleapis.com"])
def test_error_details_ignore_foreign_domain(domain: str) -> None:
    status = status_pb2.Status(code=8)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="queue_full", domain=domain))
    assert error_details.decode(status.SerializeToString()) is None


@given(st.binary(max_size=64))
def test_error_details_tolerate_malformed_bytes(data: bytes) -> None:
    error_details.decode(data)


@pytest.mark.parametrize("letter", ["x", "é", "\n", "🙂", "\ud800"])
async def test_error_message_of_any_length_reaches_client(letter: str) -> None:
    sent = OutOfRange(letter * 100_000, retry_after_s=1e-9 + 86_399, field="a_field_of_the_request")

    async def refuse(request: bytes, context: Any) -> bytes:
        await wire.abort(context, sent)
        raise AssertionError

    server = grpc.aio.server()
    method = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", method),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/t.T/Refuse")(b"")
            with pytest.raises(OutOfRange) as caught:
                await wire.answer(call, call)
    finally:
        await server.stop(None)
    assert len(str(caught.value)) > 200
    assert str(caught.value).endswith("…")
    assert caught.value.field == sent.field
