"""Causes of messages that cannot be parsed."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from everlift.errors import InvalidRequest, NotUtf8
from everlift.v1 import inference_pb2 as pb
from router.api.grpc.handlers import parse

CASES = {
    "nested message": (pb.GenerateRequest, b"\x2a\x01\xff"),
    "packed numbers": (pb.GenerateRequest, b"\x3a\x01\xff"),
    "number after a text": (pb.GenerateRequest, b"\x12\x01a\x20\xff"),
    "nested message in a list": (pb.GenerateManyRequest, b"\x0a\x03\x2a\x01\xff"),
}


@pytest.mark.parametrize("case", CASES)
def test_parse_malformed_message_raises_invalid_request(case: str) -> None:
    kind, data = CASES[case]
    with pytest.raises(InvalidRequest, match=f"^the message is not a {kind.__name__}$") as caught:
        parse(kind, data)
    assert type(caught.value) is InvalidRequest


@pytest.mark.parametrize(
    ("kind", "data"),
    [(pb.GenerateRequest, b"\x12\x01\xff"), (pb.GenerateManyRequest, b"\x0a\x03\x12\x01\xff")],
)
def test_parse_bad_text_raises_not_utf8(kind: type[Message], data: bytes) -> None:
    with pytest.raises(NotUtf8, match=f"^a text field of {kind.__name__} is not UTF-8$"):
        parse(kind, data)
