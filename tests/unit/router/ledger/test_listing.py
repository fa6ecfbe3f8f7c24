"""Parts of several shards become one listing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger.base import MAX_PAGE_SIZE, Page, Position
from router.ledger.entry import Entry, State
from router.ledger.listing import Listing, Part, Row


def row(arrived: float, name: str = "r", *, is_wanted: bool = True) -> Row:
    entry = Entry(name, State.QUEUED, "g", arrived)
    return Row(Position(arrived, name), entry if is_wanted else None)


def arrivals(page: Page) -> list[float]:
    return [entry.arrived for entry in page.entries]


def test_listing_holds_rows_until_their_order_is_known() -> None:
    listing = Listing(10, None)
    listing.add([Part([row(9), row(7), row(6)], False), Part([row(8), row(3)], True)])
    assert arrivals(listing.page()) == [9, 8, 7, 6]
    assert not listing.is_over
    listing.add([Part([row(6), row(5)], True), Part([row(3)], True)])
    assert listing.page() == Page(tuple(row(at).entry for at in (9, 8, 7, 6, 5, 3)), None)  # type: ignore[misc]
    assert listing.is_over


def test_full_page_reports_start_of_next_page() -> None:
    listing = Listing(2, Position(9, "r"))
    listing.add([Part([row(9), row(8), row(7), row(6)], True)])
    assert (arrivals(listing.page()), listing.page().last) == ([8, 7], Position(7, "r"))


def test_full_page_is_last_if_nothing_remains() -> None:
    listing = Listing(2, None)
    listing.add([Part([row(8), row(7)], True)])
    assert listing.page().last is None


def test_listing_bounds_the_rows_it_examines() -> None:
    listing = Listing(5, None)
    rows = [row(-number, is_wanted=False) for number in range(MAX_PAGE_SIZE + 1)]
    listing.add([Part(rows, True)])
    assert listing.page() == Page((), Position(1.0 - MAX_PAGE_SIZE, "r"))


def test_listing_rejects_a_shard_without_progress() -> None:
    with pytest.raises(AssertionError, match="must return at least one"):
        Listing(5, Position(5, "r")).add([Part([row(5)], False)])


def paged(shards: list[list[Row]], limit: int, at_once: int) -> Iterator[Page]:
    """Yield the pages of a listing, as a ledger creates them."""
    last: Position | None = None
    while True:
        listing = Listing(limit, last)
        while not listing.is_over:
            listing.add([_part(rows, listing.last, at_once) for rows in shards])
        yield listing.page()
        if (last := listing.page().last) is None:
            return


def _part(rows: list[Row], last: Position | None, at_once: int) -> Part:
    left = [row for row in rows if last is None or row.position < last]
    return Part(left[:at_once], len(left) <= at_once)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), max_size=40),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_listing_returns_each_request_once_in_order(
    requests: list[tuple[int, int, bool]], limit: int, at_once: int
) -> None:
    rows = [
        (shard, row(at, f"r{number}", is_wanted=is_wanted))
        for number, (at, shard, is_wanted) in enumerate(requests)
    ]
    shards = [
        sorted((row for its, row in rows if its == shard), reverse=True, key=lambda it: it.position)
        for shard in range(3)
    ]
    pages = list(paged(shards, limit, at_once))
    found = [entry.request_id for page in pages for entry in page.entries]
    wanted = sorted((row.position for _, row in rows if row.entry), reverse=True)
    assert found == [position.request_id for position in wanted]
    assert all(len(page.entries) == limit for page in pages[:-1])
