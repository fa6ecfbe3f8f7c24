"""Errors as clients receive them."""

from __future__ import annotations

from everlift import logs
from everlift.errors import EverliftError

log = logs.get_logger(__name__)


def answerable(error: Exception) -> EverliftError:
    """Return the error to send for an exception. An unexpected one is logged, not shown."""
    if isinstance(error, EverliftError):
        return error
    log.exception("unforeseen error")
    return EverliftError("internal error; see the router's log")
