"""Handlers of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp

from everlift.errors import EverliftError, InvalidRequest
from everlift.explanation import server_timing
from everlift.request_id import in_session
from everlift.text import Vocabulary
from everlift.trace_context import TRACERESPONSE
from everlift.v1 import inference_pb2 as pb
from router.api import service
from router.api.chat_renderer import ChatRenderer, RenderedChat
from router.api.http.endpoint import Call, cancel_on_disconnect, join_parts
from router.api.http.event_id import EventId
from router.api.http.event_stream import Events, EventStream, KeepAlive
from router.api.http.generation import Generation
from router.api.http.streaming import StreamedAnswer
from router.api.http.transcript import Collected, Transcript, Usage
from router.api.openai import submissions
from router.api.openai.chat import ChatAnswer
from router.api.openai.chat_conversation import chat_conversation
from router.api.openai.chunks import ChunkOptions
from router.api.openai.completion import CompletionAnswer
from router.api.openai.envelope import Envelope
from router.api.openai.fields import ChatFields, CompletionFields
from router.api.openai.fields import Generation as GenerationFields
from router.api.openai.logprobs import Echo
from router.api.openai.prompt_logprobs import ScoredPrompt
from router.api.openai.token_ids import TokenIds
from router.api.service import Inference
from router.config import RouterConfig
from router.requests import tokenizer
from router.requests.manager import new_request_id
from router.requests.served_models import ServedModels
from router.requests.timing import Journal

_LAST_EVENT_ID = "last-event-id"
_EVENTS = "text/event-stream"


class Answer(StreamedAnswer, Protocol):
    def encode_complete(self, choices: Sequence[Collected], usage: Usage) -> Iterator[str]:
        """Yield the JSON of a complete answer in parts, each of which takes little time to encode.

        ``choices`` are in the order of their indices.
        """
        ...


class Answering:
    def __init__(
        self,
        config: RouterConfig,
        inference: Inference,
        models: ServedModels,
        renderer: ChatRenderer,
    ) -> None:
        self._config = config
        self._inference = inference
        self._models = models
        self._renderer = renderer

    async def completions(self, call: Call) -> ASGIApp:
        with self.counting_rejections():
            name = self.name_call(call)
            fields = await call.fields(CompletionFields)
            # Each prompt's request has a copy of the model's name, which must be a known one.
            self._models.requested(fields.model or "")
            messages = submissions.of_completion(fields)
            name = self.set_session(call, name, fields, messages)
            await self._tokenize_scored(messages)
            self._check_answer_size(fields, messages)
            token_ids = _token_ids(fields, messages)
            answer = CompletionAnswer(
                self._envelope(f"cmpl-{name}", fields),
                self.vocabulary(messages[0]),
                has_logprobs=fields.logprobs is not None,
                options=_chunk_options(fields),
                echoes=await self._echoes(fields, messages) if fields.echo else (),
                prompts=_scored_prompts(fields, messages),
                token_ids=token_ids,
            )
        journals = [Journal(call.arrived_at) for _ in messages]
        answering = self.answer(call, name, fields, messages, journals, answer, token_ids)
        return await cancel_on_disconnect(call.request.receive, answering)

    async def chat(self, call: Call) -> ASGIApp:
        with self.counting_rejections():
            name = self.name_call(call)
            fields = await call.fields(ChatFields)
        return await cancel_on_disconnect(call.request.receive, self._chat(call, name, fields))

    async def _chat(self, call: Call, name: str, fields: ChatFields) -> ASGIApp:
        journal = Journal(call.arrived_at)
        with self.counting_rejections():
            conversation = await chat_conversation(fields)
            model = self._models.requested(fields.model or "")
            rendered = await self._renderer.render(model, conversation)
            message = self.chat_message(fields, rendered)
            is_constrained = message.sampling.HasField("grammar")
            name = self.set_session(call, name, fields, [message])
            await self._tokenize_scored([message])
            self._check_answer_size(fields, [message])
            token_ids = _token_ids(fields, [message])
        answer = ChatAnswer(
            self._envelope(f"chatcmpl-{name}", fields),
            self.vocabulary(message),
            lambda choice: rendered.parser(name, choice, is_constrained=is_constrained),
            has_logprobs=bool(fields.logprobs),
            has_reasoning=rendered.formats.reasoning is not None,
            prompt=next(iter(_scored_prompts(fields, [message])), None),
            token_ids=token_ids,
            options=_chunk_options(fields),
        )
        return await self.answer(call, name, fields, [message], [journal], answer, token_ids)

    def name_call(self, call: Call) -> str:
        """Return the request id of a call: the one that the client sent, or else a new one.

        It is also sent in the answer's headers.
        """
        return _set_name(call, _sent_name(call) or new_request_id())

    def chat_message(self, fields: GenerationFields, rendered: RenderedChat) -> pb.GenerateRequest:
        """Return the request for a rendered conversation.

        Raises InvalidRequest if a field is invalid or cannot be combined with a required tool call.
        """
        message = submissions.of_chat(fields, rendered.prompt, rendered.grammar)
        special_tokens = rendered.model.tokenizer.special_tokens.values()
        message.keep_special_tokens |= rendered.needs(special_tokens)
        message.images.extend(image.data for image in rendered.images)
        return message

    def vocabulary(self, message: pb.GenerateRequest) -> Vocabulary:
        """Return the vocabulary with which the text of a request's output is made."""
        tokenizer = self._models.requested(message.model).tokenizer
        return tokenizer.with_special_tokens() if message.keep_special_tokens else tokenizer

    async def answer(
        self,
        call: Call,
        name: str,
        fields: GenerationFields,
        messages: Sequence[pb.GenerateRequest],
        journals: Sequence[Journal],
        answer: Answer,
        token_ids: TokenIds | None = None,
    ) -> ASGIApp:
        """Submit the requests of a call, and return the response with their output.

        The prompts' token ids are written to ``token_ids``, unless it is None. Raises the errors of
        ``Inference.generate``.
        """
        for message, request_id in zip(messages, _request_ids(name, len(messages)), strict=True):
            message.request_id = request_id
        transcript = _transcript(call, name, fields, messages)
        generation = await self._open(call, messages, journals, transcript)
        if token_ids is not None:
            token_ids.prompts = await self._prompt_ids(call, generation, messages)
        transcript.usage.prompt_tokens = generation.prompt_tokens
        if generation.trace is not None:
            call.response_headers[TRACERESPONSE] = str(generation.trace)
        if not fields.stream:
            body = await _collect_answer(generation, transcript, answer)
            if transcript.spans:
                call.response_headers["server-timing"] = server_timing(transcript.spans)
            return Response(body, media_type="application/json")
        events = Events(generation, transcript, answer, has_ids=_reads_events(call))
        return await EventStream.await_first(events, call.params, self.keep_alive(call))

    async def _prompt_ids(
        self, call: Call, generation: Generation, messages: Sequence[pb.GenerateRequest]
    ) -> list[Sequence[int]]:
        """Return the token ids of the prompts.

        An error or cancellation closes ``generation`` and is raised again.
        """
        try:
            names = [message.request_id for message in messages]
            return [await self._inference.prompt_ids(call.caller, name) for name in names]
        except BaseException:
            await generation.aclose()
            raise

    def keep_alive(self, call: Call) -> KeepAlive:
        """Return how to keep the connection of a streamed answer open."""
        has_comments = self._config.keep_alive_comments == "always" or _reads_events(call)
        return KeepAlive(self._config.keep_alive, has_comments)

    async def _open(
        self,
        call: Call,
        messages: Sequence[pb.GenerateRequest],
        journals: Sequence[Journal],
        transcript: Transcript,
    ) -> Generation:
        if _LAST_EVENT_ID not in call.headers:
            return await Generation.submit(
                self._inference, call.caller, messages, call.headers, journals
            )
        return await Generation.attach(
            self._inference, call.caller, messages, had_output=transcript.had_output
        )

    def set_session(
        self,
        call: Call,
        name: str,
        fields: GenerationFields,
        messages: Sequence[pb.GenerateRequest],
        default: str = "",
    ) -> str:
        """Set the session of ``messages``, and return the request id of the call.

        The session is that of the header, else that of the client's fields, else ``default``; empty
        means no session. The header's session is only set when the messages are submitted.

        ``name`` is returned unchanged if the client sent a request id. Otherwise the session's tag,
        if there is a session, is appended to ``name`` (``in_session``). The result is then sent in
        the answer's headers. Raises OutOfRange if a session id in a field is too long.
        """
        # The header takes precedence; it is applied when the messages are submitted.
        session_id = call.headers.get(service.SESSION_ID, "")
        if not session_id:
            session_id = submissions.session_id(fields, self._config.session_from) or default
            for message in messages:
                message.session_id = session_id
        # The id of a resumed stream has the tag already.
        return name if _sent_name(call) else _set_name(call, in_session(name, session_id))

    def _check_answer_size(
        self, fields: GenerationFields, messages: Sequence[pb.GenerateRequest]
    ) -> None:
        if fields.stream:
            submissions.check_streamed_size(messages)
        else:
            model = self._models.requested(fields.model or "")
            submissions.check_unstreamed_size(messages, model.longest_sequence)

    def _envelope(self, answer_id: str, fields: GenerationFields) -> Envelope:
        # Answers have the name that the client used.
        model = self._models.requested(fields.model or "")
        name, fingerprint = fields.model or model.name, model.fingerprint
        return Envelope(answer_id, int(time.time()), name, fingerprint or None)

    async def _tokenize_scored(self, messages: Sequence[pb.GenerateRequest]) -> None:
        """Tokenise the texts of prompts whose log probabilities are requested.

        The token ids replace the text in the message, because the answer names these tokens. Tokens
        of earlier turns of a session are not reused. Raises PromptTooLong if a text is far longer
        than the context.
        """
        for message in messages:
            if message.sampling.HasField("prompt_logprobs") and message.text:
                encode = partial(self._encode, message)
                message.tokens.ids.extend(await tokenizer.with_text(len(message.text), encode))

    def _encode(self, message: pb.GenerateRequest) -> Sequence[int]:
        has_added = message.add_special_tokens or not message.HasField("add_special_tokens")
        model = self._models.requested(message.model)
        return model.encode_prompt(message.text, add_special_tokens=has_added)

    async def _echoes(
        self, fields: CompletionFields, messages: Sequence[pb.GenerateRequest]
    ) -> list[str | Echo]:
        prompts, decode = fields.prompts, self.vocabulary(messages[0]).decode
        model = self._models.requested(fields.model or "")
        for prompt in prompts:
            model.check_prompt(prompt)
        num_ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        texts = await tokenizer.with_text(
            num_ids,
            lambda: [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts],
        )
        num_top = fields.logprobs
        echoes: Sequence[str | Echo] = texts
        if num_top is not None:
            pairs = zip(texts, messages, strict=True)
            echoes = [Echo(text, message.tokens.ids, num_top) for text, message in pairs]
        return [echo for echo in echoes for _ in range(fields.n or 1)]

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Context manager that counts an error as a rejected submission, and raises it again.

        The context must contain only code that runs before a request is submitted.
        """
        try:
            yield
        except EverliftError as error:
            self._inference.count_rejected(error)
            raise


async def _collect_answer(generation: Generation, transcript: Transcript, answer: Answer) -> bytes:
    choices = [Collected() for _ in range(transcript.num_choices)]
    async with aclosing(generation):
        async for index, piece in generation.pieces():
            output = transcript.read(index, piece)
            choices[output.choice].add(output)
            # Output that is already available is read without a pause, so other tasks get a turn
            # here.
            if len(piece.logprobs) > 1:
                await asyncio.sleep(0)
    return await join_parts(answer.encode_complete(choices, transcript.usage))


def _sent_name(call: Call) -> str:
    """Return the request id that the client sent; empty if it sent none."""
    named = pb.GenerateRequest()
    if _LAST_EVENT_ID in call.headers:
        named.request_id = EventId.parse(call.headers[_LAST_EVENT_ID]).name
    service.apply_headers(named, call.headers)
    return named.request_id


def _set_name(call: Call, name: str) -> str:
    """Send ``name`` in the answer's headers, and return it."""
    headers = call.response_headers
    if headers.get(service.X_REQUEST_ID) in (None, headers.get(service.IDEMPOTENCY_KEY)):
        headers[service.X_REQUEST_ID] = name
    headers[service.IDEMPOTENCY_KEY] = name
    return name


