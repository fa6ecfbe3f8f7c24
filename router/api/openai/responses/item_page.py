"""Pages of items, as the query of a call selects them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everlift.errors import InvalidRequest
from router.api.openai.responses.answer import ItemPage
from router.api.openai.responses.items import Item

#: Maximum number of items on a page, as in OpenAI's API, and the default.
_MAX_PAGE, _PAGE = 100, 20


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> ItemPage:
    """Return the page of ``items``, oldest first, that the parameters of ``query`` select.

    Raises InvalidRequest for an unknown item or an invalid limit.
    """
    items = list(items)
    if query.get("order", "desc") != "asc":
        items.reverse()
    if after := query.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest(f"after: there is no item {after[:64]}", field="after")
        items = items[ids.index(after) + 1 :]
    limit = query_number(query, "limit", _PAGE)
    if not 1 <= limit <= _MAX_PAGE:
        raise InvalidRequest(f"limit must be 1 to {_MAX_PAGE}", field="limit")
    return whole_page(items[:limit], has_more=len(items) > limit)


def whole_page(items: Sequence[Item], *, has_more: bool = False) -> ItemPage:
    """Return a page with all of ``items``."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def query_number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of the query; ``default`` if it is missing. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequest(f"{name} must be a whole number", field=name)
    return int(text)
