"""Handlers of ``/v1/responses``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from starlette.responses import Response
from starlette.types import ASGIApp

from everlift.errors import ConversationLocked, EverliftError, InvalidRequest, PromptTooLong
from everlift.v1 import inference_pb2 as pb
from router.api.chat_renderer import ChatRenderer, RenderedChat
from router.api.http.endpoint import Call, JsonResponse, cancel_on_disconnect
from router.api.http.event_stream import Events, EventStream
from router.api.http.generation import Generation
from router.api.http.transcript import Transcript
from router.api.openai.answering import Answering
from router.api.openai.conversations.stored import StoredConversation, StoredConversations
from router.api.openai.fields import Generation as GenerationFields
from router.api.openai.object_page import query_number
from router.api.openai.responses.answer import FROM_START, ResponseAnswer
from router.api.openai.responses.fields import InputTokensFields, ResponseFields
from router.api.openai.responses.item_page import item_page
from router.api.openai.responses.items import (
    input_turns,
    template_variables,
    tool_use,
    with_ids,
)
from router.api.openai.responses.record import Record
from router.api.openai.responses.stored import PREFIX, StoredResponses
from router.api.openai.submissions import check_response_size
from router.api.service import Inference, idempotency_key
from router.chat.conversation import Conversation, Turn
from router.requests import tokenizer
from router.requests.served_models import ServedModels
from router.requests.timing import Journal
from router.requests.tokenizer import ServedModel

#: Maximum number of attempts to add a response to a conversation that changes meanwhile.
_MAX_TRIES = 8
#: Roles of the messages that stay when a conversation is truncated.
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class _Earlier:
    """Part of the conversation before a response.

    ``session_id`` is the session that the response continues; empty if there is none. ``names`` are
    the earlier responses, if the request has ``previous_response_id``. ``conversation`` is the
    stored conversation to which the response must be added; None without a conversation, or if the
    response was added already.
    """

    turns: Sequence[Turn] = ()
    session_id: str = ""
    names: Sequence[str] = ()
    conversation: StoredConversation | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Request of a response before its submission."""

    name: str
    generation: GenerationFields
    message: pb.GenerateRequest
    answer: ResponseAnswer


