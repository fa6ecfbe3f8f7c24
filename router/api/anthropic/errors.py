"""Errors in the format of Anthropic's API. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from everlift.error_details import cause
from everlift.errors import EverliftError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(TypedDict):
    """Error in Anthropic's form, with Everlift's slug as the additional member ``code``."""

    type: str
    message: str
    code: str


class AnthropicErrorBody(TypedDict):
    type: str
    error: AnthropicErrorDetail
    request_id: str | None


def described(
    error: EverliftError, params: Mapping[str, str], request_id: str | None = None
) -> AnthropicErrorBody:
    """Return the body of an error response or of an ``error`` event.

    ``params`` maps names of fields in everlift.messages to the client's names.
    """
    status = error.http_status
    kind = "api_error" if status >= 500 else "invalid_request_error"
    field = params.get(error.field, error.field)
    message = cause(error)
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, kind),
            "message": f"{field}: {message}" if field and field not in message else message,
            "code": error.slug,
        },
        "request_id": request_id,
    }
