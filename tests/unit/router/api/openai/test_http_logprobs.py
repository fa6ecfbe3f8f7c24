"""Log probabilities of the HTTP API: strings, bytes and offsets for each kind of vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everlift.messages import FinishReason
from everlift.text import Stops
from everlift.v1 import inference_pb2 as pb
from router.api.http.event_id import EventId
from router.api.http.transcript import Collected, Transcript, Usage
from router.api.openai.chat import ChatAnswer
from router.api.openai.completion import CompletionAnswer
from router.api.openai.envelope import Envelope
from router.api.openai.logprobs import Echo, placed_in_prompt
from router.chat.parsers.plain import PlainParser
from router.requests.request import Choice
from router.requests.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.support.router.choices import finished, pieces
from tests.support.worker.vocabularies import ALL, BYTE_LEVEL, SENTENCEPIECE, SPACE, byte_ids

ENVELOPE = Envelope("r", 7, "m", None)
BYTES = ByteTokenizer()
Answer = CompletionAnswer | ChatAnswer
Entry = dict[str, Any]


def completion(tokenizer: Tokenizer) -> Answer:
    return CompletionAnswer(ENVELOPE, tokenizer, has_logprobs=True)


def chat(tokenizer: Tokenizer) -> Answer:
    return ChatAnswer(ENVELOPE, tokenizer, lambda choice: PlainParser(), has_logprobs=True)


ANSWERS = [completion, chat]


def streamed(
    answer: Answer, choice: Choice, ends: Sequence[int], transcript: Transcript
) -> Iterator[tuple[str, Entry]]:
    """Yield each event's id and its choice."""
    for piece in pieces(choice, ends):
        output = transcript.read(0, piece)
        if not output.is_known and (data := answer.data(output)) is not None:
            transcript.mark_read(output.choice)
            yield transcript.event_id, json.loads(data)["choices"][0]


def whole(answer: Answer, choice: Choice) -> Entry:
    collected, transcript = Collected(), Transcript("r", 1, 1)
    for piece in pieces(choice, []):
        output = transcript.read(0, piece)
        collected.add(output)
    body: Entry = json.loads("".join(answer.encode_complete([collected], Usage())))["choices"][0]
    return body


def text_of(choice: Entry) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    text: str = part.get("content") or part.get("text") or ""
    return text


