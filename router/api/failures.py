"""What clients are told of errors."""

from __future__ import annotations

from everlift import logs
from everlift.errors import EverliftError

log = logs.get(__name__)


def answerable(error: Exception) -> EverliftError:
    """What a client is told of an error that is being handled. An unforeseen one is logged, not
    shown."""
    if isinstance(error, EverliftError):
        return error
    log.exception("unforeseen error")
    return EverliftError("internal error; the router's log says more")
