"""Conversion of exceptions into the errors that clients receive."""

from __future__ import annotations

from everlift import logs
from everlift.errors import EverliftError

log = logs.get_logger(__name__)


def answerable(error: Exception) -> EverliftError:
    """Return the error to send to the client for ``error``.

    An EverliftError is returned as it is. Any other exception is logged and replaced by a plain
    EverliftError, so that its details do not reach the client.
    """
    if isinstance(error, EverliftError):
        return error
    log.exception("unexpected error while answering a client")
    return EverliftError("internal error; see the router's log")