def rows(logprobs: Entry) -> list[Entry]:
    """Return the entries of a chat, or those of a completion, one for each token."""
    if "content" in logprobs:
        content: list[Entry] = logprobs["content"]
        return content
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    values = zip(*(logprobs[name] for name in columns), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def test_parts_of_a_character_share_its_offset() -> None:
    tokens = byte_ids(BYTE_LEVEL, " a\N{GRINNING FACE}!".encode())
    choice = finished(BYTE_LEVEL, tokens, Stops(), [(token, -0.5) for token in tokens])
    scores = whole(completion(BYTE_LEVEL), choice)["logprobs"]
    parts = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert scores["tokens"] == [" ", "a", *parts, "!"]
    assert scores["text_offset"] == [0, 1, 2, 2, 2, 2, 3]
    assert set(scores["top_logprobs"][0]) == {" ", "a", *parts, "!"}
    content = whole(chat(BYTE_LEVEL), choice)["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [[byte] for byte in " a😀!".encode()]
    assert [each["token"] for each in content[2:4]] == ["\N{REPLACEMENT CHARACTER}"] * 2
    assert [each["bytes"] for each in content[0]["top_logprobs"]] == [
        [byte] for byte in " a😀!".encode()
    ]


class Mixed(ByteTokenizer):
    """A byte-level vocabulary with tokens of a space and half a character."""

    TOKENS = (b" \xf0\x9f", b"\x98\x80 END", b"x")

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return self.TOKENS[token_id]


def test_space_before_half_a_character_is_kept() -> None:
    choice = finished(Mixed(), [0, 1], Stops())
    scores = whole(completion(Mixed()), choice)["logprobs"]
    assert scores["tokens"] == [r"bytes: \xf0\x9f", r"bytes:\x98\x80 END"]
    assert scores["text_offset"] == [0, 1]
    content = whole(chat(Mixed()), choice)["logprobs"]["content"]
    assert content[0]["token"] == " \N{REPLACEMENT CHARACTER}"


def test_stop_string_cuts_the_bytes_of_its_first_token() -> None:
    choice = finished(Mixed(), [0, 1, 2], Stops((" END", "x")))
    answer = whole(chat(Mixed()), choice)
    assert (text_of(answer), answer["stop_reason"]) == (" 😀", " END")
    content = answer["logprobs"]["content"]
    assert [bytes(each["bytes"]) for each in content] == [b" \xf0\x9f", b"\x98\x80"]


@pytest.mark.parametrize("stops", [Stops((" END",)), Stops(token_ids=frozenset(b" "))])
def test_tokens_behind_the_cut_have_no_entries(stops: Stops) -> None:
    tokens = cut(list(b"ab END"), stops)
    choice = finished(BYTES, tokens, stops)
    content = whole(chat(BYTES), choice)["logprobs"]["content"]
    assert [(each["token"], each["bytes"]) for each in content] == [("a", [97]), ("b", [98])]
    assert whole(completion(BYTES), choice)["logprobs"]["text_offset"] == [0, 1]


def test_special_token_is_an_alternative_without_bytes() -> None:
    stops = Stops(token_ids=frozenset([1]), min_tokens=1)
    tokens = [1, *BYTE_LEVEL.encode("aaaa"), 1]
    choice = finished(BYTE_LEVEL, tokens, stops, [(1, -0.5)])
    answer = whole(chat(BYTE_LEVEL), choice)
    content = answer["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == text_of(answer) == "aaaa"
    assert content[0]["top_logprobs"] == [{"token": "</s>", "logprob": -0.5, "bytes": None}]
    scores = whole(completion(BYTE_LEVEL), choice)["logprobs"]
    assert scores["top_logprobs"][0] == {"</s>": -0.5, content[0]["token"]: -2.0}


def test_sentencepiece_tokens_keep_their_spaces() -> None:
    words = [f"{SPACE}a", f"{SPACE}bb", SPACE, "é", f"{SPACE}a"]
    tokens = [sentencepiece_id(word) for word in words]
    choice = finished(SENTENCEPIECE, tokens, Stops(), [(tokens[1], -0.5)])
    answer = whole(completion(SENTENCEPIECE), choice)
    scores = answer["logprobs"]
    assert scores["tokens"] == ["a", " bb", " ", "é", " a"]
    assert answer["text"] == "a bb é a"
    assert scores["text_offset"] == [0, 1, 4, 5, 6]
    # An alternative to the first token loses its space, too.
    assert [next(iter(shown)) for shown in scores["top_logprobs"]] == ["bb", *[" bb"] * 4]


def sentencepiece_id(token: str) -> int:
    ids = range(SENTENCEPIECE.vocab_size)
    return next(i for i in ids if SENTENCEPIECE.token_string(i) == token)


@pytest.mark.parametrize("num_top", [0, 1, 4])
@pytest.mark.parametrize("is_sampled_among_them", [False, True])
def test_completion_has_the_sampled_token_and_alternatives(
    num_top: int, is_sampled_among_them: bool
) -> None:
    top = [(token, -0.25) for token in b"abcd"[:num_top]]
    sampled = top[-1][0] if top and is_sampled_among_them else ord("z")
    choice = finished(BYTES, [sampled], Stops(), top)
    scores = whole(completion(BYTES), choice)["logprobs"]
    [shown] = scores["top_logprobs"]
    assert chr(sampled) in shown
    assert len(shown) == num_top + (sampled == ord("z"))
    [entry] = whole(chat(BYTES), choice)["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == num_top


def test_alternatives_with_the_same_string_keep_their_own_keys() -> None:
    """Llama's vocabulary has each ASCII letter twice: as a piece and as a byte."""
    piece = sentencepiece_id("A")
    byte = sentencepiece_id("<0x41>")
    space = sentencepiece_id(SPACE)
    top = [(byte, -0.25), (piece, -0.5), (space, -0.75), (10**6, -0.875)]
    choice = finished(SENTENCEPIECE, [piece], Stops(), top)
    scores = whole(completion(SENTENCEPIECE), choice)["logprobs"]
    assert scores["tokens"] == ["A"]
    assert scores["top_logprobs"] == [
        {f"token_id:{byte}": -0.25, "A": -0.5, "": -0.75, "token_id:1000000": -0.875}
    ]
    [entry] = whole(chat(SENTENCEPIECE), choice)["logprobs"]["content"]
    assert [each["token"] for each in entry["top_logprobs"]] == ["A", "A", "", "token_id:1000000"]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("byte-level", " \N{GRINNING FACE}", ["Ġ", "ðŁ", "ĺ", "Ģ"]),
        ("sentencepiece", "\N{ROCKET}", [SPACE, "<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"]),
        ("plain", "one drei", ["one", "drei"]),
    ],
)
def test_token_string_is_the_vocabularys_own(kind: str, text: str, expected: list[str]) -> None:
    tokenizer = ALL[kind]
    assert [tokenizer.token_string(token) for token in tokenizer.encode(text)] == expected


def outputs(tokenizer: HuggingFaceTokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), min_size=1, max_size=30)


def stops_of(tokenizer: HuggingFaceTokenizer) -> st.SearchStrategy[Stops]:
    """Draw stops; stop tokens are whole characters: half a one would belong to the token before."""
    whole_tokens = [
        token
        for token in range(tokenizer.vocab_size)
        if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode([token])
    ]
    return st.builds(
        Stops,
        st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3).map(tuple),
        st.frozensets(st.sampled_from(whole_tokens), max_size=2),
        st.integers(0, 10),
        st.booleans(),
    )


