"""Handlers of ``/v1/responses``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from starlette.responses import Response
from starlette.types import ASGIApp

from everlift.errors import EverliftError, InvalidRequest, PromptTooLong
from everlift.v1 import inference_pb2 as pb
from router.api.chat_renderer import ChatRenderer, RenderedChat
from router.api.openai.answering import Answering
from router.api.openai.endpoint import Call, JsonResponse, cancel_on_disconnect
from router.api.openai.event_stream import Events, EventStream
from router.api.openai.generation import Generation
from router.api.openai.responses.answer import FROM_START, ResponseAnswer
from router.api.openai.responses.fields import InputTokensFields, ResponseFields
from router.api.openai.responses.items import (
    input_turns,
    template_variables,
    tool_use,
    with_ids,
)
from router.api.openai.responses.record import Record
from router.api.openai.responses.stored import StoredResponse, StoredResponses
from router.api.openai.transcript import Transcript
from router.api.service import Inference
from router.chat.conversation import Conversation, Turn, num_text_characters
from router.requests import tokenizer
from router.requests.timing import Journal
from router.requests.tokenizer import ServedModel

#: Maximum number of items on a page of a response's input, as in OpenAI's API, and the default.
_MAX_PAGE, _PAGE = 100, 20


class Responses:
    def __init__(
        self,
        answering: Answering,
        inference: Inference,
        renderer: ChatRenderer,
        model: ServedModel,
    ) -> None:
        self._answering = answering
        self._inference = inference
        self._renderer = renderer
        self._model = model
        self._stored = StoredResponses(inference, renderer, model)

    async def create(self, call: Call) -> ASGIApp:
        with self._answering.counting_rejections():
            name = self._answering.name_call(call)
            fields = await call.fields(ResponseFields)
        return await cancel_on_disconnect(call.request.receive, self._create(call, name, fields))

    async def _create(self, call: Call, name: str, fields: ResponseFields) -> ASGIApp:
        journal = Journal(call.arrived_at)
        with self._answering.counting_rejections():
            if fields.background and not fields.is_stored:
                raise InvalidRequest("background needs store to be true", field="background")
            chain = await self._chain(call, fields)
            rendered = await self._render(fields, chain)
            generation = fields.generation
            message = self._answering.chat_message(generation, rendered)
            message.clamp_max_tokens = True
            session_id = _session(chain)
            name = self._answering.set_session(call, name, generation, [message], session_id)
            record = Record.of(fields, int(time.time()), _names(chain))
            if fields.is_stored:
                message.attachment = record.to_bytes()
        parser = rendered.parser(name, 0, is_constrained=message.sampling.HasField("grammar"))
        vocabulary = self._answering.vocabulary(message)
        answer = ResponseAnswer(name, self._model.name, record, parser, vocabulary)
        if not fields.background or fields.stream:
            return await self._answering.answer(
                call, name, generation, [message], [journal], answer
            )
        message.request_id = name
        submitted = await Generation.submit(
            self._inference, call.caller, [message], call.headers, [journal]
        )
        await submitted.aclose()
        return JsonResponse(answer.response("queued"))

    async def input_tokens(self, call: Call) -> Response:
        fields = await call.fields(InputTokensFields)
        self._model.check_requested(fields.model or "")
        conversation = await _conversation(fields, await self._chain(call, fields))
        ids = await self._renderer.token_ids(conversation)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def retrieve(self, call: Call) -> ASGIApp:
        query = call.request.query_params
        stored = await self._stored.get(call.caller, _id(call))
        if query.get("stream", "").lower() != "true":
            return JsonResponse(stored.body)
        after = _number(query, "starting_after", FROM_START)
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
        stored = await self._stored.get(call.caller, _id(call))
        await self._inference.forget(call.caller, pb.ForgetRequest(request_id=stored.name))
        return JsonResponse({"id": _id(call), "object": "response", "deleted": True})

    async def input_items(self, call: Call) -> Response:
        query = call.request.query_params
        stored = await self._stored.get(call.caller, _id(call))
        items = with_ids(stored.input_items, stored.name)
        if query.get("order", "desc") != "asc":
            items.reverse()
        if after := query.get("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest(f"after: there is no item {after[:64]}", field="after")
            items = items[ids.index(after) + 1 :]
        limit = _number(query, "limit", _PAGE)
        if not 1 <= limit <= _MAX_PAGE:
            raise InvalidRequest(f"limit must be 1 to {_MAX_PAGE}", field="limit")
        page = items[:limit]
        return JsonResponse(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )

    async def _chain(self, call: Call, fields: InputTokensFields) -> list[StoredResponse]:
        """Return the responses that a request continues, the first one first."""
        if fields.previous_response_id is None:
            return []
        try:
            return await self._stored.chain(call.caller, fields.previous_response_id)
        except EverliftError as error:
            error.field = error.field or "previous_response_id"
            raise

    async def _render(
        self, fields: InputTokensFields, chain: Sequence[StoredResponse]
    ) -> RenderedChat:
        conversation = await _conversation(fields, chain)
        if fields.truncation != "auto":
            return await self._renderer.render(conversation)
        return await self._truncated(conversation)

    async def _truncated(self, conversation: Conversation) -> RenderedChat:
        """Return the prompt without the oldest turns, so that it fits into the context.

        System messages stay, and so does everything from the last turn of the user on. Raises
        PromptTooLong if that does not fit. The number of turns to omit is found by bisection.
        """
        starts = [i for i, turn in enumerate(conversation.turns) if turn.role == "user"][1:]
        low, high = 0, len(starts)
        best: RenderedChat | None = None
        while low <= high:
            middle = (low + high) // 2
            shorter = _without(conversation, starts[middle - 1] if middle else 0)
            if await self._fits(shorter):
                best, high = await self._renderer.render(shorter), middle - 1
            else:
                low = middle + 1
        if best is None:
            raise PromptTooLong(
                f"the last turn alone is longer than the context of "
                f"{self._model.longest_sequence} tokens",
                field="input",
            )
        return best

    async def _fits(self, conversation: Conversation) -> bool:
        try:
            ids = await self._renderer.token_ids(conversation)
        except PromptTooLong:
            return False
        return len(ids) < self._model.longest_sequence


async def _conversation(fields: InputTokensFields, chain: Sequence[StoredResponse]) -> Conversation:
    """Return the conversation of a request that continues the responses ``chain``.

    Instructions of earlier responses are not part of it, as in OpenAI's API.
    """
    raw = fields.input
    turns = await tokenizer.with_text(num_text_characters(raw), lambda: input_turns(raw))
    system = [Turn("system", (fields.instructions,))] if fields.instructions else []
    earlier = [turn for stored in chain for turn in stored.turns]
    variables = template_variables(fields.reasoning)
    return Conversation((*system, *earlier, *turns), tool_use(fields), template_variables=variables)


def _without(conversation: Conversation, start: int) -> Conversation:
    """Return a conversation without the turns before number ``start``, except system messages."""
    turns = conversation.turns
    system = tuple(turn for turn in turns[:start] if turn.role in ("system", "developer"))
    return Conversation(
        system + turns[start:],
        conversation.tools,
        template_variables=conversation.template_variables,
    )


def _session(chain: Sequence[StoredResponse]) -> str:
    """Return the session of the responses that a request continues, or a new one."""
    return (chain[-1].live.request.session_id if chain else "") or f"resp-{secrets.token_hex(8)}"


def _names(chain: Sequence[StoredResponse]) -> list[str]:
    return [stored.name for stored in chain]


def _id(call: Call) -> str:
    response_id: str = call.request.path_params["response_id"]
    return response_id


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of the query; ``default`` if it is missing. Raises InvalidRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequest(f"{name} must be a whole number", field=name)
    return int(text)
