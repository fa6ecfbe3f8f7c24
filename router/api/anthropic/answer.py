"""Answers of ``/v1/messages`` as JSON and as events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from everlift.errors import EverliftError
from everlift.v1 import inference_pb2 as pb
from router.api.anthropic.errors import described
from router.api.http.streaming import Event
from router.api.http.transcript import Collected, NewOutput, Usage
from router.api.http.writer import encode
from router.chat.checks import is_encodable
from router.chat.deltas import Arguments, CallBegins, Content, Delta, Reasoning
from router.chat.parsers.base import Parser, pieces_of

Block = dict[str, Any]
_EMPTY: Mapping[str, Block] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesUsage(TypedDict):
    """Token counts; ``input_tokens`` leaves out those that were read from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(TypedDict):
    input_tokens: int


class MessagesAnswer:
    """Writer of a message.

    ``parser`` splits the model's output into text, reasoning and tool calls. ``max_tokens`` is the
    requested limit. An output that was cut off with fewer tokens has filled the context; its stop
    reason is ``model_context_window_exceeded``.
    """

    def __init__(self, name: str, model: str, parser: Parser, max_tokens: int) -> None:
        self._name = name
        self._model = model
        self._parser = parser
        self._max_tokens = max_tokens
        self._num_blocks = 0
        #: type of the open content block; empty if there is none
        self._open = ""
        self._stop: tuple[str | None, str | None] = None, None

    def first_events(self, usage: Usage) -> list[Event]:
        return [_event("message_start", message=self._message([], usage))]

    def events(self, output: NewOutput, usage: Usage) -> list[Event]:
        if output.known_text:
            for delta in self._parser.feed(output.known_text):
                self._delta_events(delta)
        deltas = self._parser.feed(output.text)
        if output.finish_reason:
            deltas += self._parser.finish()
        events = [event for delta in deltas for event in self._delta_events(delta)]
        if output.finish_reason:
            events += self._close()
            self._stop = self._stopped(output.finish_reason, output.stop_reason, usage)
        return events

    def last_events(self, usage: Usage, spans: Sequence[pb.Span]) -> list[Event]:
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [
            _event("message_delta", delta=delta, usage=_usage(usage)),
            _event("message_stop"),
        ]

    def error_events(
        self, error: EverliftError, params: Mapping[str, str], resume: Mapping[str, str]
    ) -> list[Event]:
        return [Event(encode(described(error, params, self._name)), "error")]

    def encode_complete(self, choices: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """Yield the JSON of a complete message, after an empty string for each parsed piece."""
        [choice] = choices
        deltas: list[Delta] = []
        for piece in pieces_of(choice.text):
            deltas += self._parser.feed(piece)
            yield ""
        body = self._message(_content(deltas + self._parser.finish()), usage)
        stopped = self._stopped(choice.finish_reason, choice.stop_reason, usage)
        body["stop_reason"], body["stop_sequence"] = stopped
        yield encode(body)

    def _delta_events(self, delta: Delta) -> list[Event]:
        match delta:
            case Content(text):
                return self._text_events("text", {"type": "text_delta", "text": text})
            case Reasoning(text):
                return self._text_events("thinking", {"type": "thinking_delta", "thinking": text})
            case CallBegins(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*self._close(), self._begin("tool_use", block)]
            case Arguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _text_events(self, kind: str, delta: Block) -> list[Event]:
        if self._open == kind:
            return [self._delta(delta)]
        return [*self._close(), self._begin(kind, _EMPTY[kind]), self._delta(delta)]

    def _begin(self, kind: str, block: Block) -> Event:
        self._open = kind
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: Block) -> Event:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._num_blocks - 1)]

    def _stopped(
        self, finish_reason: str | None, stop_reason: str | int | None, usage: Usage
    ) -> tuple[str | None, str | None]:
        """Return the stop_reason and the stop_sequence of the message."""
        if finish_reason == "length":
            is_full = usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if isinstance(stop_reason, str):
            return "stop_sequence", stop_reason
        kind = "tool_use" if self._parser.has_calls else "end_turn"
        return kind if finish_reason else None, None

    def _message(self, content: list[Block], usage: Usage) -> MessageBody:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _event(kind: str, **members: Any) -> Event:
    return Event(encode({"type": kind, **members}), kind)


def _usage(usage: Usage) -> MessagesUsage:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _content(deltas: Sequence[Delta]) -> list[Block]:
    blocks: list[Block] = []
    arguments: dict[int, str] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                _append(blocks, "text", text)
            case Reasoning(text):
                _append(blocks, "thinking", text)
            case CallBegins(_, call_id, name):
                blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Arguments(index, text):
                arguments[index] = arguments.get(index, "") + text
    calls = [block for block in blocks if block["type"] == "tool_use"]
    for index, text in arguments.items():
        calls[index]["input"] = _object(text)
    return blocks


def _append(blocks: list[Block], kind: str, text: str) -> None:
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append(dict(_EMPTY[kind]))
    blocks[-1][kind] += text


def _object(text: str) -> object:
    """Return the JSON object in a call's arguments.

    The object is empty if the model wrote none, or one that a body in JSON and UTF-8 cannot have.
    """
    try:
        value = json.loads(text)
        is_valid = isinstance(value, dict) and is_encodable(value)
    except (ValueError, RecursionError):
        return {}
    return value if is_valid else {}