ENDS = st.lists(st.integers(0, 30))


def cut(tokens: list[int], stops: Stops) -> list[int]:
    """Return the tokens up to the first stop token, after which a worker samples none."""
    ends = [
        place + 1
        for place, token in enumerate(tokens)
        if token in stops.token_ids and place >= stops.min_tokens
    ]
    return tokens[: min(ends, default=len(tokens))]


@pytest.mark.parametrize("kind", ALL)
@given(data=st.data())
def test_bytes_and_offsets_are_those_of_the_text(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    stops = data.draw(stops_of(tokenizer))
    tokens = cut(data.draw(outputs(tokenizer)), stops)
    tops = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=5, unique=True))
    choice = finished(tokenizer, tokens, stops, [(token, -0.5) for token in tops])
    answer = whole(chat(tokenizer), choice)
    text, content = text_of(answer), answer["logprobs"]["content"]
    joined = b"".join(bytes(each["bytes"]) for each in content)
    assert joined.decode(errors="replace") == text
    scores = whole(completion(tokenizer), choice)["logprobs"]
    assert len(scores["tokens"]) == len(content)
    offsets = scores["text_offset"]
    assert offsets == sorted(offsets)
    num_before = 0
    with_text = [t for t in choice.output.tokens if tokenizer.token_bytes(t) is not None]
    sampled_tokens = with_text[: len(content)]
    columns = (offsets, scores["top_logprobs"], scores["tokens"], sampled_tokens)
    for each, offset, shown, token, sampled in zip(content, *columns, strict=True):
        # All characters before the offset are complete in the bytes before the token.
        before = joined[:num_before].decode(errors="replace")
        assert text[:offset] == before[:offset]
        assert len(before) - 1 <= offset <= len(text)
        assert len(each["top_logprobs"]) == len(tops)
        assert len(shown) == len(tops) + (sampled not in tops)
        assert token in shown
        num_before += len(each["bytes"])


@pytest.mark.parametrize("make", ANSWERS)
@pytest.mark.parametrize("kind", ALL)
@given(data=st.data())
def test_streamed_log_probabilities_are_those_of_the_whole(
    make: Any, kind: str, data: st.DataObject
) -> None:
    """The stream may be resumed after any of its events."""
    tokenizer = ALL[kind]
    stops = data.draw(stops_of(tokenizer))
    tokens = cut(data.draw(outputs(tokenizer)), stops)

    def choice() -> Choice:
        return finished(tokenizer, tokens, stops)

    expected = whole(make(tokenizer), choice())
    events = [*streamed(make(tokenizer), choice(), data.draw(ENDS), Transcript("r", 1, 1))]
    kept = data.draw(st.integers(0, len(events)))
    positions = EventId.parse(events[kept - 1][0]).positions if kept else ()
    resumed = Transcript("r", 1, 1, positions)
    events[kept:] = streamed(make(tokenizer), choice(), data.draw(ENDS), resumed)
    chunks = [chunk for _, chunk in events]
    assert "".join(map(text_of, chunks)) == text_of(expected)
    found = [row for chunk in chunks for row in rows(chunk["logprobs"])]
    assert found == rows(expected["logprobs"])
    assert chunks[-1]["stop_reason"] == expected["stop_reason"]


