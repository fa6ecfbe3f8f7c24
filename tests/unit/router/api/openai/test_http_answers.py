"""Answers of the HTTP API: whole, streamed in any pieces, and resumed after any event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import (
    AttemptsExhausted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    EngineFailed,
    EverliftError,
    InvalidRequest,
    LedgerUnavailable,
    Moved,
    NoWorker,
    QueueFull,
    QueueTimeout,
    RouterStopping,
    Unreachable,
)
from everlift.hashes import token_digest
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs
from everlift.text import Stops, TextState
from everlift.v1 import inference_pb2 as pb
from router.api.anthropic.answer import MessagesAnswer
from router.api.http import endpoint, errors, event_stream
from router.api.http.event_id import BEGIN, EventId, Position
from router.api.http.fields import parse
from router.api.http.streaming import StreamedAnswer
from router.api.http.transcript import Collected, NewOutput, Transcript, Usage
from router.api.http.writer import encode
from router.api.openai import answering, logprobs
from router.api.openai.chat import ChatAnswer
from router.api.openai.completion import CompletionAnswer
from router.api.openai.envelope import Envelope
from router.api.openai.fields import TokenizeFields
from router.api.openai.logprobs import Echo
from router.api.openai.prompt_logprobs import ScoredPrompt
from router.api.openai.responses.answer import ResponseAnswer
from router.api.openai.responses.fields import ResponseFields
from router.api.openai.responses.record import Record
from router.api.openai.texts import Texts
from router.chat.deltas import Delta
from router.chat.parsers.base import Parser
from router.chat.parsers.plain import PlainParser
from router.chat.parsers.think import ThinkParser
from router.chat.tools import ToolUse
from router.requests import tokenizer
from router.requests.request import Choice, Output
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ByteTokenizer, Tokenizer

TOKENIZER = ByteTokenizer()
#: Position in a choice, as the id of an event contains it.
PLACE = "1.1.00000000000000ab"
ENVELOPE = Envelope("cmpl-r", 7, "m", None)
CALL = ToolUse.of(
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    {"type": "function", "function": {"name": "f"}},
    parallel=True,
)
Answer = CompletionAnswer | ChatAnswer


PROMPT = list("aské".encode())
PROMPT_SCORES = [
    pb.TokenLogprobs(logprob=-token / 256, rank=2, top_ids=[97], top_logprobs=[-0.25])
    for token in PROMPT[1:]
]


def parser_of_calls(choice: int) -> Parser:
    return CALL.parser(None, "r", choice)


def parser_of_text(choice: int) -> Parser:
    return PlainParser()


def parser_of_thoughts(choice: int) -> Parser:
    """Return a parser of reasoning that begins in the prompt and ends with a dot."""
    return ThinkParser(":", ".", PlainParser(), ":")


ANSWERS: dict[str, Callable[[], Answer]] = {
    "completion": lambda: CompletionAnswer(ENVELOPE, TOKENIZER, has_logprobs=False),
    "echo": lambda: CompletionAnswer(
        ENVELOPE, TOKENIZER, has_logprobs=False, echoes=["ask:", "ask:"]
    ),
    "scored echo": lambda: CompletionAnswer(
        ENVELOPE, TOKENIZER, has_logprobs=True, echoes=[Echo("aské", PROMPT, 1)] * 3
    ),
    "scored prompt": lambda: CompletionAnswer(
        ENVELOPE, TOKENIZER, has_logprobs=False, prompts=[ScoredPrompt(PROMPT, 1)] * 3
    ),
    "scored prompt of a chat": lambda: ChatAnswer(
        ENVELOPE, TOKENIZER, parser_of_text, has_logprobs=False, prompt=ScoredPrompt(PROMPT, 1)
    ),
    "scored completion": lambda: CompletionAnswer(ENVELOPE, TOKENIZER, has_logprobs=True),
    "chat": lambda: ChatAnswer(ENVELOPE, TOKENIZER, parser_of_text, has_logprobs=False),
    "scored chat": lambda: ChatAnswer(ENVELOPE, TOKENIZER, parser_of_text, has_logprobs=True),
    "thought": lambda: ChatAnswer(
        ENVELOPE, TOKENIZER, parser_of_thoughts, has_logprobs=False, has_reasoning=True
    ),
    "call": lambda: ChatAnswer(ENVELOPE, TOKENIZER, parser_of_calls, has_logprobs=False),
}


def finished(text: str, index: int) -> Choice:
    """Return a choice whose tokens are the bytes of ``text``."""
    output = Output(TextState(TOKENIZER, Stops()))
    tokens = list(text.encode())
    output.extend(tokens, [TokenLogprobs(-token / 256, 1, ((token, -0.5),)) for token in tokens])
    return Choice("r", index, output, FinishReason.STOP)


def pieces(choice: Choice, ends: Sequence[int]) -> Iterator[pb.GenerateResponse]:
    """Yield the choice's pieces, cut at ``ends``, as a stream yields them during generation."""
    total = len(choice.output)
    choice.is_complete, choice.readable = False, 0
    for end in sorted({min(end, total) for end in ends} - {0}):
        begin, choice.readable = choice.readable, end
        yield choice.piece(begin)
    begin, choice.readable, choice.is_complete = choice.readable, total, True
    yield choice.piece(begin)


