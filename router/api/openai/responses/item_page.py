"""Pages of items, as the query of a call selects them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everlift.errors import InvalidRequest
from router.api.openai.object_page import ObjectPage, object_page, page_size
from router.api.openai.responses.items import Item


def item_page(items: Sequence[Item], query: Mapping[str, str]) -> ObjectPage[Item]:
    """Return the page of ``items``, given oldest first, that the parameters of ``query`` select.

    The page is newest first unless ``order`` is asc. Raises InvalidRequest if ``after`` is the id
    of no item, or for an invalid ``limit``.
    """
    items = list(items)
    if query.get("order", "desc") != "asc":
        items.reverse()
    if after := query.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest(f"after: there is no item {after[:64]}", field="after")
        items = items[ids.index(after) + 1 :]
    limit = page_size(query)
    return whole_page(items[:limit], has_more=len(items) > limit)


def whole_page(items: Sequence[Item], *, has_more: bool = False) -> ObjectPage[Item]:
    """Return a page with all of ``items``."""
    return object_page([(item["id"], item) for item in items], has_more=has_more)