class Responses:
    def __init__(
        self,
        answering: Answering,
        inference: Inference,
        renderer: ChatRenderer,
        models: ServedModels,
        stored: StoredResponses,
        conversations: StoredConversations,
    ) -> None:
        self._answering = answering
        self._inference = inference
        self._renderer = renderer
        self._models = models
        self._stored = stored
        self._conversations = conversations

    async def create(self, call: Call) -> ASGIApp:
        with self._answering.counting_rejections():
            name = self._answering.name_call(call)
            fields = await call.fields(ResponseFields)
        return await cancel_on_disconnect(call.request.receive, self._create(call, name, fields))

    async def _create(self, call: Call, name: str, fields: ResponseFields) -> ASGIApp:
        journal = Journal(call.arrived_at)
        with self._answering.counting_rejections():
            _check_storage(fields)
            prepared, is_added = await self._prepared_and_added(call, name, fields)
        try:
            return await self._submit(call, fields, prepared, journal)
        except EverliftError as error:
            if is_added and fields.conversation_id is not None:
                await self._conversations.withdraw_response(
                    call.caller, fields.conversation_id, prepared.name, error
                )
            raise

    async def _prepared_and_added(
        self, call: Call, name: str, fields: ResponseFields
    ) -> tuple[_Prepared, bool]:
        """Return a request, and whether this call added the response to its conversation.

        The request is prepared again, with the conversation's new items, when the conversation
        has changed in the meantime. Raises ConversationLocked if the conversation has an
        unfinished response, or has changed in each of _MAX_TRIES attempts. Raises OutOfRange if
        the conversation becomes too large, LedgerFull, and the errors of ``_earlier`` and
        ``_prepare``.
        """
        for _ in range(_MAX_TRIES):
            earlier = await self._earlier(call, fields, name)
            prepared = await self._prepare(call, name, fields, earlier)
            if earlier.conversation is None:
                return prepared, False
            if await self._conversations.add_response(
                call.caller, earlier.conversation, prepared.name
            ):
                return prepared, True
        raise ConversationLocked(
            f"other requests are changing the conversation {fields.conversation_id}: try again",
            field="conversation",
        )

    async def _prepare(
        self, call: Call, name: str, fields: ResponseFields, earlier: _Earlier
    ) -> _Prepared:
        rendered = await self._render(fields, earlier.turns)
        generation = fields.generation
        message = self._answering.chat_message(generation, rendered)
        message.clamp_max_tokens = True
        if (num_logprobs := fields.num_logprobs) is not None:
            message.sampling.logprobs = num_logprobs
            check_response_size(message, rendered.model.longest_sequence)
        session_id = earlier.session_id or f"resp-{secrets.token_hex(8)}"
        name = self._answering.set_session(call, name, generation, [message], session_id)
        record = Record.of(fields, await self._created_at(call, name), earlier.names)
        if fields.is_stored:
            message.attachment = await tokenizer.with_json(
                record.body, lambda: record.to_bytes(rendered.images)
            )
        parser = rendered.parser(name, 0, is_constrained=message.sampling.HasField("grammar"))
        vocabulary = self._answering.vocabulary(message)
        answer = ResponseAnswer(name, rendered.model.name, record, parser, vocabulary)
        return _Prepared(name, generation, message, answer)

    async def _created_at(self, call: Call, name: str) -> int:
        """Return the creation time of a response, in seconds since 1970.

        The time is that of the stored response if the client repeats a call with its idempotency
        key, else the present time. Raises LedgerUnavailable.
        """
        known = None
        if idempotency_key(call.headers):
            known = await self._stored.created_at(call.caller, name)
        return int(time.time()) if known is None else known

    async def _submit(
        self, call: Call, fields: ResponseFields, prepared: _Prepared, journal: Journal
    ) -> ASGIApp:
        name, message = prepared.name, prepared.message
        if not fields.background or fields.stream:
            return await self._answering.answer(
                call, name, prepared.generation, [message], [journal], prepared.answer
            )
        message.request_id = name
        submitted = await Generation.submit(
            self._inference, call.caller, [message], call.headers, [journal]
        )
        await submitted.aclose()
        return JsonResponse(prepared.answer.response("queued"))

    async def input_tokens(self, call: Call) -> Response:
        fields = await call.fields(InputTokensFields)
        model = self._models.requested(fields.model or "")
        earlier = await self._earlier(call, fields)
        conversation = await _conversation(fields, earlier.turns)
        ids = await self._renderer.token_ids(model, conversation)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def retrieve(self, call: Call) -> ASGIApp:
        query = call.request.query_params
        stored = await self._stored.get(call.caller, _id(call))
        if query.get("stream", "").lower() != "true":
            return JsonResponse(stored.body)
        after = query_number(query, "starting_after", FROM_START)
        answer = self._stored.answer(stored.live, stored.record, after)
        generation = await Generation.read(self._inference, call.caller, stored.name)
        transcript = Transcript(stored.name, 1, 1)
        transcript.usage.prompt_tokens = generation.prompt_tokens
        events = Events(generation, transcript, answer)
        keep_alive = self._answering.keep_alive(call)
        return await EventStream.await_first(events, call.params, keep_alive)

    async def cancel(self, call: Call) -> Response:
        stored = await self._stored.get(call.caller, _id(call))
        if not stored.record.body.get("background"):
            raise InvalidRequest("only a response with background true can be cancelled")
        await self._inference.cancel(call.caller, pb.CancelRequest(request_id=stored.name))
        return JsonResponse((await self._stored.get(call.caller, _id(call))).body)

    async def delete(self, call: Call) -> Response:
        name, record = _name(call), await self._stored.record(call.caller, _id(call))
        if (conversation_id := record.conversation_id) is not None:
            await self._conversations.remove_response(call.caller, conversation_id, name)
        await self._inference.forget(call.caller, pb.ForgetRequest(request_id=name))
        return JsonResponse({"id": _id(call), "object": "response", "deleted": True})

    async def input_items(self, call: Call) -> Response:
        record = await self._stored.record(call.caller, _id(call))
        items = with_ids(record.input_items, _name(call))
        return JsonResponse(item_page(items, call.request.query_params))

    async def _earlier(self, call: Call, fields: InputTokensFields, name: str = "") -> _Earlier:
        """Return what precedes a response with the request id ``name``.

        An empty ``name`` means that only tokens are counted. Raises ConversationLocked if ``name``
        is not empty and an earlier response of the conversation is unfinished. Raises
        InvalidRequest if the earlier responses cannot be continued, or if the request names both a
        response and a conversation. Raises UnknownRequest if an earlier response does not exist,
        UnknownModel if its model is no longer served, UnknownObject if the conversation does not
        exist, and LedgerUnavailable.
        """
        if fields.conversation_id is not None:
            if fields.previous_response_id is not None:
                raise InvalidRequest(
                    "conversation and previous_response_id exclude each other", field="conversation"
                )
            with _naming("conversation"):
                return await self._in_conversation(call, fields.conversation_id, name)
        if fields.previous_response_id is None:
            return _Earlier()
        with _naming("previous_response_id"):
            chain = await self._stored.chain(call.caller, fields.previous_response_id)
            turns = await tokenizer.with_json(
                [[stored.record.body["input"], stored.output_items] for stored in chain],
                lambda: [turn for stored in chain for turn in stored.turns],
            )
            return _Earlier(
                turns,
                chain[-1].live.request.session_id,
                [stored.name for stored in chain],
            )

    async def _in_conversation(self, call: Call, conversation_id: str, name: str) -> _Earlier:
        conversation = await self._conversations.get(call.caller, conversation_id)
        is_known = conversation.record.has_response(name)
        if is_known:
            # The client has sent the request again.
            record = conversation.record.before_response(name)
            conversation = replace(conversation, record=record)
        contents = await self._conversations.contents(call.caller, conversation)
        if name and contents.unfinished:
            raise ConversationLocked(
                f"the response {PREFIX}{contents.unfinished} of the conversation has not finished: "
                "wait for its end or cancel it"
            )
        turns = await tokenizer.with_json(contents.items, lambda: contents.turns)
        return _Earlier(turns, conversation_id, (), None if is_known else conversation)

    async def _render(self, fields: InputTokensFields, earlier: Sequence[Turn]) -> RenderedChat:
        conversation = await _conversation(fields, earlier)
        model = self._models.requested(fields.model or "")
        if fields.truncation != "auto":
            return await self._renderer.render(model, conversation)
        return await self._truncated(model, conversation)

    async def _truncated(self, model: ServedModel, conversation: Conversation) -> RenderedChat:
        """Return the prompt without as many of the oldest turns as the context requires.

        System messages stay, and so does everything from the last turn of the user onwards. The
        remainder of a shortened conversation begins with a turn of the user other than the first.
        Raises PromptTooLong if no such part fits. Bisection finds the number of turns to omit.
        """
        roles = [turn.role for turn in conversation.turns]
        first = next((i for i, role in enumerate(roles) if role not in _SYSTEM), 0)
        starts = [i for i, role in enumerate(roles) if role == "user" and i > first]
        low, high = 0, len(starts)
        best: RenderedChat | None = None
        while low <= high:
            middle = (low + high) // 2
            shorter = _without(conversation, starts[middle - 1] if middle else 0)
            if (rendered := await self._rendered_if_fits(model, shorter)) is not None:
                best, high = rendered, middle - 1
            else:
                low = middle + 1
        if best is None:
            raise PromptTooLong(
                "the last turn alone is longer than the context of "
                f"{model.longest_sequence} tokens",
                field="input",
            )
        return best

    async def _rendered_if_fits(
        self, model: ServedModel, conversation: Conversation
    ) -> RenderedChat | None:
        """Return the prompt of a conversation; None if the context has no room for an output."""
        try:
            rendered = await self._renderer.render(model, conversation)
            num_tokens = await self._renderer.count_tokens(rendered)
        except PromptTooLong:
            return None
        return rendered if num_tokens < model.longest_sequence else None