@pytest.mark.parametrize("make", ANSWERS)
@pytest.mark.parametrize(
    ("output", "reason", "expected"),
    [
        (b"abEND", FinishReason.STOP, "END"),
        (b"ab#", FinishReason.STOP, ord("#")),
        (b"ab$", FinishReason.STOP, None),
        (b"ab", FinishReason.LENGTH, None),
    ],
)
def test_stop_reason_names_the_stop(
    make: Any, output: bytes, reason: FinishReason, expected: object
) -> None:
    stops = Stops(("END",), frozenset(b"#$"), eos_ids=frozenset(b"$"))
    choice = finished(BYTES, [*output], stops, reason=reason)
    assert whole(make(BYTES), choice)["stop_reason"] == expected
    chunks = [chunk for _, chunk in streamed(make(BYTES), choice, [1, 2], Transcript("r", 1, 1))]
    assert [chunk["stop_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["stop_reason"] == expected


@pytest.mark.parametrize("make", ANSWERS)
def test_chunk_has_the_usage_so_far(make: Any) -> None:
    answer, transcript = make(BYTES), Transcript("r", 1, 1)
    transcript.usage.prompt_tokens = 5
    found = []
    for piece in pieces(finished(BYTES, [*b"abcd"], Stops()), [1, 3]):
        output = transcript.read(0, piece)
        found.append(json.loads(answer.data(output, transcript.usage))["usage"])
    assert found == [
        {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        for count in (1, 3, 4)
    ]


def test_echo_lists_every_token_of_the_output() -> None:
    """The output ends with a special token, or with a token that a stop string cut."""
    tokens = [*BYTE_LEVEL.encode("aaaa"), 1]
    echo = Echo("b", BYTE_LEVEL.encode("b"), 0)

    def scores(stops: Stops) -> Entry:
        answer = CompletionAnswer(ENVELOPE, BYTE_LEVEL, has_logprobs=True, echoes=[echo])
        choice = finished(BYTE_LEVEL, tokens, stops)
        shown: Entry = whole(answer, choice)["logprobs"]
        assert len(shown["tokens"]) == 1 + len(choice.output.tokens)
        return shown

    ended = scores(Stops(token_ids=frozenset([1])))
    assert (ended["tokens"][-1], ended["text_offset"][-1]) == ("</s>", 5)
    assert set(scores(Stops(("aa",)))["text_offset"]) == {0, 1}


@given(text=st.text("ab é\N{GRINNING FACE}<s>", max_size=20), has_begin=st.booleans())
def test_prompt_offsets_index_its_text(text: str, has_begin: bool) -> None:
    begin, end = BYTE_LEVEL.encode("<s></s>")
    text = f"{text}</s>{text}"
    # Otherwise, it would be unclear whether the first token is part of the text.
    assume(not has_begin or not text.startswith("<s>"))
    tokens = [begin] * has_begin + BYTE_LEVEL.encode(text)
    scores = [pb.TokenLogprobs()] * (len(tokens) - 1)
    placed = [*placed_in_prompt(BYTE_LEVEL, tokens, scores, text)]
    assert [each.token for each in placed] == tokens
    special = {begin: "<s>", end: "</s>"}
    for each in placed[has_begin:]:
        string = special.get(each.token) or each.data.decode(errors="replace")
        assert text.startswith(string, each.offset) or "\N{REPLACEMENT CHARACTER}" in string
    assert not has_begin or placed[0].offset == 0
    assert [each.offset for each in placed] == sorted(each.offset for each in placed)


@pytest.mark.parametrize("make", ANSWERS)
def test_log_probabilities_include_kept_special_tokens(make: Any) -> None:
    begin, end = BYTE_LEVEL.encode("<s></s>")
    tokens = [begin, *BYTE_LEVEL.encode("count"), begin, end]
    shown: Any = BYTE_LEVEL.with_special_tokens()
    answer = whole(make(shown), finished(shown, tokens, Stops(token_ids=frozenset([end]))))

    assert text_of(answer) == "<s>count<s>"
    assert "".join(_token(row) for row in rows(answer["logprobs"])) == "<s>count<s>"


def _token(row: Entry) -> str:
    token: str = row["token"] if "token" in row else row["tokens"]
    return token
