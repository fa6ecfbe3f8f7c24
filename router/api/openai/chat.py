"""Answers of ``/v1/chat/completions`` as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NotRequired

from typing_extensions import TypedDict

from everlift.text import Vocabulary
from router.api.http.streaming import Event
from router.api.http.transcript import Collected, NewOutput, Usage
from router.api.http.writer import around, array, encode
from router.api.openai import logprobs, prompt_logprobs
from router.api.openai.chunks import ChunkedAnswer, ChunkOptions
from router.api.openai.envelope import Envelope, UsageBody, usage_body, usage_so_far
from router.api.openai.logprobs import Alignment, ChatLogprobs
from router.api.openai.prompt_logprobs import PromptLogprobs, ScoredPrompt
from router.api.openai.token_ids import TokenIds
from router.chat.deltas import Arguments, CallBegins, Content, Delta, Reasoning
from router.chat.parsers.base import Parser, pieces_of
from router.chat.reasoning_tokens import ReasoningTokens


class Function(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: str
    function: Function


class Message(TypedDict):
    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    #: with return_token_ids
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: NotRequired[PromptLogprobs]
    #: with return_token_ids
    prompt_token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: FunctionDelta


class MessageDelta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


class ChunkChoice(TypedDict):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    #: with return_token_ids
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChunkChoice]
    usage: UsageBody | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    #: with return_token_ids, in the first chunk of each choice
    prompt_token_ids: NotRequired[list[int]]


_NO_OPTIONS = ChunkOptions()


class ChatAnswer(ChunkedAnswer):
    """Writer of chat completions.

    ``parser`` is called with the index of a choice, and returns a parser that separates the
    choice's text from its reasoning and tool calls. With ``has_reasoning`` the usage has the number
    of reasoning tokens. ``prompt`` is the prompt whose log probabilities are returned (vLLM's
    ``prompt_logprobs``), or None. A stream has them in the first chunk of the first choice.
    ``token_ids`` is None if no token ids are returned.
    """

    def __init__(
        self,
        envelope: Envelope,
        vocabulary: Vocabulary,
        parser: Callable[[int], Parser],
        *,
        has_logprobs: bool,
        has_reasoning: bool = False,
        prompt: ScoredPrompt | None = None,
        token_ids: TokenIds | None = None,
        options: ChunkOptions = _NO_OPTIONS,
    ) -> None:
        super().__init__(options)
        self._envelope = envelope
        self._vocabulary = vocabulary
        self._parser = parser
        self._has_logprobs = has_logprobs
        self._has_reasoning = has_reasoning
        self._prompt = prompt
        self._token_ids = token_ids
        #: counters of the choices that have begun, by index, if the model writes reasoning
        self._counters: dict[int, ReasoningTokens] = {}
        #: parsers of the choices that have begun, by index
        self._parsers: dict[int, Parser] = {}
        self._alignments: dict[int, Alignment] = {}

    def data(self, output: NewOutput, usage: Usage | None = None) -> str | None:
        """Return the chunk with the new output as JSON; None if there is nothing to send."""
        chunk = self.chunk(output, usage)
        return None if chunk is None else encode(chunk)

    def chunk(self, output: NewOutput, usage: Usage | None = None) -> ChatChunk | None:
        """Return a chunk with the new output as a dict; None if there is nothing to send.

        The chunk has the token counts so far if ``usage`` is given.
        """
        delta = _message_delta(self._deltas(output))
        logprobs = self._logprobs(output)
        prompt = self._prompt if output.is_first and output.choice == 0 else None
        ids = self._token_ids.new(output) if self._token_ids else []
        has_more = bool(ids or prompt or (logprobs and logprobs["content"]))
        if not (delta or output.finish_reason or has_more):
            return None
        if output.is_first:
            delta = {"role": "assistant", "content": "", **delta}
        choice: ChunkChoice = {
            "index": output.choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(output.finish_reason, self._parsers[output.choice]),
            "stop_reason": output.stop_reason,
        }
        so_far = None if usage is None else usage_so_far(self._with_reasoning(usage))
        chunk = self._chunk([choice], so_far)
        if prompt is not None:
            chunk["prompt_logprobs"] = prompt_logprobs.of_prompt(
                self._vocabulary, prompt, output.prompt_logprobs
            )
        if self._token_ids:
            choice["token_ids"] = ids
            if output.is_first:
                chunk["prompt_token_ids"] = self._token_ids.prompt(output.choice)
        return chunk

    def events(self, output: NewOutput, usage: Usage) -> Sequence[Event]:
        if output.is_known:
            # The usage has the reasoning tokens of this output, too.
            self._deltas(output)
            return ()
        return super().events(output, usage)

    def _deltas(self, output: NewOutput) -> list[Delta]:
        """Parse the new text, and return the parts of the message that the client lacks."""
        parser = self._begun(output.choice, output.tokens)
        if output.known_text:
            parser.feed(output.known_text)
        deltas = parser.feed(output.text)
        return deltas + parser.finish() if output.finish_reason else deltas

    def _begun(self, index: int, tokens: Sequence[int]) -> Parser:
        """Return the parser of a choice, which is made at the first call for this choice.

        The choice's next ``tokens`` are added to its counter of reasoning tokens, if the model
        writes reasoning.
        """
        if (parser := self._parsers.get(index)) is None:
            parser = self._parsers[index] = self._parser(index)
        if self._has_reasoning:
            if (counter := self._counters.get(index)) is None:
                counter = self._counters[index] = ReasoningTokens(self._vocabulary)
            counter.add(tokens)
        return parser

    def _with_reasoning(self, usage: Usage) -> Usage:
        """Return the token counts with the reasoning tokens of all choices so far."""
        if not self._has_reasoning:
            return usage
        reasoning_tokens = sum(
            counter.count(self._parsers[index].reasoning_ranges)
            for index, counter in self._counters.items()
        )
        return replace(usage, reasoning_tokens=reasoning_tokens)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage_body(self._with_reasoning(usage)))

    def encode_complete(self, choices: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """Yield the JSON of a complete answer in parts, each of which is encoded quickly.

        The first parts are empty strings: one is yielded after each piece of a choice is parsed, so
        that the caller can let other tasks run.
        """
        shown: list[ChatChoice] = []
        for index, choice in enumerate(choices):
            parser, deltas = self._begun(index, choice.tokens), list[Delta]()
            for piece in pieces_of(choice.text):
                deltas += parser.feed(piece)
                yield ""
            shown.append(self._choice(index, choice, deltas + parser.finish()))
        begin, end = around(self._completion(usage), "choices", [])
        written = map(self._written, shown, choices)
        if self._prompt is None:
            yield from array(begin, written, end)
            return
        yield from array(begin, written, end.removesuffix("}"))
        scores, before = choices[0].prompt_logprobs, ',"prompt_logprobs":'
        yield from prompt_logprobs.written_of_prompt(
            self._vocabulary, self._prompt, scores, before, "}"
        )

    def _completion(self, usage: Usage) -> ChatCompletion:
        completion: ChatCompletion = {
            "id": self._envelope.id,
            "object": "chat.completion",
            "created": self._envelope.created,
            "model": self._envelope.model,
            "system_fingerprint": self._envelope.fingerprint,
            "choices": [],
            "usage": usage_body(self._with_reasoning(usage)),
        }
        if self._token_ids:
            completion["prompt_token_ids"] = self._token_ids.prompt(0)
        return completion

    def _written(self, shown: ChatChoice, choice: Collected) -> Iterator[str]:
        if not self._has_logprobs:
            return iter([encode(shown)])
        begin, end = around(shown, "logprobs", None)
        return logprobs.written_of_chat(self._vocabulary, choice, begin, end)

    def _choice(self, index: int, choice: Collected, deltas: Sequence[Delta]) -> ChatChoice:
        """Return a choice, whose text was parsed as ``deltas``, without its log probabilities."""
        shown: ChatChoice = {
            "index": index,
            "message": _message(deltas),
            "logprobs": None,
            "finish_reason": _finish_reason(choice.finish_reason, self._parsers[index]),
            "stop_reason": choice.stop_reason,
        }
        if self._token_ids:
            shown["token_ids"] = choice.tokens
        return shown

    def _logprobs(self, output: NewOutput) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        if (alignment := self._alignments.get(output.choice)) is None:
            alignment = self._alignments[output.choice] = Alignment(self._vocabulary)
        return logprobs.of_chat(self._vocabulary, logprobs.placed(alignment, output))

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | None) -> ChatChunk:
        return {
            "id": self._envelope.id,
            "object": "chat.completion.chunk",
            "created": self._envelope.created,
            "model": self._envelope.model,
            "system_fingerprint": self._envelope.fingerprint,
            "choices": choices,
            "usage": usage,
        }


def _finish_reason(reason: str | None, parser: Parser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.has_calls else reason


def _message(deltas: Sequence[Delta]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for delta in deltas:
        match delta:
            case Content(text):
                texts.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case CallBegins(_, call_id, name):
                function: Function = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case Arguments(index, text):
                calls[index]["function"]["arguments"] += text
    content = "".join(texts)
    message: Message = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "content": content or None, "tool_calls": calls} if calls else message


def _message_delta(deltas: Sequence[Delta]) -> MessageDelta:
    """Merge parts of a message into one, with a single element for each tool call.

    The langchain client treats two elements of the same call in one chunk as two calls.
    """
    message: MessageDelta = {}
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                message["content"] = message.get("content", "") + text
            case Reasoning(text):
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case CallBegins(index, call_id, name):
                opening: FunctionDelta = {"name": name, "arguments": ""}
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": opening,
                }
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
