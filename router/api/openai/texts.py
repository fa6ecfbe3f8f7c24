"""Handlers of ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, compatible with vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.responses import Response

from everlift.chat_templates import Templates, read_object, special_tokens
from everlift.errors import InvalidRequest
from router.api.chat_renderer import ChatRenderer
from router.api.http.endpoint import Call, JsonResponse, join_parts
from router.api.http.writer import encode, long_array
from router.api.openai.chat_conversation import chat_conversation
from router.api.openai.fields import DetokenizeFields, TokenizeFields
from router.requests import tokenizer
from router.requests.served_models import ServedModels
from router.requests.tokenizer import ServedModel

#: Fields of tokenizer_config.json that are paths of files.
_PATHS = ("name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file")


class Texts:
    def __init__(self, models: ServedModels, renderer: ChatRenderer) -> None:
        self._models = models
        self._renderer = renderer
        #: answers of ``tokenizer_info`` that were requested, by model
        self._infos: dict[str, dict[str, Any]] = {}

    async def tokenize(self, call: Call) -> Response:
        fields = await call.fields(TokenizeFields)
        model = self._models.requested(fields.model or "")
        tokens = await self._tokens(model, fields)
        token_string = model.tokenizer.token_string
        strings = (
            await tokenizer.with_text(len(tokens), lambda: [*map(token_string, tokens)])
            if fields.return_token_strs
            else None
        )
        body = await join_parts(_tokenized(model, tokens, strings))
        return Response(body, media_type="application/json")

    async def _tokens(self, model: ServedModel, fields: TokenizeFields) -> tuple[int, ...]:
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if fields.messages is not None:
            return await self._renderer.token_ids(
                model,
                await chat_conversation(fields),
                add_special_tokens=fields.add_special_tokens is True,
            )
        text, has_special = fields.prompt or "", fields.add_special_tokens is not False
        return await tokenizer.with_text(
            len(text), lambda: model.encode(text, add_special_tokens=has_special)
        )

    async def detokenize(self, call: Call) -> Response:
        fields = await call.fields(DetokenizeFields)
        model = self._models.requested(fields.model or "")
        ids = fields.tokens
        text = await tokenizer.with_text(len(ids), lambda: model.decode(ids))
        return JsonResponse({"prompt": text})

    async def tokenizer_info(self, call: Call) -> Response:
        """Return the tokenizer's configuration: the content of tokenizer_config.json without paths.

        The texts of special tokens and the chat template are included, whichever files have them.
        The query parameter ``model`` selects one of several models.
        """
        model = self._models.requested(call.request.query_params.get("model", ""))
        if (info := self._infos.get(model.name)) is None:
            info = await asyncio.to_thread(_tokenizer_info, model.directory)
            self._infos[model.name] = info
        return JsonResponse(info)


def _tokenized(
    model: ServedModel, tokens: Sequence[int], strings: Sequence[str | None] | None
) -> Iterator[str]:
    """Yield the JSON of an answer to ``/tokenize`` in parts, each of which is encoded quickly.

    ``strings`` has the texts of the ``tokens``; None if the client does not request them.
    """
    head = encode({"count": len(tokens), "max_model_len": model.max_model_len})
    yield head.removesuffix("}") + ',"tokens":'
    yield from long_array(tokens)
    yield ',"token_strs":'
    yield from ("null",) if strings is None else long_array(strings)
    yield "}"


def _tokenizer_info(directory: Path | None) -> dict[str, Any]:
    """Return the configuration of the tokenizer in ``directory``; None stands for the fake model.

    Raises UnknownModel for a malformed file.
    """
    if directory is None:
        return {"tokenizer_class": "ByteTokenizer", "chat_template": None}
    config, templates = read_object(directory / "tokenizer_config.json"), Templates.read(directory)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: value for name, value in config.items() if name not in _PATHS},
        **special_tokens(directory),
        "chat_template": None if templates is None else templates.default,
    }