def interleaved(texts: Sequence[str], ends: Sequence[int]) -> list[pb.GenerateResponse]:
    streams = [list(pieces(finished(text, i), ends)) for i, text in enumerate(texts)]
    streams[0][0].prompt_logprobs.extend(PROMPT_SCORES)
    longest = max(map(len, streams))
    return [stream[k] for k in range(longest) for stream in streams if k < len(stream)]


def stream(
    answer: Answer, transcript: Transcript, read: Sequence[pb.GenerateResponse]
) -> list[tuple[str, Any]]:
    """Return the ids and chunks of the events."""
    events = []
    for piece in read:
        output = transcript.read(0, piece)
        if not output.is_known and (data := answer.data(output)) is not None:
            transcript.mark_read(output.choice)
            events.append((transcript.event_id, json.loads(data)))
    return events


ODD_ENVELOPE = Envelope('cmpl-"text":""', 7, 'm"text":""\u2028é', 'f"')


@given(text=st.text(), choice=st.integers(0, 2))
def test_answer_data_equals_the_encoded_chunk(text: str, choice: int) -> None:
    answer = CompletionAnswer(ODD_ENVELOPE, TOKENIZER, has_logprobs=False)
    for output in (NewOutput(choice, text, (), ()), NewOutput(choice, text, (), (), "stop")):
        chunk = answer.chunk(output)
        for _ in range(2):
            assert answer.data(output) == (None if chunk is None else encode(chunk))


def scores_of(shown: dict[str, Any]) -> Any:
    return shown.get("prompt_logprobs")


def joined(chunks: Sequence[Any], num_choices: int) -> list[dict[str, Any]]:
    """Return the choices that a client assembles from the chunks."""
    whole: list[dict[str, Any]] = [
        {
            "text": "",
            "thoughts": "",
            "roles": [],
            "calls": {},
            "logprobs": [],
            "offsets": [],
            "finish": [],
            "prompts": [],
        }
        for _ in range(num_choices)
    ]
    for chunk in chunks:
        [shown] = chunk["choices"]
        into = whole[shown["index"]]
        delta = shown.get("delta", {})
        into["text"] += shown.get("text", "") + delta.get("content", "")
        into["thoughts"] += delta.get("reasoning_content", "")
        into["roles"] += [delta["role"]] if "role" in delta else []
        calls = delta.get("tool_calls", [])
        # langchain takes a second entry of the same call for another call.
        assert len({call["index"] for call in calls}) == len(calls)
        for call in calls:
            known = into["calls"].setdefault(call["index"], {"id": [], "arguments": ""})
            known["id"] += [call["id"]] if "id" in call else []
            known["arguments"] += call["function"]["arguments"]
        logprobs = shown["logprobs"] or {}
        into["logprobs"] += logprobs.get("token_logprobs", [])
        into["logprobs"] += [each["logprob"] for each in logprobs.get("content", [])]
        into["offsets"] += logprobs.get("text_offset", [])
        into["prompts"] += [it["prompt_logprobs"] for it in (shown, chunk) if scores_of(it)]
        into["finish"] += [shown["finish_reason"]] if shown["finish_reason"] else []
    return whole


TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=3
)
OBJECTS = st.dictionaries(st.text(max_size=3), st.text(max_size=6), max_size=2).map(json.dumps)
ENDS = st.lists(st.integers(0, 20))


