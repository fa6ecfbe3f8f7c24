"""When a sequence's next mask can be waited for, and what its keeper has to do until then."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from everlift.errors import EngineFailed
from worker.grammar.matcher import Matcher


class Keeper:
    """A Channel whose replies come when the test says so."""

    def __init__(self) -> None:
        self.is_busy = False
        self.is_lost = False
        self.num_expected = 0
        self.told: list[str] = []
        self.replies: deque[bytes] = deque()

    def expect(self, matcher: int) -> None:
        self.num_expected += 1

    def tell(self, request: Any) -> None:
        if self.is_lost:
            raise EngineFailed("gone")
        self.told.append(request["do"])

    def take(self, matcher: int, began: float) -> bytes:
        if self.is_lost:
            raise EngineFailed("gone")
        return self.replies.popleft()

    def has_reply(self, matcher: int) -> bool:
        return bool(self.replies)

    def forget(self, matcher: int) -> None:
        pass


MASK = bytes(8)


def matcher_of(keeper: Keeper) -> Matcher:
    return Matcher(keeper, 1, frozenset(), ())  # type: ignore[arg-type]


def mask_of(matcher: Matcher, *drafts: int) -> int:
    return matcher.mask(drafts, torch.empty(1 + len(drafts), 2, dtype=torch.int32), began=0.0)


def test_while_the_keepers_are_busy_who_is_being_drawn_is_not_ready() -> None:
    keeper = Keeper()
    this = matcher_of(keeper)
    keeper.is_busy = True
    assert not this.is_ready()
    keeper.replies.append(MASK)
    assert this.is_ready()
    mask_of(this)
    assert not this.is_ready(), "the next step would wait for what nobody has asked for yet"
    this.accept([3])
    assert not this.is_ready()
    keeper.replies.append(MASK)
    assert this.is_ready()


def test_what_a_step_can_wait_for_is_ready() -> None:
    keeper = Keeper()
    this = matcher_of(keeper)
    keeper.replies.append(MASK)
    mask_of(this)
    assert this.is_ready()
    this.accept([3])
    assert this.is_ready()


def test_the_next_mask_is_something_to_do_as_soon_as_a_token_is_drawn() -> None:
    keeper = Keeper()
    this = matcher_of(keeper)
    assert keeper.num_expected == 1
    keeper.replies.extend([MASK, MASK])
    mask_of(this, 5)
    assert (keeper.num_expected, keeper.told) == (3, ["open", "drafts"])
    mask_of(this)
    this.accept([3])
    assert (keeper.num_expected, keeper.told) == (3, ["open", "drafts", "accept"])


def test_while_the_keepers_are_busy_no_step_waits_for_the_masks_of_drafts() -> None:
    keeper = Keeper()
    this = matcher_of(keeper)
    keeper.replies.append(MASK)
    keeper.is_busy = True
    assert mask_of(this, 5, 6) == 0
    assert keeper.told == ["open"]


def test_a_keeper_that_is_gone_when_a_token_was_drawn_shows_in_the_next_mask() -> None:
    keeper = Keeper()
    this = matcher_of(keeper)
    keeper.replies.append(MASK)
    mask_of(this)
    keeper.is_lost = True
    this.accept([3])
    with pytest.raises(EngineFailed, match="gone"):
        mask_of(this)
