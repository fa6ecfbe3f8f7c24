"""Where the next page of a listing begins, as a client carries it from one call to the next. Pure.

It says behind which request of the caller's listing, and nothing of whose listing that is: who
makes one up begins elsewhere in the same one.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

from everlift.errors import InvalidRequest
from everlift.request_id import check_qualified
from router.ledger.base import Position

#: More than a moment can have, in microseconds.
_MOST_US = 1 << 53


def write(position: Position) -> str:
    text = f"{round(position.arrived * 1e6)} {position.request_id}"
    return urlsafe_b64encode(text.encode()).decode()


def read(token: str) -> Position:
    """Raises InvalidRequest for what nobody has written."""
    try:
        arrived, _, request_id = urlsafe_b64decode(token.encode()).decode("ascii").partition(" ")
        microseconds = int(arrived)
        if not 0 <= microseconds < _MOST_US:
            raise ValueError
        return Position(microseconds / 1e6, check_qualified(request_id))
    except (ValueError, binascii.Error, InvalidRequest):
        raise InvalidRequest("page_token is none that a page ended with") from None