async def _conversation(fields: InputTokensFields, earlier: Sequence[Turn]) -> Conversation:
    """Return the conversation of a request that continues the turns ``earlier``.

    Instructions of earlier responses are not part of it, as in OpenAI's API.
    """
    raw = fields.input
    turns, tools = await tokenizer.with_json(
        [raw, fields.tools, fields.tool_choice], lambda: (input_turns(raw), tool_use(fields))
    )
    system = [Turn("system", (fields.instructions,))] if fields.instructions else []
    variables = template_variables(fields.reasoning)
    return Conversation((*system, *earlier, *turns), tools, template_variables=variables)


def _without(conversation: Conversation, start: int) -> Conversation:
    """Return a conversation without the turns before number ``start``, except system messages."""
    turns = conversation.turns
    system = tuple(turn for turn in turns[:start] if turn.role in _SYSTEM)
    return Conversation(
        system + turns[start:],
        conversation.tools,
        template_variables=conversation.template_variables,
    )


def _check_storage(fields: ResponseFields) -> None:
    """Raise InvalidRequest if a response must be stored but ``store`` is false."""
    if not fields.is_stored:
        for name in ("background", "conversation"):
            if getattr(fields, name):
                raise InvalidRequest(f"{name} needs store to be true", field=name)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Context manager that names ``field`` in errors that name no field."""
    try:
        yield
    except EverliftError as error:
        error.field = error.field or field
        raise


def _id(call: Call) -> str:
    response_id: str = call.request.path_params["response_id"]
    return response_id


def _name(call: Call) -> str:
    """Return the request id of a response without the tenant."""
    return _id(call).removeprefix(PREFIX)
