"""Waits of a sequence for its next mask, and requests to its grammar process until then."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from everlift.errors import EngineFailed
from worker.grammar.matcher import Matcher


class GrammarProcess:
    """Channel whose replies arrive when the test says so."""

    def __init__(self) -> None:
        self.is_busy = False
        self.is_lost = False
        self.num_expected = 0
        self.sent: list[str] = []
        self.replies: deque[bytes] = deque()

    def expect(self, matcher: int) -> None:
        self.num_expected += 1

    def send(self, request: Any) -> None:
        if self.is_lost:
            raise EngineFailed("gone")
        self.sent.append(request["do"])

    def take_reply(self, matcher: int, waiting_since: float) -> bytes:
        if self.is_lost:
            raise EngineFailed("gone")
        return self.replies.popleft()

    def has_reply(self, matcher: int) -> bool:
        return bool(self.replies)

    def drop_matcher(self, matcher: int) -> None:
        pass


MASK = bytes(8)


def matcher_of(process: GrammarProcess) -> Matcher:
    return Matcher(process, 1, frozenset(), ())  # type: ignore[arg-type]


def mask_of(matcher: Matcher, *drafts: int) -> int:
    return matcher.mask(
        drafts, torch.empty(1 + len(drafts), 2, dtype=torch.int32), waiting_since=0.0
    )


def test_drawn_sequence_is_not_ready_while_processes_are_busy() -> None:
    process = GrammarProcess()
    this = matcher_of(process)
    process.is_busy = True
    assert not this.is_ready()
    process.replies.append(MASK)
    assert this.is_ready()
    mask_of(this)
    assert not this.is_ready(), "the next step would wait for what nobody has asked for yet"
    this.accept([3])
    assert not this.is_ready()
    process.replies.append(MASK)
    assert this.is_ready()


def test_matcher_is_ready_while_processes_are_idle() -> None:
    process = GrammarProcess()
    this = matcher_of(process)
    process.replies.append(MASK)
    mask_of(this)
    assert this.is_ready()
    this.accept([3])
    assert this.is_ready()


def test_matcher_expects_next_mask_once_token_is_drawn() -> None:
    process = GrammarProcess()
    this = matcher_of(process)
    assert process.num_expected == 1
    process.replies.extend([MASK, MASK])
    mask_of(this, 5)
    assert (process.num_expected, process.sent) == (3, ["open", "drafts"])
    mask_of(this)
    this.accept([3])
    assert (process.num_expected, process.sent) == (3, ["open", "drafts", "accept"])


def test_matcher_skips_draft_masks_while_processes_are_busy() -> None:
    process = GrammarProcess()
    this = matcher_of(process)
    process.replies.append(MASK)
    process.is_busy = True
    assert mask_of(this, 5, 6) == 0
    assert process.sent == ["open"]


def test_matcher_reports_a_lost_process_in_the_next_mask() -> None:
    process = GrammarProcess()
    this = matcher_of(process)
    process.replies.append(MASK)
    mask_of(this)
    process.is_lost = True
    this.accept([3])
    with pytest.raises(EngineFailed, match="gone"):
        mask_of(this)