def _token_ids(fields: GenerationFields, messages: Sequence[pb.GenerateRequest]) -> TokenIds | None:
    """Return a holder of the answer's token ids, or None if the client does not request them.

    Raises OutOfRange if the prompts' token ids would make the answer too large.
    """
    if not fields.return_token_ids:
        return None
    submissions.check_returned_ids(messages)
    return TokenIds(messages[0].n)


def _chunk_options(fields: GenerationFields) -> ChunkOptions:
    options = fields.stream_options
    return ChunkOptions(
        has_usage=bool(options and options.include_usage),
        has_continuous_usage=bool(options and options.has_continuous_usage),
    )


def _scored_prompts(
    fields: GenerationFields, messages: Sequence[pb.GenerateRequest]
) -> list[ScoredPrompt]:
    """Return, for each choice, the prompt whose log probabilities the answer has."""
    num_top = fields.prompt_logprobs
    if num_top is None:
        return []
    prompts = [ScoredPrompt(message.tokens.ids, num_top) for message in messages]
    return [prompt for prompt in prompts for _ in range(fields.n or 1)]


def _reads_events(call: Call) -> bool:
    """Return whether the client parses all fields of server-sent events, not only ``data``.

    This is assumed of a client that sends last-event-id, or that accepts text/event-stream.
    """
    return _LAST_EVENT_ID in call.headers or _EVENTS in call.headers.get("accept", "").lower()


def _request_ids(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}:{index}" for index in range(count)]


def _transcript(
    call: Call, name: str, fields: GenerationFields, messages: Sequence[pb.GenerateRequest]
) -> Transcript:
    choices_each, hides_output = messages[0].n, fields.max_tokens == 0
    transcript = Transcript(name, len(messages), choices_each, hides_output=hides_output)
    if (last := call.headers.get(_LAST_EVENT_ID)) is None:
        return transcript
    event = EventId.parse(last)
    if not fields.stream:
        raise InvalidRequest("last-event-id needs stream to be true", field=_LAST_EVENT_ID)
    if len(event.positions) != transcript.num_choices:
        raise InvalidRequest("last-event-id belongs to another request", field=_LAST_EVENT_ID)
    return Transcript(name, len(messages), choices_each, event.positions, hides_output=hides_output)
