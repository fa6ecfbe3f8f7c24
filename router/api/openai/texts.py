"""Handlers of ``/tokenize`` and ``/detokenize``, compatible with vLLM."""

from __future__ import annotations

from starlette.responses import Response

from everlift.errors import InvalidRequest
from router.api.chat_renderer import ChatRenderer
from router.api.openai.chat_conversation import chat_conversation
from router.api.openai.endpoint import Call, JsonResponse
from router.api.openai.fields import DetokenizeFields, TokenizeFields
from router.requests import tokenizer
from router.requests.tokenizer import ServedModel


class Texts:
    def __init__(self, model: ServedModel, renderer: ChatRenderer) -> None:
        self._model = model
        self._renderer = renderer

    async def tokenize(self, call: Call) -> Response:
        fields = await call.fields(TokenizeFields)
        self._model.check_requested(fields.model or "")
        tokens = await self._tokens(fields)
        token_string = self._model.tokenizer.token_string
        strings = (
            await tokenizer.with_text(len(tokens), lambda: [*map(token_string, tokens)])
            if fields.return_token_strs
            else None
        )
        return JsonResponse(
            {
                "count": len(tokens),
                "max_model_len": self._model.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def _tokens(self, fields: TokenizeFields) -> tuple[int, ...]:
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if fields.messages is not None:
            return await self._renderer.token_ids(
                await chat_conversation(fields),
                add_special_tokens=fields.add_special_tokens is True,
            )
        text, has_special = fields.prompt or "", fields.add_special_tokens is not False
        return await tokenizer.with_text(
            len(text), lambda: self._model.encode(text, add_special_tokens=has_special)
        )

    async def detokenize(self, call: Call) -> Response:
        fields = await call.fields(DetokenizeFields)
        self._model.check_requested(fields.model or "")
        ids = fields.tokens
        text = await tokenizer.with_text(len(ids), lambda: self._model.decode(ids))
        return JsonResponse({"prompt": text})
