"""Headers that clients and proxies send beside a request. Pure.

Into its message go

    idempotency-key                      request_id
    x-slo-ttft-ms                        ttft_target_ms
    x-session-id                         session_id
    x-gateway-inference-fairness-id      fairness_id
    x-application                        application
    x-explain                            explain, where it is 1 or true

What the message says itself holds. The three before the last two are names that the Gateway API
Inference Extension and the routers around it use. ``x-request-id`` is for logs and traces alone: a
mesh gives several calls the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from everlift.errors import InvalidRequest, OutOfRange
from everlift.messages import MAX_LABEL_BYTES, check_field
from everlift.request_id import is_request_id
from everlift.v1 import inference_pb2 as pb

IDEMPOTENCY_KEY = "idempotency-key"
X_REQUEST_ID = "x-request-id"
_TTFT_TARGET = "x-slo-ttft-ms"
_SESSION_ID = "x-session-id"
_FAIRNESS_ID = "x-gateway-inference-fairness-id"
_APPLICATION = "x-application"
_EXPLAIN = "x-explain"
_PRINTABLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_LABEL_BYTES}}}")


def apply(
    message: pb.GenerateRequest, headers: Mapping[str, str], place: int | None = None
) -> None:
    """Names of ``headers`` are in small letters. ``place`` is of the request among several of one
    call, each of which is named after the call's name then. Raises InvalidRequest, OutOfRange with
    the header's name."""
    message.request_id = message.request_id or _request_id(headers, place)
    message.session_id = message.session_id or _label(headers, _SESSION_ID)
    message.fairness_id = message.fairness_id or _label(headers, _FAIRNESS_ID)
    message.application = message.application or _label(headers, _APPLICATION)
    message.explain = message.explain or headers.get(_EXPLAIN, "").lower() in ("1", "true")
    if _TTFT_TARGET in headers and not message.HasField("ttft_target_ms"):
        message.ttft_target_ms = _milliseconds(headers, _TTFT_TARGET)


def x_request_id(headers: Mapping[str, str]) -> str:
    """Empty where there is none, or none that a log line can have: proxies make it, and not for
    us."""
    value = headers.get(X_REQUEST_ID, "")
    return value if _PRINTABLE.fullmatch(value) else ""


def _request_id(headers: Mapping[str, str], place: int | None) -> str:
    """Empty where the headers name none."""
    if IDEMPOTENCY_KEY not in headers:
        return ""
    # The IETF's draft has the key in quotation marks, most clients have it without.
    request_id = headers[IDEMPOTENCY_KEY].strip('"') + ("" if place is None else f":{place}")
    if not is_request_id(request_id):
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
            field=IDEMPOTENCY_KEY,
        )
    return request_id


def _label(headers: Mapping[str, str], name: str) -> str:
    label = headers.get(name, "")
    if len(label.encode()) > MAX_LABEL_BYTES:
        raise OutOfRange(f"{name} is longer than {MAX_LABEL_BYTES} bytes", field=name)
    return label


def _milliseconds(headers: Mapping[str, str], name: str) -> int:
    try:
        value = float(headers[name])
    except ValueError:
        raise InvalidRequest(f"{name} must be a number of milliseconds", field=name) from None
    check_field("timeout_ms", value, name)
    return round(value)
