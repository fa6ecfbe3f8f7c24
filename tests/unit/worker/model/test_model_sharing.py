"""Shares of heads and features: complete, of equal sizes, and only KV heads are repeated."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from worker.model.sharing import HeadShare, Share, local_kv_heads, share_heads, tail_padded

COUNTS = st.integers(1, 12)


def shares(num_heads: int, num_kv_heads: int, ranks: int) -> list[HeadShare]:
    return [share_heads(num_heads, num_kv_heads, ranks, rank) for rank in range(ranks)]


def test_share_heads_pads_last_rank() -> None:
    assert shares(10, 5, 2) == [
        HeadShare(Share(0, 6, 6), Share(0, 3, 3)),
        HeadShare(Share(6, 10, 6), Share(3, 5, 3)),
    ]


def test_share_heads_splits_query_heads_of_shared_kv_head() -> None:
    assert shares(6, 2, 4) == [
        HeadShare(Share(0, 2, 2), Share(0, 1, 1)),
        HeadShare(Share(2, 3, 2), Share(0, 1, 1)),
        HeadShare(Share(3, 5, 2), Share(1, 2, 1)),
        HeadShare(Share(5, 6, 2), Share(1, 2, 1)),
    ]


def test_share_heads_spreads_kv_heads_unevenly() -> None:
    assert [share.kv.start for share in shares(9, 3, 4)] == [0, 0, 1, 2]
    assert {share.query.width for share in shares(9, 3, 4)} == {3}


@given(COUNTS, COUNTS, COUNTS)
def test_share_heads_gives_ranks_equal_sizes(group: int, num_kv_heads: int, ranks: int) -> None:
    every = shares(group * num_kv_heads, num_kv_heads, ranks)
    assert {share.kv.width for share in every} == {local_kv_heads(num_kv_heads, ranks)}
    (width,) = {share.query.width for share in every}
    assert width % local_kv_heads(num_kv_heads, ranks) == 0


@given(COUNTS, COUNTS, COUNTS)
def test_share_heads_holds_query_heads_once_with_kv_head(
    group: int, num_kv_heads: int, ranks: int
) -> None:
    held: Counter[int] = Counter()
    for share in shares(group * num_kv_heads, num_kv_heads, ranks):
        query, kv = share.query, share.kv
        assert query.num_items <= query.width
        assert kv.num_items <= kv.width
        for place, head in enumerate(range(query.start, query.stop)):
            held[head] += 1
            assert kv.start + place // (query.width // kv.width) == head // group
    assert held == Counter(range(group * num_kv_heads))


@given(COUNTS, COUNTS)
def test_tail_padded_covers_features_once_in_order(size: int, parts: int) -> None:
    every = [tail_padded(size, parts, part) for part in range(parts)]
    assert [i for share in every for i in range(share.start, share.stop)] == [*range(size)]
    assert {share.width for share in every} == {-(-size // parts)}


def test_share_scales_and_moves() -> None:
    assert Share(2, 3, 2).of(10).moved(100) == Share(120, 130, 20)
