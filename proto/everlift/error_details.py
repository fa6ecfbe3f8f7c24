"""Encoding of errors as google.rpc.Status, which any gRPC client library can read. Pure."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from everlift.errors import EverliftError, from_slug
from everlift.v1 import status_pb2 as pb

M = TypeVar("M", bound=Message)

_DOMAIN = "everlift"
_TYPE_URL = "type.googleapis.com/google.rpc."
#: Maximum size of a cause. gRPC rejects answers with more than 8 KiB of encoded metadata. The
#: metadata contains the cause once as percent-encoded text, with up to three bytes for each byte,
#: and up to twice in the details, whose base64 encoding takes four bytes for three.
_MAX_CAUSE_BYTES = 1024


def cause(error: EverliftError) -> str:
    """Return the message of ``error``, cut to the size that a gRPC status can hold.

    The message may be long, because it may quote what a client sent.
    """
    words = str(error).encode(errors="replace")
    if len(words) > _MAX_CAUSE_BYTES:
        ellipsis = "…".encode()
        words = words[: _MAX_CAUSE_BYTES - len(ellipsis)] + ellipsis
    return words.decode(errors="ignore")


def encode(error: EverliftError, code: int) -> bytes:
    """Return ``error`` as a serialised google.rpc.Status; ``code`` is the gRPC status number."""
    status = pb.Status(code=code, message=cause(error))
    status.details.append(_packed(pb.ErrorInfo(reason=error.slug, domain=_DOMAIN)))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.append(_packed(pb.RetryInfo(retry_delay=delay)))
    if error.field:
        violation = pb.BadRequest.FieldViolation(field=error.field, description=cause(error))
        status.details.append(_packed(pb.BadRequest(field_violations=[violation])))
    return status.SerializeToString()


def decode(data: bytes) -> EverliftError | None:
    """Return the error that ``data`` encodes, or None if it is malformed or not Everlift's."""
    try:
        status = pb.Status.FromString(data)
        info = _unpacked(status, pb.ErrorInfo)
        if info is None or info.domain != _DOMAIN:
            return None
        error = from_slug(info.reason, status.message)
        if (retry := _unpacked(status, pb.RetryInfo)) is not None:
            error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        if (bad := _unpacked(status, pb.BadRequest)) is not None and bad.field_violations:
            error.field = bad.field_violations[0].field
    except DecodeError:
        return None
    return error


def _packed(detail: Message) -> Any:
    return Any(type_url=_type_url(type(detail)), value=detail.SerializeToString())


def _unpacked(status: pb.Status, kind: type[M]) -> M | None:
    values = (detail.value for detail in status.details if detail.type_url == _type_url(kind))
    value = next(values, None)
    return None if value is None else kind.FromString(value)


def _type_url(kind: type[Message]) -> str:
    return f"{_TYPE_URL}{kind.DESCRIPTOR.name}"
