"""A body is a JSON object, or is refused with a cause, whatever its bytes are."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import EverliftError, InvalidRequest, MalformedBody, NotUtf8
from router.api.http import body

BAD: dict[str, tuple[bytes, type[InvalidRequest]]] = {
    "nothing": (b"", MalformedBody),
    "no JSON": (b"{prompt: 1}", MalformedBody),
    "cut off": (b'{"prompt": "a', MalformedBody),
    "two": (b"{}{}", MalformedBody),
    "an array": (b"[]", MalformedBody),
    "a text": (b'"prompt"', MalformedBody),
    "null": (b"null", MalformedBody),
    "not a number": (b'{"temperature": NaN}', MalformedBody),
    "infinite": (b'{"temperature": -Infinity}', MalformedBody),
    "infinite in effect": (b'{"temperature": 1e999}', MalformedBody),
    "huge integer": (b'{"n": ' + b"9" * 100_000 + b"}", MalformedBody),
    "no UTF-8": (b'{"prompt": "\xff"}', NotUtf8),
    "half a surrogate pair": (b'{"prompt": "\\ud83d"}', NotUtf8),
    "half a surrogate pair in upper case": (b'{"prompt": "\\uD83D"}', NotUtf8),
    "half a surrogate pair as a key": (b'{"\\ud83d": 1}', NotUtf8),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), NotUtf8),
    "a byte order mark": (b"\xef\xbb\xbf{}", MalformedBody),
    "deep": (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", MalformedBody),
    "deeper than Python's stack": (b'{"a":' + b"[" * 2_000_000, MalformedBody),
}


@pytest.mark.parametrize("name", BAD)
def test_body_that_is_not_a_json_object_is_refused(name: str) -> None:
    data, error = BAD[name]
    with pytest.raises(error):
        body.parse(data)


def test_body_error_has_line_and_column() -> None:
    with pytest.raises(MalformedBody, match="at line 2, column 12"):
        body.parse(b'{"model": "a",\n "prompt": b}')


def test_body_nesting_depth_is_limited() -> None:
    depth = body.MAX_DEPTH - 1
    body.parse(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(MalformedBody, match="nested more than 128"):
        body.parse(b'{"a":' + b"[" * (depth + 1) + b"]" * (depth + 1) + b"}")


def test_body_surrogate_pair_is_one_character() -> None:
    assert body.parse(b'{"prompt": "\\ud83d\\ude80"}') == {"prompt": "\N{ROCKET}"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**19), 10**19)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=3), st.booleans())
def test_body_reads_any_json_object(value: dict[str, object], ascii: bool) -> None:
    assert body.parse(json.dumps(value, ensure_ascii=ascii).encode()) == value


def what_it_is(number: str) -> int | float | None:
    """Return the value of a number, or None if it must be refused."""
    if number.lstrip("-").isdigit():
        return int(number) if len(number.lstrip("-")) <= 20 else None
    return float(number) if math.isfinite(float(number)) else None


@pytest.mark.parametrize(
    "number",
    [
        *("9" * 20, "-" + "9" * 20, "9" * 21, "-" + "9" * 21, "9" * 5000),
        *("1e308", "1e309", "-1E309", "1e+309", "1e-309", "1e0309", "0.1e310", "2e9999"),
        *("9" * 209 + "e99", "9" * 210 + "e99", "9" * 400 + ".5", "0." + "1" * 400),
    ],
)
def test_body_odd_number_is_kept_or_rejected(number: str) -> None:
    check(number)


@given(st.from_regex(r"\A-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,4})?\Z"))
def test_body_number_is_kept_or_rejected(number: str) -> None:
    check(number)


def check(number: str) -> None:
    data = b'{"a": [7, 0.5, %s]}' % number.encode()
    if (expected := what_it_is(number)) is not None:
        assert body.parse(data) == {"a": [7, 0.5, expected]}
        return
    with pytest.raises(MalformedBody, match="a number"):
        body.parse(data)


def test_body_of_plain_numbers_skips_per_number_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    for name in ("_int", "_float"):
        plain = getattr(body, name)
        monkeypatch.setattr(body, name, lambda text, plain=plain: (seen.append(text), plain(text)))
    monkeypatch.setattr(body, "_check_depth", lambda _: pytest.fail("there are few brackets"))
    numbers = [1, -(10**19), 0.5, 1e99, 1.25e-99] * 1000
    assert body.parse(json.dumps({"a": numbers}).encode()) == {"a": numbers}
    assert not seen
    body.parse(b'{"a": [1, 1e100]}')
    assert seen == ["1", "1e100"]


@given(st.binary() | st.text().map(str.encode))
def test_body_of_any_bytes_is_parsed_or_a_client_error(data: bytes) -> None:
    try:
        body.parse(data)
    except EverliftError as error:
        assert 400 <= error.http_status < 500