@pytest.mark.parametrize("kind", ANSWERS)
@given(data=st.data())
def test_answer_stream_resumes_exactly_where_it_broke(kind: str, data: st.DataObject) -> None:
    texts = data.draw(st.lists(OBJECTS, min_size=1, max_size=2) if kind == "call" else TEXTS)
    texts = texts[:2] if kind == "echo" else texts
    texts = [f"{text}.{text}" for text in texts] if kind == "thought" else texts
    transcript = Transcript("r", 1, len(texts))
    events = stream(ANSWERS[kind](), transcript, interleaved(texts, data.draw(ENDS)))
    whole = joined([chunk for _, chunk in events], len(texts))
    kept = data.draw(st.integers(0, len(events)))
    positions = EventId.parse(events[kept - 1][0]).positions if kept else ()
    # The resumed stream has other pieces.
    again = stream(
        ANSWERS[kind](),
        Transcript("r", 1, len(texts), positions),
        interleaved(texts, data.draw(ENDS)),
    )
    chunks = [chunk for _, chunk in (*events[:kept], *again)]
    assert joined(chunks, len(texts)) == whole
    if again:
        assert again[-1][0] == events[-1][0]


@pytest.mark.parametrize("kind", ANSWERS)
@given(data=st.data())
def test_whole_answer_equals_its_stream(kind: str, data: st.DataObject) -> None:
    texts = data.draw(st.lists(OBJECTS, min_size=1, max_size=2) if kind == "call" else TEXTS)
    texts = texts[:2] if kind == "echo" else texts
    texts = [f"{text}.{text}" for text in texts] if kind == "thought" else texts
    read = interleaved(texts, data.draw(ENDS))
    events = stream(ANSWERS[kind](), Transcript("r", 1, len(texts)), read)
    streamed = joined([chunk for _, chunk in events], len(texts))
    transcript, choices = Transcript("r", 1, len(texts)), [Collected() for _ in texts]
    for piece in read:
        output = transcript.read(0, piece)
        choices[output.choice].add(output)
    answer = json.loads("".join(ANSWERS[kind]().encode_complete(choices, transcript.usage)))
    for shown, expected in zip(answer["choices"], streamed, strict=True):
        message = shown.get("message", shown)
        text = message["text"] if "text" in message else message["content"] or ""
        assert text == expected["text"]
        assert message.get("reasoning_content", "") == expected["thoughts"]
        assert shown["finish_reason"] == expected["finish"][0]
        scores = shown["logprobs"] or {}
        assert expected["logprobs"] == scores.get("token_logprobs", []) + [
            each["logprob"] for each in scores.get("content", [])
        ]
        assert scores.get("text_offset", []) == expected["offsets"]
        prompts = [scores_of(it) for it in (shown, answer) if scores_of(it)]
        assert expected["prompts"] == (prompts if "text" in message or not shown["index"] else [])
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        assert calls == [call["arguments"] for call in expected["calls"].values()]
        assert [call["id"] for call in message.get("tool_calls", [])] == [
            each for call in expected["calls"].values() for each in call["id"]
        ]


class RecordingParser(PlainParser):
    """Parser that records the lengths of the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def feed(self, text: str) -> list[Delta]:
        self.lengths.append(len(text))
        return super().feed(text)


RESPONSE = Record.of(parse(ResponseFields, {"input": "a"}), 0, [])


@pytest.mark.parametrize(
    "answer_with",
    [
        lambda parser: ChatAnswer(ENVELOPE, TOKENIZER, lambda choice: parser, has_logprobs=False),
        lambda parser: MessagesAnswer("r", "m", parser, 9),
        lambda parser: ResponseAnswer("r", "m", RESPONSE, parser, TOKENIZER),
    ],
    ids=["chat", "messages", "responses"],
)
def test_long_whole_answer_is_parsed_in_pieces(answer_with: Callable[[Parser], Any]) -> None:
    parser, text = RecordingParser(), "ab" * 10_000
    fed_before_pause, parts = [], []
    for part in answer_with(parser).encode_complete([Collected([text], [97])], Usage()):
        parts.append(part)
        fed_before_pause.append(sum(parser.lengths))
        parser.lengths.clear()

    assert text in "".join(parts)
    assert sum(fed_before_pause) == len(text) and max(fed_before_pause) <= 4096


@pytest.mark.parametrize("value", ['"\\ud83d"', "NaN", "1e999"])
def test_message_has_no_input_that_json_cannot_express(value: str) -> None:
    text = f'{{"a": {value}}}'
    answer = MessagesAnswer("r", "m", parser_of_calls(0), 9)
    data = "".join(answer.encode_complete([Collected([text], [97])], Usage())).encode()

    assert [block["input"] for block in json.loads(data)["content"]] == [{}]


class Replay:
    """A generation whose pieces are all available."""

    on_more: Callable[[], None]

    is_over = True

    def __init__(self, read: Sequence[pb.GenerateResponse]) -> None:
        self._pieces = iter(read)

    def poll(self) -> tuple[int, pb.GenerateResponse] | None:
        piece = next(self._pieces, None)
        return None if piece is None else (0, piece)


def sent(
    answer: StreamedAnswer, positions: Sequence[Position], read: Sequence[pb.GenerateResponse]
) -> list[tuple[str, str]]:
    """Return the ids and the data of a stream's events."""
    generation: Any = Replay(read)
    events = event_stream.Events(generation, Transcript("r", 1, 1, positions), answer, has_ids=True)
    whole = "".join(event.decode() for event in iter(events.poll, None))
    found = [event.splitlines() for event in whole.removesuffix("\n\n").split("\n\n")]
    return [(lines[0].removeprefix("id: "), lines[-1]) for lines in found]


