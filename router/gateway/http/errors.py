"""Errors in the form that OpenAI's clients know. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from typing_extensions import TypedDict

from everlift.error_details import cause
from everlift.errors import (
    AttemptsExhausted,
    DataLoss,
    DeadlineExceeded,
    EverliftError,
    NoWorker,
    RequestConflict,
)

#: OpenAI's clients take these for something that passes, and would ask again twice: for as long as
#: the first time, or for the next workers that a request ends.
_FINAL = RequestConflict | DataLoss | DeadlineExceeded | AttemptsExhausted | NoWorker
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: ErrorDetail


def described(error: EverliftError, params: Mapping[str, str]) -> ErrorBody:
    """``params`` are the names that a client has for fields, where these are others."""
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


def headers(error: EverliftError) -> dict[str, str]:
    """What a client is told beside it."""
    told = {}
    if error.retry_after_s is not None:
        told["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.http_status == 401:
        told["www-authenticate"] = "Bearer"
    if isinstance(error, _FINAL):
        told["x-should-retry"] = "false"
    return told
