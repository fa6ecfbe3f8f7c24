"""Draft tokens from an earlier occurrence of the last tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.config import Speculation
from worker.engine.speculation import Drafter, NgramIndex, continued


def index(tokens: list[int], min_match: int = 1, max_match: int = 3) -> NgramIndex:
    this = NgramIndex(min_match, max_match)
    this.extend(tokens, len(tokens))
    return this


def test_ngram_index_prefers_longest_then_latest_match() -> None:
    assert index([1, 2, 9, 1, 2, 8, 7, 2, 6, 1, 2]).follower() == 5
    assert index([1, 2, 9, 1, 2, 8, 7, 2, 6, 2]).follower() == 8


def test_ngram_index_needs_earlier_occurrence() -> None:
    assert index([]).follower() is None
    assert index([1]).follower() is None
    assert index([1, 2, 3]).follower() is None
    assert index([1, 2, 3, 2], min_match=2).follower() is None


def test_ngram_index_treats_zero_as_ordinary_token() -> None:
    assert index([0, 5, 0, 0, 7, 5, 0]).follower() == 3
    assert index([5, 7, 0, 5], min_match=2).follower() is None


def test_ngram_draft_continues_repetition() -> None:
    tokens = [7, 1, 2, 1, 2]
    follower = index(tokens).follower()
    assert follower == 3
    assert continued(tokens, 3, 5) == (1, 2, 1, 2, 1)


def brute_force(tokens: list[int], min_match: int, max_match: int) -> int | None:
    for n in range(max_match, min_match - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]:
                return end
    return None


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 3), st.integers(0, 2))
def test_ngram_index_matches_brute_force_search(
    tokens: list[int], min_match: int, more: int
) -> None:
    this = NgramIndex(min_match, min_match + more)
    for length in range(len(tokens) + 1):
        this.extend(tokens[:length], 1)
        assert this.follower() == brute_force(tokens[:length], min_match, min_match + more)


def test_drafter_proposes_nothing_before_prompt_is_read() -> None:
    drafter = Drafter(Speculation(num_draft_tokens=2))
    prompt = [1, 2, 3, *range(10, 20), 1, 2]
    drafts = [(drafter.read(prompt, 7), drafter.propose(prompt, 2)) for _ in range(3)]
    assert drafts == [(7, ()), (7, ()), (1, (3, 10))]


def learned(*pieces: tuple[int, int], limit: int = 8) -> Drafter:
    """Return a drafter that has learned the numbers (drafted, accepted) of ``pieces``."""
    this = Drafter(Speculation(num_draft_tokens=limit))
    for drafted, accepted in pieces:
        this.learn(drafted, accepted)
    return this


def proposed(this: Drafter, most: int = 100) -> int:
    this.read([1, 2, 3, 1, 2], most=5)
    return len(this.propose([1, 2, 3, 1, 2], most))


def test_drafter_starts_at_the_limit_and_respects_room() -> None:
    assert proposed(learned()) == 8
    assert proposed(learned(), most=3) == 3


def test_draft_length_adapts_to_acceptance() -> None:
    assert proposed(learned((8, 0))) == 4
    assert proposed(learned((8, 2))) == 3
    assert proposed(learned((8, 2), (3, 3))) == 6
    assert proposed(learned((8, 2), (3, 3), (6, 6))) == 8
    assert proposed(learned((8, 0), (4, 0))) == 2


def test_drafter_pauses_grow_with_rejected_drafts() -> None:
    this = learned()
    lengths = []
    for _ in range(30):
        lengths.append(proposed(this))
        if lengths[-1]:
            this.learn(lengths[-1], 0)
    assert lengths[:6] == [8, 4, 2, 0, 0, 1]
    drafted = [at for at, length in enumerate(lengths) if length]
    assert drafted == [0, 1, 2, 5, 10, 19]


def test_accepted_draft_ends_drafter_pauses() -> None:
    this = learned(*[(1, 0)] * 9)
    while not proposed(this):
        pass
    this.learn(1, 1)
    assert proposed(this) == 2
    this.learn(2, 0)
    assert proposed(this) == 1


def test_drafter_pauses_are_bounded() -> None:
    this = learned(*[(1, 0)] * 5000)
    assert [proposed(this) for _ in range(65)] == [0] * 64 + [1]
