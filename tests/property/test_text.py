"""Incremental text equals the plain decode, on a real byte-level BPE tokenizer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from everlift.text import NO_STOPS, REPLACEMENT, StopMatcher, Stops, TextState

CORPUS = [
    "count from one to ten: 你好 🙂🙃 naïve café",
    "один два три",
    "aaaa bbbb",
    "👩‍👩‍👧 family",
]


class Adapter:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self.size = tokenizer.get_vocab_size()

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def is_text(self, token_id: int) -> bool:
        return token_id not in self.special and token_id < self.size

    def whole_text(self, token_id: int) -> str | None:
        """As the router's."""
        if not isinstance(self.tokenizer.decoder, decoders.ByteLevel):
            return None
        text = self.decode([token_id])
        return None if REPLACEMENT in text else text


def byte_level() -> Adapter:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return Adapter(tokenizer)


def sentencepiece_like() -> Adapter:
    """Spaces as U+2581, the first one stripped; bytes as <0xNN>, as Llama 2 has them."""
    words = ["\u2581", "a", "b", "\u2581a", "\u2581bb", "é", "\u2581\u2581"]
    vocab = {"<s>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {word: len(vocab) + n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Adapter(tokenizer)


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece_like()
RANDOM_TOKENS = st.lists(st.integers(0, BYTE_LEVEL.size + 5), max_size=60)
STOPS = st.builds(
    Stops,
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=5).map(tuple),
    st.frozensets(st.integers(0, BYTE_LEVEL.size), max_size=3),
    st.integers(0, 20),
    st.booleans(),
)


def pushed(tokenizer: Adapter, ids: Sequence[int], stops: Stops = NO_STOPS) -> tuple[str, int]:
    """The text and the number of tokens that it took."""
    state = TextState(tokenizer, stops)
    text = ""
    for count, token in enumerate(ids, 1):
        text += state.push(token)
        if state.stopped:
            return text, count
    return text + state.finish(), len(ids)


@given(st.text(max_size=60))
def test_all_pieces_of_a_text_are_the_text(text: str) -> None:
    ids = BYTE_LEVEL.tokenizer.encode(text).ids
    assert pushed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids) == text


@given(RANDOM_TOKENS)
def test_all_pieces_of_random_tokens_are_their_plain_decode(ids: list[int]) -> None:
    assert pushed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids)


@given(st.lists(st.binary(max_size=5), max_size=30).map(b"".join))
def test_all_pieces_of_random_bytes_are_their_plain_decode(data: bytes) -> None:
    vocab = BYTE_LEVEL.tokenizer.get_vocab()
    letters = {byte: char for byte, char in zip(range(256), _alphabet(), strict=True)}
    ids = [vocab[letters[byte]] for byte in data]
    assert BYTE_LEVEL.decode(ids) == data.decode(errors="replace")
    assert pushed(BYTE_LEVEL, ids)[0] == BYTE_LEVEL.decode(ids)


def _alphabet() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes with, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@given(st.text("ab é你🙂", max_size=40))
def test_sentencepiece_text_keeps_its_spaces(text: str) -> None:
    ids = SENTENCEPIECE.tokenizer.encode(text).ids
    assert pushed(SENTENCEPIECE, ids)[0] == SENTENCEPIECE.decode(ids) == text


@given(RANDOM_TOKENS, STOPS)
def test_no_piece_is_ever_taken_back(ids: list[int], stops: Stops) -> None:
    whole = pushed(BYTE_LEVEL, ids, stops)[0]
    for cut in range(len(ids)):
        state = TextState(BYTE_LEVEL, stops)
        assert whole.startswith("".join(state.push(token) for token in ids[:cut]))


def cut(ids: Sequence[int], stops: Stops) -> tuple[str, int]:
    """What ``pushed`` answers, by definition: the text grows token by token, and ends with the
    first stop string that is completed when there are enough tokens, the longest of several."""
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
def test_the_text_ends_with_the_stop_string_that_is_completed_first(
    text: str, stops: Stops, odd: int
) -> None:
    ids = BYTE_LEVEL.tokenizer.encode(text).ids
    # Here and there a token that ends the text, among those which occur.
    stops = replace(
        stops, token_ids=stops.token_ids | {ids[odd]} if odd < len(ids) else frozenset()
    )
    assert pushed(BYTE_LEVEL, ids, stops) == cut(ids, stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_no_more_is_held_back_than_what_may_become_a_stop_string(
    text: str, strings: list[str]
) -> None:
    """Also while none of them counts."""
    matcher = StopMatcher(strings)
    out = ""
    for end, char in enumerate(text, 1):
        out += matcher.feed(char, counts=False)
        held = next(
            n for n in range(end, -1, -1) if n == 0 or _begins(strings, text[end - n : end])
        )
        assert out == text[: end - held]


def _begins(strings: list[str], end: str) -> bool:
    return any(stop.startswith(end) and stop != end for stop in strings)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_special_tokens_have_no_text(tokenizer: Adapter) -> None:
    assert pushed(tokenizer, [0, 0, 0]) == ("", 3)
