"""Conversion of the ledger's values to bytes and back."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from router.ledger.entry import Append, Appended, Entry, Event, State, Stored, StoredChoice, Tally
from router.ledger.redis import codec
from tests.support.ledger.ledgers import make_request, scored

FLOATS = st.floats(max_value=0.0, width=32)
IDS = st.integers(0, 2**32 - 1)
NUM_TOP = 3
RECORDS = st.lists(
    st.builds(
        TokenLogprobs,
        FLOATS,
        IDS,
        st.lists(st.tuples(IDS, FLOATS), min_size=NUM_TOP, max_size=NUM_TOP).map(tuple),
    ),
    max_size=5,
).map(tuple)


@given(RECORDS)
def test_logprobs_round_trip_through_the_codec(logprobs: tuple[TokenLogprobs, ...]) -> None:
    data = codec.pack_logprobs(logprobs)
    assert codec.unpack_logprobs(data, NUM_TOP) == logprobs
    # Records have one size, so that the bytes can be cut at any token.
    assert len(data) == len(logprobs) * (8 + 8 * NUM_TOP)


def test_logprob_record_is_little_endian() -> None:
    [it] = scored(-0.5, num_top=1)
    assert codec.pack_logprobs([it]) == struct.pack("<fIIf", -0.5, 1, 2**32 - 1, -0.5)


def test_logprob_records_of_mixed_sizes_are_rejected() -> None:
    with pytest.raises(struct.error):
        codec.pack_logprobs([*scored(-1.0, num_top=1), *scored(-1.0, num_top=2)])


def fields_of(*items: Append) -> list[Any]:
    return list(msgpack.unpackb(codec.appends(items), raw=True))


def test_append_of_tokens_alone_has_five_fields() -> None:
    """Epochs are text, because Lua's numbers have too few digits."""
    one = [b"r", b"18446744073709551615", 3, b"\x01\0\0\0\x02\0\0\0", b""]
    append = Append("r", 2**64 - 1, 3, (1, 2))
    assert fields_of(append) == one
    assert fields_of(append, append) == [*one, *one]


def test_append_answers_list_failures_by_index() -> None:
    answers = codec.appended([2, b"fenced", 3, b"finished"], 4)
    assert answers == [Appended.OK, Appended.FENCED, Appended.FINISHED, Appended.OK]


@pytest.mark.parametrize(
    "more",
    [
        {"choice": 1},
        {"finish_reason": FinishReason.STOP},
        {"logprobs": scored(-1.0)},
        {"prompt_logprobs": scored(-1.0)},
        {"tally": Tally()},
        {"request": make_request()},
    ],
)
def test_append_with_optional_data_has_twelve_fields(more: dict[str, object]) -> None:
    fields = fields_of(Append("r", 7, 3, (1,), **more))  # type: ignore[arg-type]
    assert (len(fields), fields[4]) == (12, b"more")


@pytest.mark.parametrize(
    ("tally", "expected"), [(None, b""), (Tally(3, 2, 2**40, 5, 6), b"3 2 1099511627776 5 6")]
)
def test_append_fields_hold_the_tally_as_text(tally: Tally | None, expected: bytes) -> None:
    assert fields_of(Append("r", 7, 3, (1,), choice=1, tally=tally))[9] == expected


def test_timestamps_are_encoded_in_microseconds() -> None:
    for moment in (1.000001, 1790000000.123457, 1790000000.999999):
        request = replace(make_request(), deadline=moment)
        entry = Entry("r", State.QUEUED, "gateway", arrived=moment, moves=1)
        fields = codec.reassert_arguments(Stored(entry, request, (StoredChoice(),), 0.0), 1, 2)
        assert fields.count(round(moment * 1e6)) == 2


def test_event_cause_may_be_any_text() -> None:
    text = "1790000000123457 release its worker said: ä b".encode()
    assert codec.event(text) == Event(1790000000.123457, "release", "its worker said: ä b")
    assert codec.event(b"0 finish ") == Event(0.0, "finish", "")


def test_finish_reasons_have_distinct_letters() -> None:
    letters = {fields_of(Append("r", 7, 3, (), finish_reason=reason))[6] for reason in FinishReason}
    assert len(letters) == len(FinishReason)
    assert b"-" not in letters


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, False), ({"logprobs": 0}, True), ({"prompt_logprobs": 0}, True)],
)
def test_logprob_keys_exist_only_if_requested(options: dict[str, int], expected: bool) -> None:
    assert codec.has_logprobs(make_request(**options)) is expected  # type: ignore[arg-type]
