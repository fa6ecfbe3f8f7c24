"""Pages of stored objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Literal, TypeVar

from typing_extensions import TypedDict

from everlift.errors import InvalidRequest

B = TypeVar("B")
#: Maximum number of objects on a page, and the default.
_MAX_PAGE, _PAGE = 100, 20


class ObjectPage(TypedDict, Generic[B]):
    """Page of objects, newest first unless the caller asked for another order."""

    object: Literal["list"]
    data: list[B]
    first_id: str | None
    last_id: str | None
    has_more: bool


def query_number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of the query; ``default`` if it is missing. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequest(f"{name} must be a whole number", field=name)
    return int(text)


def page_size(query: Mapping[str, str], most: int = _MAX_PAGE, default: int = _PAGE) -> int:
    """Return the number of objects that the query asks for; ``default`` if it names none.

    Raises InvalidRequest unless the parameter ``limit`` is a whole number from 1 to ``most``.
    """
    limit = query_number(query, "limit", default)
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit must be 1 to {most}", field="limit")
    return limit


def object_page(objects: Sequence[tuple[str, B]], *, has_more: bool) -> ObjectPage[B]:
    """Return a page with the bodies of ``objects``, which are pairs of an id and a body."""
    return {
        "object": "list",
        "data": [body for _, body in objects],
        "first_id": objects[0][0] if objects else None,
        "last_id": objects[-1][0] if objects else None,
        "has_more": has_more,
    }
