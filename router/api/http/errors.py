"""Errors in the format of OpenAI's API. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NotRequired

from typing_extensions import TypedDict

from everlift.error_details import cause
from everlift.errors import (
    AttemptsExhausted,
    DataLoss,
    DeadlineExceeded,
    EverliftError,
    LedgerUnavailable,
    Moved,
    NoWorker,
    RequestConflict,
    RouterStopping,
    Unreachable,
)

#: Errors that OpenAI's clients would retry because of their HTTP status, although a retry cannot
#: succeed, would probably fail again, or may make more workers fail.
_FINAL = RequestConflict | DataLoss | DeadlineExceeded | AttemptsExhausted | NoWorker
#: Errors that do not end the request. The client must reconnect to read the rest.
_RESUMABLE = RouterStopping | Moved | Unreachable | LedgerUnavailable
#: Statuses below 500 that OpenAI's clients retry.
_RETRIED = (408, 409, 429)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: ErrorDetail


class StreamedErrorDetail(ErrorDetail):
    """Error in a stream whose response headers were already sent.

    Such an error has no HTTP status and no headers of its own. ``retry_after`` is in seconds.
    ``resume`` has the headers with which the same POST continues the stream.
    """

    retry_after: float | None
    should_retry: bool
    resume: NotRequired[dict[str, str]]


class StreamedErrorBody(TypedDict):
    error: StreamedErrorDetail


def described(error: EverliftError, params: Mapping[str, str]) -> ErrorBody:
    """Return the body of an error response.

    ``params`` maps names of fields in everlift.messages to the client's names.
    """
    status = error.http_status
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {
        "error": {
            "message": cause(error),
            "type": kind,
            "param": params.get(error.field, error.field) or None,
            "code": error.slug,
        }
    }


def streamed(
    error: EverliftError, params: Mapping[str, str], resume: Mapping[str, str]
) -> StreamedErrorBody:
    """Return the body of the last event of a stream that failed with ``error``.

    ``params`` maps names of fields in everlift.messages to the client's names. ``resume`` has the
    headers with which the same POST continues the stream.
    """
    plain = described(error, params)["error"]
    detail: StreamedErrorDetail = {
        "message": plain["message"],
        "type": plain["type"],
        "param": plain["param"],
        "code": plain["code"],
        "retry_after": error.retry_after_s,
        "should_retry": _should_retry(error),
    }
    if isinstance(error, _RESUMABLE):
        named = ", ".join(f"{name}: {value}" for name, value in resume.items())
        detail["message"] += f"; to continue, POST the same body again with the headers {named}"
        detail["resume"] = dict(resume)
    return {"error": detail}


def _should_retry(error: EverliftError) -> bool:
    """Return whether OpenAI's clients retry after this error in an HTTP response.

    The clients decide by the status and the header x-should-retry.
    """
    status = error.http_status
    return (status in _RETRIED or status >= 500) and not isinstance(error, _FINAL)


def headers(error: EverliftError) -> dict[str, str]:
    """Return the headers of an error response."""
    found = {}
    if error.retry_after_s is not None:
        found["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.http_status == 401:
        found["www-authenticate"] = "Bearer"
    if isinstance(error, _FINAL):
        found["x-should-retry"] = "false"
    if isinstance(error, RouterStopping):
        # Behind a load balancer, only a new connection can reach another router.
        found["connection"] = "close"
    return found
