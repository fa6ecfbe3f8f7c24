"""Incremental text and stop strings, with a tokenizer of one token a byte."""

from collections.abc import Sequence

import pytest

from everlift.text import StopMatcher, TextState

SPECIAL = 256


class Bytes:
    """Token i is byte i; ids from 256 on are special."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < SPECIAL).decode(errors="replace")

    def is_text(self, token_id: int) -> bool:
        return token_id < SPECIAL


def pieces(data: bytes, *stop: str) -> list[str]:
    state = TextState(Bytes(), stop)
    return [*(state.push(byte) for byte in data), state.finish()]


def test_text_comes_with_the_token_that_completes_it() -> None:
    assert pieces(b"ab") == ["a", "b", ""]


def test_half_a_character_is_held_back() -> None:
    assert pieces("aé你🙂b".encode()) == ["a", "", "é", "", "", "你", "", "", "", "🙂", "b", ""]


def test_a_character_that_is_never_completed_comes_at_the_end_as_decode_gives_it() -> None:
    assert pieces(b"a\xf0\x9f\x99") == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_broken_character_comes_with_the_next_whole_one() -> None:
    assert pieces(b"a\xf0\x9fb") == ["a", "", "", "\N{REPLACEMENT CHARACTER}b", ""]


def test_endless_broken_bytes_come_out_at_once_but_for_three() -> None:
    assert "".join(pieces(b"\xff" * 100)[:-1]) == "\N{REPLACEMENT CHARACTER}" * 97


def test_special_tokens_leave_no_text_and_cut_no_character() -> None:
    state = TextState(Bytes())
    half, rest = "é".encode()
    assert [state.push(i) for i in (SPECIAL, half, SPECIAL, rest, SPECIAL)] == ["", "", "", "é", ""]


class Counting(Bytes):
    longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)


@pytest.mark.parametrize(
    "data",
    [b"a" * 500, "🙂".encode() * 200, b"\xff" * 500, b"\xe4\xbd" * 300, b"\xf0\x9f\x99" * 200],
)
def test_what_is_decoded_again_stays_short_whatever_the_tokens_are(data: bytes) -> None:
    tokenizer = Counting()
    state = TextState(tokenizer)
    text = "".join(state.push(byte) + state.push(SPECIAL) for byte in data)
    assert text + state.finish() == data.decode(errors="replace")
    assert tokenizer.longest <= 16


def test_tokens_without_text_do_not_hide_that_others_came_before() -> None:
    class Stripping(Bytes):
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode([i for i in ids if i]).removeprefix(" ")

    state = TextState(Stripping())
    ids = [ord("a"), *[0] * 40, ord(" "), ord("b")]
    assert "".join(state.push(i) for i in ids) == "a b"


def test_text_ends_before_the_stop_string() -> None:
    state = TextState(Bytes(), ("END",))
    assert [state.push(byte) for byte in b"a EN"] == ["a", " ", "", ""]
    assert not state.stopped
    assert state.push(ord("D")) == ""
    assert state.stopped
    assert state.finish() == ""


def test_what_only_began_like_a_stop_string_comes_out() -> None:
    assert pieces(b"ENE", "END") == ["", "", "EN", "E"]


def fed(text: str, *stops: str) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(char) for char in text)
    return out + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ("cd",), ("ab", True)),
        ("abcd", (), ("abcd", False)),
        ("aab", ("ab",), ("a", True)),
        ("abac", ("abad", "ac"), ("ab", True)),
        ("abcd", ("abc", "ab"), ("", True)),
        ("xabc", ("bc", "abc"), ("x", True)),
        ("abcd", ("abcd", "bc"), ("a", True)),
        ("abcx", ("abcd", "bcx"), ("a", True)),
        ("ababab", ("ababac",), ("ababab", False)),
        ("a", ("ab",), ("a", False)),
        ("aXbX", ("X",), ("a", True)),
    ],
)
def test_the_first_completed_stop_string_wins(
    text: str, stops: tuple[str, ...], expected: tuple[str, bool]
) -> None:
    assert fed(text, *stops) == expected


def test_a_stop_string_inside_one_piece_is_found() -> None:
    matcher = StopMatcher(["b", "abcde"])
    assert matcher.feed("aab c") == "aa"
    assert matcher.matched


def test_nothing_comes_after_the_stop_string() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.feed("ab"), matcher.feed("c"), matcher.finish()] == ["a", "", ""]
