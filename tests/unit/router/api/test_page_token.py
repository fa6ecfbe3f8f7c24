"""Page tokens: round trips, and rejection of all other texts."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest

from everlift.errors import InvalidRequest
from router.api import service
from router.ledger.base import Position


@pytest.mark.parametrize("request_id", ["r", "acme/r", "a" * 128])
@pytest.mark.parametrize("arrived", [0.0, 1795356845.956299, 9e9])
def test_page_token_round_trips(request_id: str, arrived: float) -> None:
    position = Position(arrived, request_id)
    assert service.parse_page_token(service.page_token(position)) == position


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "r",
        "5 ",
        " r",
        "x r",
        "-1 r",
        "1e9 r",
        f"{2**53} r",
        "5 a b",
        "5 A/r",
        "5 ä",
        "5 a/b/c",
    ],
)
def test_page_token_without_a_position_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token"):
        service.parse_page_token(urlsafe_b64encode(text.encode()).decode())


@pytest.mark.parametrize("token", ["!", "ä", "abcde", "\x00", "=" * 4])
def test_malformed_page_token_is_rejected(token: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token"):
        service.parse_page_token(token)
