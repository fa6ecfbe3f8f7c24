"""Number of fields of a message, compared with the count of protobuf."""

from __future__ import annotations

import pytest
from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from everlift.v1 import inference_pb2 as pb
from router.api.grpc import inference_server

MANY = 1 << 30


def protobuf_count(data: bytes) -> int | None:
    """Return the number of fields that protobuf finds, or None if the data is no message."""
    try:
        return len(unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data)))
    except DecodeError:
        return None


@given(st.lists(st.text(max_size=300), max_size=20), st.integers(0, 2**64 - 1))
def test_field_count_equals_protobufs(texts: list[str], number: int) -> None:
    data = pb.GenerateRequest(
        stop=texts, sampling=pb.Sampling(seed=number), max_tokens=number % 2**32
    ).SerializeToString()
    assert inference_server.count(data, MANY) == protobuf_count(data) == len(texts) + 2


def test_field_count_skips_each_wire_type() -> None:
    data = pb.AttachRequest(from_offsets=[-1, 5], digests=[1, 2]).SerializeToString()
    data += pb.Timing(queued_s=0.5, attempts=3).SerializeToString()
    data += b"\x0d\x01\x02\x03\x04"  # field 1, 32 bits
    assert inference_server.count(data, MANY) == protobuf_count(data) == 5


@given(st.binary(max_size=40))
def test_field_count_handles_arbitrary_bytes(data: bytes) -> None:
    """Groups, a deprecated wire type, need not be counted as protobuf counts them."""
    found, wanted = inference_server.count(data, MANY), protobuf_count(data)
    assert 0 <= found <= len(data)
    has_groups = any(byte & 7 in (3, 4) for byte in data)
    assert wanted is None or has_groups or found == wanted


@pytest.mark.parametrize("most", [0, 1, 10])
def test_field_count_stops_beyond_its_limit(most: int) -> None:
    data = pb.GenerateRequest(stop=[""] * 11).SerializeToString()
    assert inference_server.count(data, most) == most + 1
