"""Incremental text and stop strings, with a tokenizer of one token a byte."""

import gc
from typing import Any

import pytest

from everlift.text import StopAutomaton, StopMatcher, Stops, TextState

SPECIAL = 256


class Bytes:
    """Token i is byte i; ids from 256 on are special."""

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return bytes([token_id]) if token_id < SPECIAL else None


def pieces(data: bytes, *stop: str, **stops: Any) -> list[str]:
    state = TextState(Bytes(), Stops(stop, **stops))
    return [*(state.push(byte) for byte in data), state.finish()]


def test_detokenizer_emits_text_with_completing_token() -> None:
    assert pieces(b"ab") == ["a", "b", ""]


def test_detokenizer_holds_back_incomplete_character() -> None:
    assert pieces("aé你🙂b".encode()) == ["a", "", "é", "", "", "你", "", "", "", "🙂", "b", ""]


def test_detokenizer_finish_replaces_incomplete_character() -> None:
    assert pieces(b"a\xf0\x9f\x99") == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_detokenizer_emits_broken_character_with_next_one() -> None:
    assert pieces(b"a\xf0\x9fb") == ["a", "", "", "\N{REPLACEMENT CHARACTER}b", ""]


def test_detokenizer_emits_invalid_bytes_immediately() -> None:
    assert pieces(b"\xff" * 100) == ["\N{REPLACEMENT CHARACTER}"] * 100 + [""]


def test_detokenizer_skips_special_tokens_within_character() -> None:
    state = TextState(Bytes())
    half, rest = "é".encode()
    assert [state.push(i) for i in (SPECIAL, half, SPECIAL, rest, SPECIAL)] == ["", "", "", "é", ""]


@pytest.mark.parametrize(
    "data",
    [b"a" * 500, "🙂".encode() * 200, b"\xff" * 500, b"\xe4\xbd" * 300, b"\xf0\x9f\x99" * 200],
)
def test_detokenizer_text_equals_decoded_bytes(data: bytes) -> None:
    state = TextState(Bytes())
    text = "".join(state.push(byte) + state.push(SPECIAL) for byte in data)
    assert text + state.finish() == data.decode(errors="replace")


def test_detokenizer_first_token_is_first_with_text() -> None:
    class Stripping(Bytes):
        def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
            data = super().token_bytes(token_id)
            return data.removeprefix(b" ") if data and is_first else data

    state = TextState(Stripping())
    assert "".join(state.push(i) for i in [SPECIAL, *b"  a b"]) == " a b"


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"ab", None), (b"aENDING", "END"), (b"aEND", "END"), (b"a#", ord("#")), (b"a$", None)],
)
@pytest.mark.parametrize("is_included", [False, True])
def test_stop_reason_is_stop_named_by_client(
    data: bytes, reason: str | int | None, is_included: bool
) -> None:
    stops = Stops(("END", "ENDINGS"), frozenset(b"#$"), 1, is_included, frozenset(b"$"))
    state = TextState(Bytes(), stops)
    for byte in data:
        if not state.stopped:
            state.push(byte)
    assert state.stop_reason == reason


def test_stop_reason_ignores_stop_token_before_min_tokens() -> None:
    state = TextState(Bytes(), Stops(token_ids=frozenset(b"#"), min_tokens=2))
    state.push(ord("#"))
    assert state.stop_reason is None


def test_stop_string_is_excluded_from_text() -> None:
    state = TextState(Bytes(), Stops(("END",)))
    assert [state.push(byte) for byte in b"a EN"] == ["a", " ", "", ""]
    assert not state.stopped
    assert state.push(ord("D")) == ""
    assert state.stopped
    assert state.finish() == ""


def test_stop_string_prefix_without_match_is_released() -> None:
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
def test_stop_matcher_takes_first_completed_string(
    text: str, stops: tuple[str, ...], expected: tuple[str, bool]
) -> None:
    assert fed(text, *stops) == expected


def test_stop_matcher_finds_string_inside_piece() -> None:
    matcher = StopMatcher(["b", "abcde"])
    assert matcher.feed("aab c") == "aa"
    assert matcher.matched


def test_stop_matcher_emits_nothing_after_match() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.feed("ab"), matcher.feed("c"), matcher.finish()] == ["a", "", ""]


def test_equal_stop_strings_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory is freed with the last of them, and each text matches independently."""
    made: list[str] = []
    add = StopAutomaton._add

    def counted(automaton: StopAutomaton, stop: str) -> None:
        made.append(stop)
        add(automaton, stop)

    monkeypatch.setattr(StopAutomaton, "_add", counted)
    matchers = [StopMatcher(["".join(parts)]) for parts in [("EN", "D of these")] * 128]
    assert made == ["END of these"]
    first, second, *_ = matchers
    fed = [first.feed("EN"), second.feed("aE"), first.feed("D of these"), second.feed("D")]
    assert fed == ["", "a", "", "ED"]
    assert (first.matched, second.matched) == (True, False)
    del matchers, first, second, _
    gc.collect()
    StopMatcher(["END of these"])
    assert made == ["END of these"] * 2


def test_stop_is_included_in_text_on_request() -> None:
    assert pieces(b"aENDx", "END", is_included=True) == ["a", "", "", "END", "", ""]
    token = {"token_ids": frozenset(b"#")}
    assert pieces(b"ab#", **token) == ["a", "b", "", ""]
    assert pieces(b"ab#", **token, is_included=True) == ["a", "b", "#", ""]


def test_stop_token_completes_no_stop_string() -> None:
    stops = Stops(("E#",), frozenset(b"#"))
    state = TextState(Bytes(), stops)
    assert [state.push(byte) for byte in b"aE#"] == ["a", "", ""]
    assert not state.stopped
    assert state.finish() == "E"
    included = TextState(Bytes(), Stops(stops.strings, stops.token_ids, is_included=True))
    assert [included.push(byte) for byte in b"aE#"] == ["a", "", "E#"]
    assert included.stopped


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (3, "a"), (4, "aXYb"), (6, "aXYb"), (7, "aXYbXY")]
)
def test_stop_string_takes_effect_from_min_tokens(min_tokens: int, text: str) -> None:
    assert "".join(pieces(b"aXYbXY", "XY", min_tokens=min_tokens)) == text


def test_stop_string_may_begin_before_min_tokens() -> None:
    state = TextState(Bytes(), Stops(("ABCD",), min_tokens=4))
    assert [state.push(byte) for byte in b"ABCD"] == [""] * 4
    assert state.stopped


def test_unmatched_stop_string_is_not_held_back() -> None:
    state = TextState(Bytes(), Stops(("AB", "ABC"), min_tokens=3))
    assert [state.push(byte) for byte in b"AB"] == ["", ""]
    state = TextState(Bytes(), Stops(("AB",), min_tokens=9))
    assert [state.push(byte) for byte in b"ABAB"] == ["", "AB", "", "AB"]


def test_stop_token_is_text_before_min_tokens() -> None:
    stops = {"token_ids": frozenset(b"#")}
    assert "".join(pieces(b"##ab#", **stops, min_tokens=4)) == "##ab"
    assert "".join(pieces(b"##ab#", **stops, min_tokens=5)) == "##ab#"
