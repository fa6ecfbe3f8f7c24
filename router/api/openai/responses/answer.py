"""Answers of ``/v1/responses`` as JSON and as events. Pure.

The events of a response depend only on the tokens of its output. The division of the output into
pieces changes only the length of deltas. Each character of a delta has a sequence number of its
own, and the event has the number of its last character. Every other event has one number, but an
error after which the stream can be continued repeats the last one. A stream can therefore be read
again from any number on, at any router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from everlift.errors import EverliftError
from everlift.text import Vocabulary
from everlift.v1 import inference_pb2 as pb
from router.api.http import errors
from router.api.http.streaming import Event
from router.api.http.transcript import Collected, NewOutput, Usage
from router.api.http.writer import encode
from router.api.openai.responses.items import Item, item_id
from router.api.openai.responses.logprobs import ContentLogprobs, ContentToken
from router.api.openai.responses.record import Record
from router.chat.deltas import Arguments, CallBegins, Content, Delta, Reasoning
from router.chat.parsers.base import Parser, pieces_of
from router.chat.reasoning_tokens import ReasoningTokens


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseBody(TypedDict):
    """Response; further members, which are not listed here, repeat the request and its defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Item]
    usage: ResponseUsage | None


class InputTokenCount(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


#: Sequence number before that of the first event.
FROM_START = -1


class OutputItems:
    """Items of a response's output, and the events with which they are streamed."""

    def __init__(
        self,
        name: str,
        after: int,
        logprobs: ContentLogprobs | None,
        own_names: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Create an empty output; ``name`` is the name of the response.

        Events up to the sequence number ``after`` are left out. ``logprobs`` has the log
        probabilities of the content; None if they are not requested. ``own_names`` has the
        ``namespace`` and ``name`` of functions in namespaces, by joined name (namespaces.py).
        """
        self.items: list[Item] = []
        self._name = name
        self._number = 0
        self._after = after
        self._logprobs = logprobs
        self._own_names = own_names

    @property
    def last_number(self) -> int:
        """Return the sequence number of the last event; FROM_START if there is none."""
        return self._number - 1

    def event(self, kind: str, **members: Any) -> list[Event]:
        """Return an event as a list; an empty list if the client has it."""
        number = self._number
        self._number += 1
        if number <= self._after:
            return []
        return [Event(encode({"type": kind, "sequence_number": number, **members}), kind)]

    def add(self, delta: Delta) -> list[Event]:
        """Add the next part of the output, and return its events."""
        match delta:
            case Content(text):
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                events = self._open_text("message", "msg", part)
                return events + self._content(text)
            case Reasoning(text):
                part = {"type": "reasoning_text", "text": ""}
                events = self._open_text("reasoning", "rs", part)
                return events + self._text("response.reasoning_text.delta", text)
            case CallBegins(_, call_id, name):
                names = self._own_names.get(name, {"name": name})
                item = {"type": "function_call", "call_id": call_id, **names, "arguments": ""}
                return self.close() + self._open("fc", item)
            case Arguments(_, text):
                return self._arguments(text)

    def close(self, status: str = "completed") -> list[Event]:
        """End the open item, if any, and return the events of its end."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item = self.items[-1]
        item["status"] = status
        place = self._place
        events: list[Event] = []
        if item["type"] == "function_call":
            done = "response.function_call_arguments.done"
            members = {"arguments": item["arguments"], "name": item["name"]}
            events += self.event(done, **place, **members)
        else:
            part = item["content"][0]
            is_message = item["type"] == "message"
            kind = "output_text" if is_message else "reasoning_text"
            if is_message:
                self._take_logprobs(0)
            more: dict[str, Any] = {"logprobs": part["logprobs"]} if is_message else {}
            where = {**place, "content_index": 0}
            events += self.event(f"response.{kind}.done", **where, text=part["text"], **more)
            events += self.event("response.content_part.done", **where, part=part)
        index = place["output_index"]
        return events + self.event("response.output_item.done", output_index=index, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _open(self, prefix: str, item: Item) -> list[Event]:
        index = len(self.items)
        item = {"id": item_id(prefix, self._name, index), "status": "in_progress", **item}
        self.items.append(item)
        return self.event("response.output_item.added", output_index=index, item=item)

    def _open_text(self, kind: str, prefix: str, part: Item) -> list[Event]:
        last = self.items[-1] if self.items else {}
        if last.get("type") == kind and last["status"] == "in_progress":
            return []
        own: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        events = self.close() + self._open(prefix, {"type": kind, **own, "content": []})
        self.items[-1]["content"].append(part)
        added = "response.content_part.added"
        return events + self.event(added, **self._place, content_index=0, part=part)

    def _content(self, text: str) -> list[Event]:
        tokens = self._take_logprobs(len(text))
        # Each token belongs to a character, so that a stream that is read again has it once.
        num_known = max(0, self._after + 1 - self._number)
        lacking = [it.scores for it in tokens if it.last >= num_known and not it.is_cut]
        return self._text("response.output_text.delta", text, logprobs=lacking)

    def _take_logprobs(self, num_characters: int) -> list[ContentToken]:
        """Return the tokens of the next characters of the content; none without log probabilities.

        The log probabilities of these tokens are added to the open message.
        """
        if self._logprobs is None:
            return []
        tokens = self._logprobs.take(num_characters)
        self.items[-1]["content"][0]["logprobs"] += [it.scores for it in tokens]
        return tokens

    def _text(self, kind: str, text: str, **members: Any) -> list[Event]:
        self.items[-1]["content"][0]["text"] += text
        return self._delta(kind, text, content_index=0, **members)

    def _arguments(self, text: str) -> list[Event]:
        self.items[-1]["arguments"] += text
        return self._delta("response.function_call_arguments.delta", text)

    def _delta(self, kind: str, text: str, **members: Any) -> list[Event]:
        first = self._number
        self._number += len(text)
        lacking = text[max(0, self._after + 1 - first) :]
        if not lacking:
            return []
        event = {
            "type": kind,
            "sequence_number": self._number - 1,
            **self._place,
            "delta": lacking,
            **members,
        }
        return [Event(encode(event), kind)]


class ResponseAnswer:
    """Writer of a response.

    ``parser`` separates the output text from reasoning and tool calls. ``vocabulary`` is the one
    with which the text was made. A stream begins after the event with the sequence number
    ``after``.
    """

    def __init__(
        self,
        name: str,
        model: str,
        record: Record,
        parser: Parser,
        vocabulary: Vocabulary,
        after: int = FROM_START,
    ) -> None:
        self._name = name
        # Answers have the name that the client used.
        self._model = record.body.get("model") or model
        self._record = record
        self._parser = parser
        self._reasoning_tokens = ReasoningTokens(vocabulary)
        has_logprobs = record.has_logprobs
        self._logprobs = ContentLogprobs(vocabulary, parser) if has_logprobs else None
        self._output = OutputItems(name, after, self._logprobs, record.own_names)
        self._finish_reason: str | None = None
        self._is_begun = False

    def first_events(self, usage: Usage) -> list[Event]:
        self._is_begun = True
        response = self.response("in_progress")
        return [
            *self._output.event("response.created", response=response),
            *self._output.event("response.in_progress", response=response),
        ]

    def events(self, output: NewOutput, usage: Usage) -> list[Event]:
        if not self._is_begun:
            # The client has the first events already, but they count.
            self.first_events(usage)
        text = output.known_text + output.text
        self._add_tokens(output.tokens, output.logprobs, text, is_end=bool(output.finish_reason))
        self._add(output.known_text)
        events = self._add(output.text)
        if output.finish_reason:
            events += self._finish(output.finish_reason)
        return events

    def last_events(self, usage: Usage, spans: Sequence[pb.Span]) -> list[Event]:
        status = self.status
        response = self.response(status, usage)
        return self._output.event(f"response.{status}", response=response)

    def error_events(
        self, error: EverliftError, params: Mapping[str, str], resume: Mapping[str, str]
    ) -> list[Event]:
        detail = errors.streamed(error, params, resume)["error"]
        if "resume" in detail:
            # The response goes on. The event must not count: the client continues the stream after
            # the last number that it has, at this or another router.
            number = self._output.last_number
            message = detail["message"]
            if self._record.is_stored:
                path = f"/v1/responses/resp_{self._name}?stream=true&starting_after={number}"
                cause = errors.described(error, params)["error"]["message"]
                message = f"{cause}; to continue, GET {path}"
            event = {
                "type": "error",
                "sequence_number": number,
                "code": detail["code"],
                "message": message,
                "param": detail["param"],
            }
            return [Event(encode(event), "error")]
        events = self.cut_off()
        response = self.response("failed")
        response["error"] = {"code": detail["code"], "message": detail["message"]}
        return events + self._output.event("response.failed", response=response)

    def cut_off(self) -> list[Event]:
        """End the open item, if any, with the status incomplete, and return the events of its end.

        The call is for an output that stops without a finish reason, for example after a
        cancellation.
        """
        return self._output.close("incomplete")

    def encode_complete(self, choices: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """Yield the JSON of a complete response, after an empty string for each parsed piece."""
        [choice] = choices
        reason = choice.finish_reason
        for _ in self.read(choice.text, choice.tokens, choice.logprobs, reason):
            yield ""
        yield encode(self.response(self.status, usage))

    def read(
        self,
        text: str,
        tokens: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        finish_reason: str | None,
    ) -> Iterator[None]:
        """Add a whole output, and yield after each piece of its text.

        The caller must exhaust the iterator. ``finish_reason`` is None if the output is unfinished.
        """
        self._add_tokens(tokens, logprobs, text, is_end=bool(finish_reason))
        for piece in pieces_of(text):
            self._add(piece)
            yield
        if finish_reason:
            self._finish(finish_reason)

    @property
    def status(self) -> str:
        """Status of a response whose output has ended: "completed", or "incomplete" if cut off."""
        return "incomplete" if self._finish_reason == "length" else "completed"

    def response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        """Return the response with the output so far.

        The member ``usage`` is null if the argument is None, as for an unfinished response.
        """
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._record.created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": self._output.items,
            "usage": None if usage is None else self._usage(usage),
            **self._record.echoed,
        }

    def _add_tokens(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        text: str,
        *,
        is_end: bool,
    ) -> None:
        self._reasoning_tokens.add(tokens)
        if self._logprobs is not None:
            self._logprobs.add(tokens, logprobs, text, is_end=is_end)

    def _add(self, text: str) -> list[Event]:
        return [event for delta in self._parser.feed(text) for event in self._output.add(delta)]

    def _finish(self, reason: str) -> list[Event]:
        events = [event for delta in self._parser.finish() for event in self._output.add(delta)]
        self._finish_reason = reason
        return events + self._output.close(self.status)

    def _usage(self, usage: Usage) -> ResponseUsage:
        reasoning = self._reasoning_tokens.count(self._parser.reasoning_ranges)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
