"""Tensors of requests: valid, invalid, and hostile."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import InvalidRequest
from router.api.kserve import tensors
from router.api.kserve.tensors import MAX_TENSORS, Tensor
from router.api.kserve.v2 import open_inference_pb2 as pb

INTEGERS = {
    name: st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    for name, bits in (("INT8", 8), ("INT16", 16), ("INT32", 32), ("INT64", 64))
} | {
    name: st.integers(0, (1 << bits) - 1)
    for name, bits in (("UINT8", 8), ("UINT16", 16), ("UINT32", 32), ("UINT64", 64))
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "FP16": st.floats(width=16, allow_nan=False),
    "FP32": st.floats(width=32, allow_nan=False),
    "FP64": st.floats(allow_nan=False),
    "BYTES": st.binary(max_size=9),
    **INTEGERS,
}


def read(*inputs: dict[str, Any], raw: list[bytes] | None = None) -> list[Tensor]:
    request = pb.ModelInferRequest(inputs=inputs, raw_input_contents=raw or [])  # type: ignore[arg-type]
    return list(tensors.inputs(request, lambda name, count: None))


def one(datatype: str, shape: list[int], raw: bytes) -> Tensor:
    [tensor] = read({"name": "t", "datatype": datatype, "shape": shape}, raw=[raw])
    return tensor


@given(st.data(), st.sampled_from(sorted(VALUES)))
def test_tensors_round_trip(data: st.DataObject, datatype: str) -> None:
    values = data.draw(st.lists(VALUES[datatype], max_size=5))
    response = pb.ModelInferResponse()
    tensors.add_output(response, Tensor("t", datatype, (len(values),), values))
    [output], [raw] = response.outputs, response.raw_output_contents
    back = one(output.datatype, list(output.shape), raw)
    assert (list(back.values), back.shape) == (values, (len(values),))


FIELDS = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-1, 2]),
    "INT32": ("int_contents", [-1, 2]),
    "INT64": ("int64_contents", [-1, 1 << 40]),
    "UINT8": ("uint_contents", [1, 2]),
    "UINT32": ("uint_contents", [1, 1 << 31]),
    "UINT64": ("uint64_contents", [1, 1 << 63]),
    "FP32": ("fp32_contents", [0.5, -1.0]),
    "FP64": ("fp64_contents", [0.1, -1.0]),
    "BYTES": ("bytes_contents", [b"", b"ab"]),
}


@pytest.mark.parametrize("datatype", FIELDS)
def test_tensor_contents_are_read_like_raw_bytes(datatype: str) -> None:
    field, values = FIELDS[datatype]
    shape = [1, 2]
    [tensor] = read(
        {"name": "t", "datatype": datatype, "shape": shape, "contents": {field: values}}
    )
    assert tensor == Tensor("t", datatype, (1, 2), tuple(values))


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "cause"),
    [
        ("INT32", [2], b"\0" * 4, "its shape has 2 elements, but 4 bytes"),
        ("INT32", [1], b"\0" * 5, "its shape has 1 elements, but 5 bytes"),
        ("INT32", [-1], b"\0" * 4, "negative dimension"),
        ("INT32", [1 << 62, 1 << 62, 8], b"\0" * 4, "too many elements"),
        ("INT32", [1] * 9, b"\0" * 4, "more than 8 dimensions"),
        ("BF16", [1], b"\0\0", "'BF16' is not supported"),
        ("", [1], b"\0", "'' is not supported"),
        ("BYTES", [1], b"\2\0\0\0a", "longer than its remaining bytes"),
        ("BYTES", [1], b"\xff\xff\xff\xffa", "longer than its remaining bytes"),
        ("BYTES", [1], b"\1\0\0", "its shape has 1 elements, but the request has only 3 bytes"),
        ("BYTES", [1], b"\0" * 8, "its shape has 1 elements, but the request has more"),
        ("BYTES", [1], b"\0" * 6, "its shape has 1 elements, but the request has more"),
        ("BYTES", [2], b"\3\0\0\0abc\0", "its shape has 2 elements, but the request has more"),
        ("BYTES", [2], b"\5\0\0\0abcde", "its shape has 2 elements, but 1 were sent"),
        ("BYTES", [1 << 40], b"\0" * 8, "its shape has 1099511627776 elements"),
    ],
)
def test_tensor_shape_must_match_its_bytes(
    datatype: str, shape: list[int], raw: bytes, cause: str
) -> None:
    with pytest.raises(InvalidRequest, match=cause):
        one(datatype, shape, raw)


INT = {"name": "t", "datatype": "INT32", "shape": [1]}


@pytest.mark.parametrize(
    ("inputs", "raw", "cause"),
    [
        ([INT, INT], [b"\0" * 4], "1 entries for 2 inputs"),
        ([INT], [b"\0" * 4] * 2, "2 entries for 1 inputs"),
        ([], [b"\0"], "1 entries for 0 inputs"),
        ([INT], [], "its shape has 1 elements, but 0 were sent"),
        ([INT | {"contents": {"int_contents": [1, 2]}}], [], "1 elements, but 2 were sent"),
        ([INT | {"contents": {"int64_contents": [1]}}], [], "must not be in int64_contents"),
        (
            [INT | {"contents": {"int_contents": [1]}}],
            [b"\0" * 4],
            "both contents and raw_input_contents",
        ),
        ([INT] * (MAX_TENSORS + 1), [], f"at most {MAX_TENSORS}"),
        (
            [INT | {"parameters": {"shared_memory_region": {"string_param": "x"}}}],
            [b"\0" * 4],
            "shared_memory_region is not supported",
        ),
    ],
)
def test_tensor_must_be_complete_and_in_one_place(
    inputs: list[dict[str, Any]], raw: list[bytes], cause: str
) -> None:
    with pytest.raises(InvalidRequest, match=cause):
        read(*inputs, raw=raw)


def test_empty_tensor_has_no_values() -> None:
    assert [len(one(datatype, [0], b"").values) for datatype in VALUES] == [0] * len(VALUES)
    assert list(one("INT16", [], struct.pack("<h", -7)).values) == [-7]
