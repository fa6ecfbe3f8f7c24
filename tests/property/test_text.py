"""Incremental text equals the plain decode, for each kind of vocabulary."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.text import NO_STOPS, StopMatcher, Stops, TextState
from router.requests.tokenizer import HuggingFaceTokenizer
from tests.support.worker.vocabularies import ALL, BYTE_LEVEL, SENTENCEPIECE, UNIGRAM, byte_ids

RANDOM_TOKENS = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 5), max_size=60)
STOPS = st.builds(
    Stops,
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=5).map(tuple),
    st.frozensets(st.integers(0, BYTE_LEVEL.vocab_size), max_size=3),
    st.integers(0, 20),
    st.booleans(),
)


def pushed(
    tokenizer: HuggingFaceTokenizer, ids: Sequence[int], stops: Stops = NO_STOPS
) -> tuple[str, int]:
    """Return the text, and the number of tokens that it took."""
    state = TextState(tokenizer, stops)
    text = ""
    for count, token in enumerate(ids, 1):
        text += state.push(token)
        if state.stopped:
            return text, count
    return text + state.finish(), len(ids)


@given(st.text(max_size=60))
def test_incremental_text_equals_original_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert pushed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids) == text


@given(RANDOM_TOKENS)
def test_incremental_text_of_random_tokens_equals_decode(ids: list[int]) -> None:
    assert pushed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids)


@given(st.lists(st.binary(max_size=5), max_size=30).map(b"".join))
def test_incremental_text_of_random_bytes_equals_decode(data: bytes) -> None:
    ids = byte_ids(BYTE_LEVEL, data)
    assert BYTE_LEVEL.decode(ids) == data.decode(errors="replace")
    assert pushed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids)


@given(st.text("ab é你🙂", max_size=40))
def test_sentencepiece_text_keeps_its_spaces(text: str) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert pushed(SENTENCEPIECE, ids)[0] == SENTENCEPIECE.decode(ids) == text


def test_text_loses_a_leading_space_written_as_a_byte() -> None:
    ids = [*byte_ids(SENTENCEPIECE, b" "), *SENTENCEPIECE.encode("a")]
    for length in (1, 2):
        assert pushed(SENTENCEPIECE, ids[:length])[0] == SENTENCEPIECE.decode(ids[:length])


@pytest.mark.parametrize("kind", ALL)
@given(data=st.data())
def test_incremental_text_of_valid_tokens_equals_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    tokens = st.integers(0, tokenizer.vocab_size + 5)
    ids = data.draw(st.lists(tokens.filter(lambda token: is_valid(tokenizer, token)), max_size=40))
    assert pushed(tokenizer, ids)[0] == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "gemma"])
@given(data=st.data())
def test_text_with_special_tokens_equals_the_decoded_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    tokens = st.integers(0, 5) | st.integers(0, tokenizer.vocab_size + 5)
    ids = data.draw(st.lists(tokens.filter(lambda token: is_valid(tokenizer, token)), max_size=40))
    shown = tokenizer.with_special_tokens()
    state = TextState(shown)
    text = "".join(map(state.push, ids)) + state.finish()
    assert text == shown.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.with_special_tokens() is shown


def is_valid(tokenizer: HuggingFaceTokenizer, token: int) -> bool:
    """Return whether a token has no incomplete character."""
    try:
        (tokenizer.token_bytes(token) or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


@given(RANDOM_TOKENS, STOPS)
def test_incremental_text_is_never_retracted(ids: list[int], stops: Stops) -> None:
    whole = pushed(BYTE_LEVEL, ids, stops)[0]
    for cut in range(len(ids)):
        state = TextState(BYTE_LEVEL, stops)
        assert whole.startswith("".join(state.push(token) for token in ids[:cut]))


def cut(ids: Sequence[int], stops: Stops) -> tuple[str, int]:
    """Return the text and the number of tokens that ``pushed`` must return, by definition.

    The text grows token by token, and ends with the first stop string that is completed after
    enough tokens; of several, the longest counts.
    """
    text = ""
    for count, token in enumerate(ids, 1):
        counts = count >= stops.min_tokens
        ends = count > stops.min_tokens and token in stops.token_ids
        silent = ends and not stops.is_included
        before, text = len(text), text + ("" if silent else BYTE_LEVEL.decode([token]))
        for end in range(before + 1, len(text) + 1) if counts else ():
            found = [stop for stop in stops.strings if text[:end].endswith(stop)]
            if found:
                return text[: end - max(map(len, found)) * (not stops.is_included)], count
    return text, len(ids)


@given(st.text("ab", max_size=40), STOPS, st.integers(0, 40))
def test_incremental_text_ends_at_first_completed_stop_string(
    text: str, stops: Stops, odd: int
) -> None:
    ids = BYTE_LEVEL.encode(text)
    # In some examples, one of the tokens is a stop token.
    stops = replace(
        stops, token_ids=stops.token_ids | {ids[odd]} if odd < len(ids) else frozenset()
    )
    assert pushed(BYTE_LEVEL, ids, stops) == cut(ids, stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_stop_matcher_holds_back_only_possible_stop_prefix(text: str, strings: list[str]) -> None:
    """This holds even while no stop string can match."""
    matcher = StopMatcher(strings)
    out = ""
    for end, char in enumerate(text, 1):
        out += matcher.feed(char, can_match=False)
        held = next(
            n for n in range(end, -1, -1) if n == 0 or _begins(strings, text[end - n : end])
        )
        assert out == text[: end - held]


def _begins(strings: list[str], end: str) -> bool:
    return any(stop.startswith(end) and stop != end for stop in strings)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, UNIGRAM])
def test_special_tokens_have_no_text(tokenizer: HuggingFaceTokenizer) -> None:
    assert pushed(tokenizer, [0, 0, 0]) == ("", 3)
