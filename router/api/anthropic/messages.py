"""Handlers of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp

from router.api.anthropic.answer import MessagesAnswer
from router.api.anthropic.conversation import conversation_of
from router.api.anthropic.fields import CountTokensFields, MessagesFields
from router.api.chat_renderer import ChatRenderer
from router.api.http.endpoint import Call, JsonResponse, cancel_on_disconnect
from router.api.openai.answering import Answering
from router.chat.conversation import Conversation
from router.requests import tokenizer
from router.requests.served_models import ServedModels
from router.requests.timing import Journal

T = TypeVar("T")


class Messages:
    def __init__(self, answering: Answering, renderer: ChatRenderer, models: ServedModels) -> None:
        self._answering = answering
        self._renderer = renderer
        self._models = models

    async def create(self, call: Call) -> ASGIApp:
        with self._answering.counting_rejections():
            name = self._answering.name_call(call)
            fields = await call.fields(MessagesFields)
        return await cancel_on_disconnect(call.request.receive, self._create(call, name, fields))

    async def _create(self, call: Call, name: str, fields: MessagesFields) -> ASGIApp:
        journal = Journal(call.arrived_at)
        with self._answering.counting_rejections():
            conversation = await _conversation(fields)
            model = self._models.requested(fields.model)
            rendered = await self._renderer.render(model, conversation)
            generation = fields.generation
            message = self._answering.chat_message(generation, rendered)
            message.clamp_max_tokens = True
            session = await _with_fields(fields, lambda: _session(fields))
            name = self._answering.set_session(call, name, generation, [message], session)
        parser = rendered.parser(name, 0, is_constrained=message.sampling.HasField("grammar"))
        answer = MessagesAnswer(name, fields.model, parser, fields.max_tokens)
        return await self._answering.answer(call, name, generation, [message], [journal], answer)

    async def count_tokens(self, call: Call) -> Response:
        fields = await call.fields(CountTokensFields)
        model = self._models.requested(fields.model)
        ids = await self._renderer.token_ids(model, await _conversation(fields))
        return JsonResponse({"input_tokens": len(ids)})


async def _conversation(fields: CountTokensFields) -> Conversation:
    return await _with_fields(fields, lambda: conversation_of(fields))


async def _with_fields(fields: CountTokensFields, work: Callable[[], T]) -> T:
    return await tokenizer.with_json([fields.system, fields.tools, fields.messages], work)


def _session(fields: MessagesFields) -> str:
    """Return a session's name for a request that marks a part of its prompt for caching, else "".

    The KV blocks of a session are retained between its turns. The name is a digest of the beginning
    of the conversation, which all its turns have in common.
    """
    blocks = [fields.system, fields.tools, fields.messages]
    if fields.cache_control is None and not _has_mark(blocks):
        return ""
    begin = json.dumps([fields.system, fields.tools, fields.messages[0].get("content")])
    return f"cached-{hashlib.sha256(begin.encode()).hexdigest()[:32]}"


def _has_mark(raw: Any) -> bool:
    """Return whether some message, tool or block has ``cache_control``."""
    if isinstance(raw, list):
        return any(map(_has_mark, raw))
    if not isinstance(raw, dict):
        return False
    return raw.get("cache_control") is not None or _has_mark(raw.get("content"))
