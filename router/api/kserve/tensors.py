"""Conversion between tensors of the Open Inference Protocol and Python values. Pure.

Input is untrusted. A tensor is only decoded if the number of its bytes matches its shape, so that
no more elements are created than were sent. Elements are encoded in row-major order:

    raw, BYTES        | length, 4 bytes | element | length | element | ...
    raw, all others   | element | element | ...          both little-endian
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from everlift.errors import InvalidRequest
from router.api.kserve.v2 import open_inference_pb2 as pb

#: Maximum number of inputs, and of outputs, in a request. Fewer different names exist.
MAX_TENSORS = 64
_MAX_DIMENSIONS = 8
#: Exclusive upper bound of the number of elements of a tensor, so that error messages can contain
#: the number.
_TOO_MANY = 1 << 64

Scalar = bool | int | float | bytes

#: For each datatype: the struct format of an element in raw form, and the field of ``contents`` in
#: which the elements may be sent instead (FP16 has none). BYTES is not listed, because its elements
#: differ in length.
_FORMATS = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP16": ("e", ""),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
}
_BYTES = "BYTES"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor with ``values`` in row-major order; elements of BYTES are bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Scalar]


def inputs(
    request: pb.ModelInferRequest, check_count: Callable[[str, int], None]
) -> Iterator[Tensor]:
    """Yield the input tensors of a request; each is decoded when the iterator reaches it.

    Before a tensor is decoded, ``check_count`` is called with its name and number of elements,
    because a request may contain millions of small elements. An error that ``check_count`` raises
    ends the iteration. Raises InvalidRequest if a tensor is malformed.
    """
    num_inputs, num_raw = len(request.inputs), len(request.raw_input_contents)
    if num_inputs > MAX_TENSORS:
        raise InvalidRequest(
            f"the request has {num_inputs} inputs; at most {MAX_TENSORS} are allowed"
        )
    if num_raw not in (0, num_inputs):
        raise InvalidRequest(f"raw_input_contents has {num_raw} entries for {num_inputs} inputs")
    for number, message in enumerate(request.inputs):
        raw = request.raw_input_contents[number] if num_raw else None
        yield _tensor(message, raw, check_count)


def _tensor(
    message: pb.ModelInferRequest.InferInputTensor,
    raw: bytes | None,
    check_count: Callable[[str, int], None],
) -> Tensor:
    name, datatype = message.name, message.datatype
    if datatype not in _FORMATS and datatype != _BYTES:
        raise InvalidRequest(f"{name}: the datatype {datatype!r} is not supported")
    if message.parameters:
        raise InvalidRequest(
            f"{name}: the parameter {min(message.parameters)} is not supported: "
            "send the tensor in the request, not in shared memory"
        )
    count = _count(message)
    check_count(name, count)
    if raw is None:
        values = _from_contents(message, count)
    elif message.HasField("contents"):
        raise InvalidRequest(f"{name} has both contents and raw_input_contents")
    elif datatype == _BYTES:
        values = _split(name, raw, count)
    else:
        values = _unpack(name, datatype, raw, count)
    return Tensor(name, datatype, tuple(message.shape), values)


def _count(message: pb.ModelInferRequest.InferInputTensor) -> int:
    if len(message.shape) > _MAX_DIMENSIONS:
        raise InvalidRequest(f"{message.name} has more than {_MAX_DIMENSIONS} dimensions")
    if min(message.shape, default=0) < 0:
        raise InvalidRequest(f"{message.name} has a negative dimension: {list(message.shape)}")
    if (count := math.prod(message.shape)) >= _TOO_MANY:
        raise InvalidRequest(f"{message.name}: its shape has too many elements")
    return count


def _from_contents(message: pb.ModelInferRequest.InferInputTensor, count: int) -> Sequence[Scalar]:
    field = "bytes_contents" if message.datatype == _BYTES else _FORMATS[message.datatype][1]
    for other, _ in message.contents.ListFields():
        if other.name != field:
            raise InvalidRequest(
                f"{message.name}: elements of {message.datatype} must not be in {other.name}"
            )
    values: Sequence[Scalar] = getattr(message.contents, field) if field else ()
    if len(values) != count:
        raise _mismatch(message.name, count, f"{len(values)} were sent")
    return tuple(values)


def _unpack(name: str, datatype: str, raw: bytes, count: int) -> Sequence[Scalar]:
    kind = _FORMATS[datatype][0]
    if len(raw) != count * struct.calcsize(f"<{kind}"):
        raise _mismatch(name, count, f"{len(raw)} bytes of {datatype} were sent")
    return struct.unpack(f"<{count}{kind}", raw)


def _split(name: str, raw: bytes, count: int) -> Sequence[bytes]:
    if count * _LENGTH.size > len(raw):
        raise _mismatch(name, count, f"the request has only {len(raw)} bytes for it")
    elements: list[bytes] = []
    start = 0
    while start < len(raw):
        if len(elements) == count or start + _LENGTH.size > len(raw):
            raise _mismatch(name, count, "the request has more bytes for it")
        (length,) = _LENGTH.unpack_from(raw, start)
        start += _LENGTH.size + length
        if start > len(raw):
            raise InvalidRequest(
                f"{name}: element {len(elements)} is longer than its remaining bytes"
            )
        elements.append(raw[start - length : start])
    if len(elements) != count:
        raise _mismatch(name, count, f"{len(elements)} were sent")
    return elements


def _mismatch(name: str, count: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: its shape has {count} elements, but {what}")


def add_output(response: pb.ModelInferResponse, tensor: Tensor) -> None:
    response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    response.raw_output_contents.append(_raw(tensor))


def _raw(tensor: Tensor) -> bytes:
    if tensor.datatype == _BYTES:
        elements = cast("Sequence[bytes]", tensor.values)
        return b"".join(_LENGTH.pack(len(element)) + element for element in elements)
    return struct.pack(f"<{len(tensor.values)}{_FORMATS[tensor.datatype][0]}", *tensor.values)