STREAMED: dict[str, Callable[[], StreamedAnswer]] = {
    "response": lambda: ResponseAnswer(
        "r", "m", Record({"input": "a"}, 7), PlainParser(), TOKENIZER
    ),
    "message": lambda: MessagesAnswer("r", "m", PlainParser(), 3),
    "completion": ANSWERS["completion"],
    "chat": ANSWERS["chat"],
}


@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_stream_resumed_at_its_end_has_the_same_last_events(
    kind: str, reason: FinishReason
) -> None:
    choice = finished("abc", 0)
    choice.finish_reason = reason
    read = [*pieces(choice, [1, 2])]
    whole = sent(STREAMED[kind](), (), read)
    end = whole[-1][0]
    # The output's last event is the first one with the id of the end.
    rest = whole[[event_id for event_id, _ in whole].index(end) + 1 :]
    assert rest and sent(STREAMED[kind](), EventId.parse(end).positions, read) == rest


async def test_resumed_stream_parses_known_output_in_turns() -> None:
    choice, ends = finished("a" * 10_000, 0), range(0, 10_000, 1000)
    position = Position(9_999, 9_999, token_digest(choice.output.tokens[:9_999]))
    generation: Any = Replay([*pieces(choice, ends)])
    parser = RecordingParser()
    answer = ChatAnswer(ENVELOPE, TOKENIZER, lambda choice: parser, has_logprobs=False)
    events = event_stream.Events(generation, Transcript("r", 1, 1, [position]), answer)
    first = asyncio.create_task(events.first())
    lengths = []
    while not first.done():
        parser.lengths.clear()
        await asyncio.sleep(0)
        lengths.append(sum(parser.lengths))

    assert '"content":"a"' in (await first).decode()
    assert sum(lengths) == 10_000 and max(lengths) <= 5_000


def test_echoed_tokens_precede_those_of_the_output() -> None:
    answer = ANSWERS["scored echo"]()
    events = stream(answer, Transcript("r", 1, 1), interleaved(["bc"], [1]))
    first, second = [chunk["choices"][0] for _, chunk in events]
    assert (first["text"], second["text"]) == ("askéb", "c")
    half = [-token / 256 for token in PROMPT[-2:]]
    assert first["logprobs"] == {
        "tokens": ["a", "s", "k", r"bytes:\xc3", r"bytes:\xa9", "b"],
        "token_logprobs": [None, -115 / 256, -107 / 256, *half, -98 / 256],
        "top_logprobs": [
            None,
            {"a": -0.25, "s": -115 / 256},
            {"a": -0.25, "k": -107 / 256},
            {"a": -0.25, r"bytes:\xc3": half[0]},
            {"a": -0.25, r"bytes:\xa9": half[1]},
            {"b": -0.5},
        ],
        "text_offset": [0, 1, 2, 3, 3, 4],
    }
    assert second["logprobs"]["text_offset"] == [5]


def test_prompt_logprobs_have_the_form_of_vllm() -> None:
    answer = ANSWERS["scored prompt"]()
    events = stream(answer, Transcript("r", 1, 1), interleaved(["bc"], [1]))
    first, second = [chunk["choices"][0] for _, chunk in events]
    top = {"logprob": -0.25, "rank": 1, "decoded_token": "a"}
    none, after_a, *_, last = first["prompt_logprobs"]
    assert none is None and len(first["prompt_logprobs"]) == len(PROMPT)
    assert after_a == {
        "115": {"logprob": -115 / 256, "rank": 2, "decoded_token": "s"},
        "97": top,
    }
    assert last["169"]["decoded_token"] == "\N{REPLACEMENT CHARACTER}"
    assert "prompt_logprobs" not in second


