"""Rows of a step, stored as columns."""

from __future__ import annotations

import pytest

from worker.engine.plan import NO_ROWS, Row, Rows

DECODE = Row(slot=3, tokens=(7,), start=70, block_table=(4, 5, 6), samples=True)
DRAFTED = Row(slot=0, tokens=(8, 1, 2), start=31, block_table=(9, 2), samples=True, num_drafts=2)
CHUNK = Row(
    slot=1, tokens=(5, 6, 7), start=62, block_table=(4, 8, 1), samples=False, scores_prompt=True
)
ROWS = [DECODE, DRAFTED, CHUNK]


def test_rows_round_trip() -> None:
    rows = Rows.of(ROWS)
    assert [*rows] == ROWS
    assert (len(rows), rows.num_tokens) == (3, 7)
    assert rows == Rows.of(ROWS) != Rows.of(ROWS[:2])
    assert not NO_ROWS


def test_rows_token_columns_match_rows() -> None:
    rows = Rows.of(ROWS)
    assert rows.firsts.tolist() == [0, 1, 4]
    assert rows.positions.tolist() == [70, 31, 32, 33, 62, 63, 64]
    assert rows.blocks.tolist() == [6, 9, 2, 2, 8, 8, 1]
    assert rows.known_ends.tolist() == [71, 32, 65]
    assert [rows.drafts(i) for i in range(3)] == [(), (1, 2), ()]


def test_rows_table_is_trimmed_to_last_token() -> None:
    longer = Row(slot=3, tokens=(7,), start=70, block_table=(4, 5, 6, 1), samples=True)
    assert [*Rows.of([longer])] == [DECODE]


@pytest.mark.parametrize("cut", range(4))
def test_rows_then_concatenates(cut: int) -> None:
    tables = Rows.of(ROWS).tables
    first, rest = Rows.of(ROWS[:cut], tables), Rows.of(ROWS[cut:], tables)
    assert first.concat(rest) == Rows.of(ROWS)


def test_rows_decoding_builds_decode_rows() -> None:
    rows = Rows.of([DECODE])
    assert Rows.decoding(rows.slots, rows.starts, rows.tokens, rows.tables) == rows


def test_rows_count_attended_tokens_and_pairs() -> None:
    rows = Rows.of(ROWS)
    assert rows.kv_tokens == 71 + (31 + 3) + (62 + 3)
    assert rows.num_pairs == 71 + (32 + 33 + 34) + (63 + 64 + 65)
    decode = Rows.of([DECODE])
    assert decode.kv_tokens == decode.num_pairs == 71
    assert NO_ROWS.kv_tokens == NO_ROWS.num_pairs == 0