@pytest.mark.parametrize("kind", ["completion", "echo", "scored echo", "scored prompt"])
def test_hidden_output_leaves_only_the_prompt(kind: str) -> None:
    read = interleaved(["xy", "z"], [1])
    transcript = Transcript("r", 1, 2, hides_output=True)
    events = stream(ANSWERS[kind](), transcript, read)
    streamed = joined([chunk for _, chunk in events], 2)
    again, choices = Transcript("r", 1, 2, hides_output=True), [Collected(), Collected()]
    for piece in read:
        output = again.read(0, piece)
        choices[output.choice].add(output)
    answer = json.loads("".join(ANSWERS[kind]().encode_complete(choices, again.usage)))
    prompt = {"completion": "", "echo": "ask:", "scored echo": "aské", "scored prompt": ""}[kind]
    assert (
        [it["text"] for it in answer["choices"]] == [it["text"] for it in streamed] == [prompt] * 2
    )
    assert [it["finish_reason"] for it in answer["choices"]] == ["length"] * 2
    assert [it["finish"] for it in streamed] == [["length"]] * 2
    assert again.usage.completion_tokens == transcript.usage.completion_tokens == 0
    num_listed = len(PROMPT) if kind == "scored echo" else 0
    assert [len(it["logprobs"]) for it in streamed] == [num_listed] * 2
    # A client that lost its connection at the end has nothing left to receive.
    resumed = Transcript("r", 1, 2, EventId.parse(events[-1][0]).positions, hides_output=True)
    assert stream(ANSWERS[kind](), resumed, read) == []


@pytest.mark.parametrize("ends", [[], [1, 3, 4], range(20)])
def test_usage_counts_the_tokens_of_the_reasoning(ends: Sequence[int]) -> None:
    texts = ["\nü?\n.\nyes", ".no", "abc"]
    read = interleaved(texts, ends)
    answer, transcript = ANSWERS["thought"](), Transcript("r", 1, len(texts))
    events = stream(answer, transcript, read)
    message = joined([chunk for _, chunk in events], len(texts))
    chunk: Any = answer.usage_chunk(transcript.usage)
    again, choices = Transcript("r", 1, len(texts)), [Collected() for _ in texts]
    for piece in read:
        output = again.read(0, piece)
        choices[output.choice].add(output)
    whole = json.loads("".join(ANSWERS["thought"]().encode_complete(choices, again.usage)))

    assert [each["thoughts"] for each in message] == ["ü?", "", "abc"]
    assert [each["text"] for each in message] == ["yes", "no", ""]
    # The token of the dot and those behind it are not counted.
    details = {"reasoning_tokens": len("\nü?\n".encode()) + 3}
    assert chunk["usage"]["completion_tokens_details"] == details
    assert whole["usage"] == chunk["usage"]
    assert "reasoning_content" not in whole["choices"][1]["message"]


def test_usage_after_resumption_counts_all_reasoning() -> None:
    read = interleaved(["hm.yes", "ü."], [1, 3])
    answer, transcript = ANSWERS["thought"](), Transcript("r", 1, 2)
    end = EventId.parse(stream(answer, transcript, read)[-1][0])
    again, resumed = ANSWERS["thought"](), Transcript("r", 1, 2, end.positions)
    for piece in read:
        assert not again.events(resumed.read(0, piece), resumed.usage)
    usage = answer.usage_chunk(transcript.usage)["usage"]
    assert usage and usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert again.usage_chunk(resumed.usage)["usage"] == usage


def test_completion_log_probabilities_have_text_offsets() -> None:
    answer = CompletionAnswer(ENVELOPE, TOKENIZER, has_logprobs=True)
    events = stream(answer, Transcript("r", 1, 1), interleaved(["abc"], [1]))
    assert [chunk["choices"][0]["logprobs"] for _, chunk in events] == [
        {
            "tokens": ["a"],
            "token_logprobs": [-97 / 256],
            "top_logprobs": [{"a": -0.5}],
            "text_offset": [0],
        },
        {
            "tokens": ["b", "c"],
            "token_logprobs": [-98 / 256, -99 / 256],
            "top_logprobs": [{"b": -0.5}, {"c": -0.5}],
            "text_offset": [1, 2],
        },
    ]


def test_chat_log_probabilities_have_the_bytes_of_each_token() -> None:
    answer = ChatAnswer(ENVELOPE, TOKENIZER, parser_of_text, has_logprobs=True)
    [(_, chunk)] = stream(answer, Transcript("r", 1, 1), interleaved(["aü"], []))
    content = chunk["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -97 / 256,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    half = {"token": "\N{REPLACEMENT CHARACTER}", "bytes": [0xC3]}
    assert content[1] == {
        **half,
        "logprob": -0xC3 / 256,
        "top_logprobs": [{**half, "logprob": -0.5}],
    }


#: Log probabilities of each token, besides its own.
NUM_TOP = 3
SILENT = 64


def scored(num_tokens: int, num_top: int = NUM_TOP) -> Collected:
    """Return a choice whose first ten tokens are no text to a Silent tokenizer."""
    tokens = [SILENT if i < 10 else 97 + i % 7 for i in range(num_tokens)]
    each = pb.TokenLogprobs(
        logprob=-0.5, rank=1, top_ids=range(97, 97 + num_top), top_logprobs=[-1.5] * num_top
    )
    return Collected([bytes(tokens).decode()], tokens, [each] * num_tokens, "stop")


class Counting(ByteTokenizer):
    """A tokenizer that counts the tokens that are written."""

    num_tokens = 0

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        self.num_tokens += 1
        return super().token_bytes(token_id, is_first=is_first)


class Silent(ByteTokenizer):
    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return None if token_id == SILENT else super().token_bytes(token_id)


def scored_answers(tokenizer: Tokenizer) -> list[Answer]:
    return [
        CompletionAnswer(ENVELOPE, tokenizer, has_logprobs=True),
        ChatAnswer(ENVELOPE, tokenizer, parser_of_text, has_logprobs=True),
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_whole_answer_parts_have_few_log_probabilities(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGPROBS_PER_PART", 10 * (1 + NUM_TOP))
    tokenizer = Counting()
    most = before = 0
    for _ in scored_answers(tokenizer)[index].encode_complete([scored(95), scored(20)], Usage()):
        most = max(most, tokenizer.num_tokens - before)
        before = tokenizer.num_tokens
    assert before >= 115 * (1 + NUM_TOP)
    assert most <= 10 * 3 * (1 + NUM_TOP)


@pytest.mark.parametrize("num_top", [0, NUM_TOP])
@pytest.mark.parametrize("num_tokens", [0, 1, 11, 35])
def test_whole_answer_parts_join_to_its_json(
    num_tokens: int, num_top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGPROBS_PER_PART", 10 * (1 + num_top))
    choice, tokenizer = scored(num_tokens, num_top), Silent()
    placed = logprobs.Alignment(tokenizer).add(
        choice.tokens, choice.logprobs, choice.text, is_end=True
    )
    for answer, expected in zip(
        scored_answers(tokenizer),
        (logprobs.of_completion(tokenizer, placed), logprobs.of_chat(tokenizer, placed)),
        strict=True,
    ):
        whole = json.loads("".join(answer.encode_complete([choice] * 2, Usage())))
        assert [each["logprobs"] for each in whole["choices"]] == [expected] * 2
    assert json.loads("".join(answer.encode_complete([], Usage())))["choices"] == []


class Read:
    """Generation whose pieces can all be read at once."""

    def __init__(self, pieces: Sequence[pb.GenerateResponse]) -> None:
        self._pieces = pieces

    async def pieces(self) -> AsyncIterator[tuple[int, pb.GenerateResponse]]:
        for piece in self._pieces:
            yield 0, piece

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("index", [0, 1])
async def test_whole_answer_yields_to_other_tasks(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGPROBS_PER_PART", 4)
    choice = finished("a" * 100, 0)
    turns, is_over = 0, False

    async def others() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    read: Any = Read([*pieces(choice, range(0, 100, 10))])
    answer = scored_answers(TOKENIZER)[index]
    data = await answering._collect_answer(read, Transcript("r", 1, 1), answer)
    is_over = True
    await task
    assert len(joined_logprobs(data)) == 100
    assert turns >= 10 + 100 // 2


def joined_logprobs(data: bytes) -> list[Any]:
    [shown] = json.loads(data)["choices"]
    found: list[Any] = shown["logprobs"].get("content") or shown["logprobs"]["tokens"]
    return found


class TokenizeCall:
    """A call of /tokenize."""

    def __init__(self, **body: Any) -> None:
        self._body = body

    async def fields(self, kind: type[TokenizeFields]) -> TokenizeFields:
        return parse(kind, self._body)


@pytest.mark.parametrize("num_tokens", [0, 40_000])
@pytest.mark.parametrize("has_strings", [False, True])
async def test_tokenize_encodes_long_lists_in_parts(
    num_tokens: int, has_strings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, lengths = 0, list[int]()

    async def with_text(length: int, work: Callable[[], Any]) -> Any:
        return work()

    async def join_parts(parts: Iterable[str]) -> bytes:
        parts = [*parts]
        lengths.extend(map(len, parts))
        return await endpoint.join_parts(parts)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(tokenizer, "with_text", with_text)
    monkeypatch.setattr("router.api.openai.texts.join_parts", join_parts)
    renderer: Any = None
    texts = Texts(ServedModels([tokenizer.ServedModel.load("fake")]), renderer)
    call: Any = TokenizeCall(prompt="a" * num_tokens, return_token_strs=has_strings)
    task = asyncio.create_task(others())
    response = await texts.tokenize(call)
    task.cancel()
    assert json.loads(bytes(response.body)) == {
        "count": num_tokens,
        "max_model_len": None,
        "tokens": [97] * num_tokens,
        "token_strs": ["a"] * num_tokens if has_strings else None,
    }
    assert turns >= len(lengths)
    # Each value has at most three characters and a comma.
    assert max(lengths) <= 4 * (1 << 14) + 2


class Large:
    """Endless source of events of ``num_bytes`` each, and a writer that records their lengths."""

    is_over = False
    is_writable = True

    def __init__(self, num_bytes: int) -> None:
        self.written: list[int] = []
        self.on_writable: Callable[[], None] = lambda: None
        self._event = b"x" * num_bytes

    def listen(self, on_more: Callable[[], None]) -> None:
        pass

    def poll(self) -> bytes:
        return self._event

    def write(self, data: bytes) -> None:
        self.written.append(len(data))


@pytest.mark.parametrize(("num_bytes", "at_once"), [(10, 640), (40 << 10, 80 << 10)])
async def test_stream_yields_to_others_after_many_or_large_events(
    num_bytes: int, at_once: int
) -> None:
    large: Any = Large(num_bytes)
    carrier = asyncio.create_task(event_stream._EventWriter(large, large, 0).write_all())
    for _ in range(5):
        await asyncio.sleep(0)
    carrier.cancel()
    await asyncio.gather(carrier, return_exceptions=True)
    assert set(large.written) == {at_once}


@pytest.mark.parametrize(
    ("error", "retry_after", "should_retry", "is_resumable"),
    [
        (QueueTimeout("late", retry_after_s=2.5), 2.5, True, False),
        (QueueFull("full"), None, True, False),
        (EngineFailed("broken"), None, True, False),
        (Cancelled("left"), None, False, False),
        (InvalidRequest("wrong"), None, False, False),
        (DataLoss("gone"), None, False, False),
        (DeadlineExceeded("over"), None, False, False),
        (AttemptsExhausted("lost"), None, False, False),
        (NoWorker("none"), None, False, False),
        (RouterStopping("bye"), None, True, True),
        (Moved("away"), None, True, True),
        (Unreachable("broke"), None, True, True),
        (LedgerUnavailable("away", retry_after_s=1.0), 1.0, True, True),
    ],
    ids=lambda it: it.slug if isinstance(it, EverliftError) else "",
)
def test_error_event_states_retry_and_resume_headers(
    error: EverliftError, retry_after: float | None, should_retry: bool, is_resumable: bool
) -> None:
    transcript = Transcript("mine-7", 1, 1)
    piece = pb.GenerateResponse(token_ids=[97], text="a")
    assert transcript.resume_headers == {"idempotency-key": "mine-7"}, "nothing was sent yet"
    transcript.read(0, piece)
    transcript.mark_read(0)
    resume = transcript.resume_headers
    assert resume == {"idempotency-key": "mine-7", "last-event-id": transcript.event_id}
    body = errors.streamed(error, {}, resume)["error"]
    assert body["code"] == error.slug
    assert (body["retry_after"], body["should_retry"]) == (retry_after, should_retry)
    assert body.get("resume") == (resume if is_resumable else None)
    assert all((value in body["message"]) == is_resumable for value in resume.values())
    assert should_retry == _openai_retries(error)


def _openai_retries(error: EverliftError) -> bool:
    """Return whether OpenAI's Python client retries, by status and headers."""
    should_retry = errors.headers(error).get("x-should-retry")
    status = error.http_status
    return should_retry != "false" and (status in (408, 409, 429) or status >= 500)


async def test_slow_reader_gets_no_comments() -> None:
    silent: Any = Large(10)
    silent.take = lambda: None
    silent.is_writable = False
    carrier = asyncio.create_task(event_stream._EventWriter(silent, silent, 0.01).write_all())
    await asyncio.sleep(0.1)
    assert not silent.written
    silent.is_writable = True
    await asyncio.sleep(0.1)
    assert set(silent.written) == {len(b": keep-alive\n\n")}
    carrier.cancel()
    await asyncio.gather(carrier, return_exceptions=True)
    num_written = len(silent.written)
    await asyncio.sleep(0.05)
    assert len(silent.written) == num_written <= 11


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_non_finite_log_probabilities_are_not_written(logprob: float) -> None:
    answer = ChatAnswer(ENVELOPE, TOKENIZER, parser_of_text, has_logprobs=True)
    piece = pb.GenerateResponse(
        token_ids=[97], text="a", logprobs=[TokenLogprobs(logprob, 5).to_proto()]
    )
    output = Transcript("r", 1, 1).read(0, piece)
    data = answer.data(output)
    assert data is not None
    json.loads(data, parse_constant=pytest.fail)


def test_usage_is_of_all_requests() -> None:
    transcript = Transcript("r", 2, 1)
    transcript.usage.prompt_tokens = 6
    for request in range(2):
        transcript.read(request, pb.GenerateResponse(token_ids=[1, 2, 3]))
        piece = pb.GenerateResponse(
            token_ids=[4],
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(prompt_tokens=3, output_tokens=4, cached_tokens=request + 1),
        )
        transcript.read(request, piece)
    answer = CompletionAnswer(ENVELOPE, TOKENIZER, has_logprobs=False)
    assert answer.usage_chunk(transcript.usage) == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "system_fingerprint": None,
        "choices": [],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 8,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def resumed(positions: Sequence[Position], texts: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the events of a stream that resumes at ``positions``; the outputs are ``texts``."""
    transcript = Transcript("r", 1, len(texts), positions)
    return stream(ANSWERS["completion"](), transcript, interleaved(texts, [3]))


def position(text: str, *, is_end: bool = False) -> Position:
    """Return the position of a client that has ``text`` of a choice."""
    tokens = list(text.encode())
    return Position(len(tokens), len(text), token_digest(tokens), is_end)


@pytest.mark.parametrize("had", ["", "ab", "abc", "abcd", "abcdef"])
def test_position_with_matching_digest_resumes(had: str) -> None:
    events = resumed([position(had)], ["abcdef"])
    assert "".join(chunk["choices"][0]["text"] for _, chunk in events) == "abcdef"[len(had) :]


@pytest.mark.parametrize(
    ("had", "cause"),
    [
        (position("abx"), "different tokens"),
        (position("xbcdef"), "different tokens"),
        (position("abcdefx"), "ended after 6 tokens"),
        (position("abcx", is_end=True), "different tokens"),
        (position("abcd", is_end=True), "did not end there"),
        (Position(0, 0, 7), "different tokens"),
    ],
)
def test_position_with_other_tokens_is_data_loss(had: Position, cause: str) -> None:
    with pytest.raises(DataLoss, match=f"choice 1 cannot be continued at token .*: .*{cause}"):
        resumed([BEGIN, had], ["", "abcdef"])


POSITIONS = st.builds(
    Position,
    st.integers(0, 10**6),
    st.integers(0, 10**7),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)


@given(
    st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True),
    st.lists(POSITIONS, min_size=1, max_size=5),
)
def test_event_id_round_trips(name: str, positions: list[Position]) -> None:
    event = EventId(name, positions)
    assert EventId.parse(str(event)) == event
    assert "\n" not in str(event)


@pytest.mark.parametrize(
    "text",
    [
        *("", "r", "r/", f"/{PLACE}", "r/1", "r/1.1", f"r/{PLACE},", f"r/-{PLACE}", "r/1.1.1"),
        *(f"r/{PLACE}e", f"r/{PLACE}.f", f"r/{PLACE}/{PLACE}", f"ü/{PLACE}", f"r/{PLACE}0"),
        *(f"r/\N{ARABIC-INDIC DIGIT ONE}{PLACE}", f"r/{'9' * 5000}{PLACE}", f"{'x' * 200}/{PLACE}"),
        *(f"r/{PLACE}\n", f"r/{PLACE} ", f"r/{PLACE.upper()}"),
    ],
)
def test_malformed_event_id_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        EventId.parse(text)


def test_event_id_of_an_unstarted_output_is_at_zero() -> None:
    assert str(EventId("r", [BEGIN])) == f"r/0.0.{token_digest(()):016x}"
