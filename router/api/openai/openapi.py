"""OpenAPI description of the HTTP server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema
from typing_extensions import TypedDict

from router.api.anthropic.answer import MessageBody, TokenCount
from router.api.anthropic.errors import AnthropicErrorBody
from router.api.anthropic.fields import CountTokensFields, MessagesFields
from router.api.http.errors import ErrorBody
from router.api.openai.batches.fields import BatchFields
from router.api.openai.batches.record import BatchBody
from router.api.openai.chat import ChatChunk, ChatCompletion
from router.api.openai.completion import Completion
from router.api.openai.conversations.conversations import ConversationBody, DeletedConversation
from router.api.openai.conversations.fields import (
    ConversationFields,
    ConversationItemsFields,
    ConversationUpdateFields,
)
from router.api.openai.explaining import ExplanationBody
from router.api.openai.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    LoadAdapterFields,
    TokenizeFields,
    UnloadAdapterFields,
)
from router.api.openai.files.files import DeletedFile
from router.api.openai.files.record import FileBody
from router.api.openai.object_page import ObjectPage
from router.api.openai.responses.answer import (
    DeletedResponse,
    InputTokenCount,
    ResponseBody,
)
from router.api.openai.responses.fields import InputTokensFields, ResponseFields
from router.api.openai.responses.items import Item

Json = dict[str, Any]
_REF = "#/components/schemas/{model}"


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    sampling_defaults: dict[str, float]


class ModelList(TypedDict):
    object: str
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """Tokenizer's configuration; it has more fields, which depend on the model."""

    tokenizer_class: str
    chat_template: str | None


class ItemPage(ObjectPage[Item]): ...


class FilePage(ObjectPage[FileBody]): ...


class BatchPage(ObjectPage[BatchBody]): ...


class ConversationItem(TypedDict):
    """Item; its other members depend on its type."""

    id: str
    type: str


class Condition(TypedDict):
    status: str


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int


@dataclass(frozen=True, slots=True)
class _Path:
    method: str
    path: str
    summary: str
    answers: Mapping[str, str]
    body: str | None = None
    #: descriptions of the query's parameters, by name
    query: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    #: name of the body of errors
    error: str = "ErrorBody"


_JSON = "application/json"
_ANSWERS = (
    AnthropicErrorBody,
    BatchBody,
    BatchPage,
    ChatChunk,
    ChatCompletion,
    Completion,
    Condition,
    ConversationBody,
    ConversationItem,
    DeletedConversation,
    DeletedFile,
    DeletedResponse,
    DetokenizedText,
    ErrorBody,
    ExplanationBody,
    FileBody,
    FilePage,
    InputTokenCount,
    ItemPage,
    Load,
    MessageBody,
    Model,
    ModelList,
    ResponseBody,
    TokenCount,
    TokenizerInfo,
    Tokens,
    Version,
)
_BODIES = (
    BatchFields,
    ChatFields,
    CompletionFields,
    ConversationFields,
    ConversationItemsFields,
    ConversationUpdateFields,
    CountTokensFields,
    DetokenizeFields,
    InputTokensFields,
    LoadAdapterFields,
    MessagesFields,
    ResponseFields,
    TokenizeFields,
    UnloadAdapterFields,
)
_EVENTS = "text/event-stream"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_PAGING = {"order": "asc or desc", "after": "id of an item", "limit": "1 to 100"}
_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
_FILE_PAGING = {
    "purpose": "batch or batch_output",
    "order": "asc or desc",
    "after": "id of a file",
    "limit": "1 to 10000",
}
#: Name of the body of an upload, which is a form.
_UPLOAD = "multipart/form-data"
_UPLOAD_SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
    "additionalProperties": False,
}
_NAMES = re.compile(r"{(\w+)}")
_PATHS = (
    _Path(
        "post",
        "/v1/completions",
        "Completion of a prompt. With stream true, events have the same form.",
        {_JSON: "Completion", _EVENTS: ""},
        "CompletionFields",
    ),
    _Path(
        "post",
        "/v1/chat/completions",
        "The next message of a chat. With stream true, events are ChatChunks.",
        {_JSON: "ChatCompletion", _EVENTS: ""},
        "ChatFields",
    ),
    _Path(
        "post",
        "/v1/responses",
        "A response. With stream true, events have names and sequence numbers.",
        {_JSON: "ResponseBody", _EVENTS: ""},
        "ResponseFields",
    ),
    _Path(
        "post",
        "/v1/responses/input_tokens",
        "Number of tokens of a response's prompt",
        {_JSON: "InputTokenCount"},
        "InputTokensFields",
    ),
    _Path(
        "get",
        "/v1/responses/{response_id}",
        "A stored response; with stream true its events, again",
        {_JSON: "ResponseBody", _EVENTS: ""},
        query={"stream": "true or false", "starting_after": "sequence number of the last event"},
    ),
    _Path(
        "delete",
        "/v1/responses/{response_id}",
        "Erase a stored response",
        {_JSON: "DeletedResponse"},
    ),
    _Path(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Cancel a response in the background",
        {_JSON: "ResponseBody"},
    ),
    _Path(
        "get",
        "/v1/responses/{response_id}/input_items",
        "Input items of a stored response",
        {_JSON: "ItemPage"},
        query=_PAGING,
    ),
    _Path(
        "post",
        "/v1/conversations",
        "Create a conversation",
        {_JSON: "ConversationBody"},
        "ConversationFields",
    ),
    _Path("get", _CONVERSATION, "A conversation", {_JSON: "ConversationBody"}),
    _Path(
        "post",
        _CONVERSATION,
        "Replace the metadata of a conversation",
        {_JSON: "ConversationBody"},
        "ConversationUpdateFields",
    ),
    _Path("delete", _CONVERSATION, "Delete a conversation", {_JSON: "DeletedConversation"}),
    _Path(
        "get",
        f"{_CONVERSATION}/items",
        "Items of a conversation and of its finished responses",
        {_JSON: "ItemPage"},
        query=_PAGING,
    ),
    _Path(
        "post",
        f"{_CONVERSATION}/items",
        "Add items to a conversation",
        {_JSON: "ItemPage"},
        "ConversationItemsFields",
    ),
    _Path(
        "get",
        f"{_CONVERSATION}/items/{{item_id}}",
        "An item of a conversation",
        {_JSON: "ConversationItem"},
    ),
    _Path(
        "delete",
        f"{_CONVERSATION}/items/{{item_id}}",
        "Remove an item from a conversation",
        {_JSON: "ConversationBody"},
    ),
    _Path("get", "/v1/files", "Files of this tenant", {_JSON: "FilePage"}, query=_FILE_PAGING),
    _Path("post", "/v1/files", "Upload a file", {_JSON: "FileBody"}, _UPLOAD),
    _Path("get", _FILE, "A file without its content", {_JSON: "FileBody"}),
    _Path("delete", _FILE, "Delete a file", {_JSON: "DeletedFile"}),
    _Path("get", f"{_FILE}/content", "Content of a file", {"application/jsonl": ""}),
    _Path(
        "get",
        "/v1/batches",
        "Batches of this tenant, newest first",
        {_JSON: "BatchPage"},
        query={"after": "id of a batch", "limit": "1 to 100"},
    ),
    _Path("post", "/v1/batches", "Run a file of requests", {_JSON: "BatchBody"}, "BatchFields"),
    _Path("get", _BATCH, "A batch and its progress", {_JSON: "BatchBody"}),
    _Path("post", f"{_BATCH}/cancel", "Cancel a batch", {_JSON: "BatchBody"}),
    _Path(
        "post",
        "/v1/messages",
        "The next message of a conversation, in Anthropic's form",
        {_JSON: "MessageBody", _EVENTS: ""},
        "MessagesFields",
        error="AnthropicErrorBody",
    ),
    _Path(
        "post",
        "/v1/messages/count_tokens",
        "Number of tokens of a message's prompt",
        {_JSON: "TokenCount"},
        "CountTokensFields",
        error="AnthropicErrorBody",
    ),
    _Path("get", "/v1/models", "The served model, by each name", {_JSON: "ModelList"}),
    _Path("get", "/v1/models/{model}", "A served model", {_JSON: "Model"}),
    _Path(
        "get",
        "/v1/requests/{request_id}/explanation",
        "Time breakdown of a request",
        {_JSON: "ExplanationBody"},
    ),
    _Path("post", "/tokenize", "Text to token ids", {_JSON: "Tokens"}, "TokenizeFields"),
    _Path(
        "post", "/detokenize", "Token ids to text", {_JSON: "DetokenizedText"}, "DetokenizeFields"
    ),
    _Path("get", "/tokenizer_info", "Tokenizer's configuration", {_JSON: "TokenizerInfo"}),
    _Path(
        "post",
        "/v1/load_lora_adapter",
        "Add a LoRA adapter, or a new version of one",
        {"text/plain": ""},
        "LoadAdapterFields",
    ),
    _Path(
        "post",
        "/v1/unload_lora_adapter",
        "Remove a LoRA adapter",
        {"text/plain": ""},
        "UnloadAdapterFields",
    ),
    _Path("get", "/metrics", "Metrics for Prometheus", {"text/plain": ""}),
    _Path("get", "/health", "This process answers", {_JSON: "Condition"}, is_open=True),
    _Path("get", "/ready", "This router accepts requests", {_JSON: "Condition"}, is_open=True),
    _Path("get", "/ping", "The same as /health", {_JSON: "Condition"}, is_open=True),
    _Path("post", "/ping", "The same as /health", {_JSON: "Condition"}, is_open=True),
    _Path("get", "/version", "Version of Everlift", {_JSON: "Version"}, is_open=True),
    _Path("get", "/load", "Number of this router's unfinished requests", {_JSON: "Load"}),
)


@cache
def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Everlift", "version": version("everlift")},
        "paths": {
            path: {each.method: _operation(each) for each in _PATHS if each.path == path}
            for path in dict.fromkeys(each.path for each in _PATHS)
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: _Path) -> Json:
    operation: Json = {
        "summary": path.summary,
        "responses": {
            "200": {
                "description": "Success.",
                "content": {
                    # A schema would describe one event, and events differ.
                    media: {} if media == _EVENTS else _media(name)
                    for media, name in path.answers.items()
                },
            },
            "default": {
                "description": "Error; its code names the cause.",
                "content": {_JSON: _media(path.error)},
            },
        },
        # The empty alternative: clusters without API keys need no credential.
        "security": [] if path.is_open else [{}, {"key": []}],
    }
    if path.body is not None:
        content = {_JSON: _media(path.body)}
        if path.body == _UPLOAD:
            content = {_UPLOAD: {"schema": _UPLOAD_SCHEMA}}
        operation["requestBody"] = {"required": True, "content": content}
    if parameters := [*_parameters(path)]:
        operation["parameters"] = parameters
    return operation


def _parameters(path: _Path) -> Iterator[Json]:
    text = {"schema": {"type": "string"}}
    for name in _NAMES.findall(path.path):
        yield {"name": name, "in": "path", "required": True, **text}
    for name, description in path.query.items():
        yield {"name": name, "in": "query", "description": description, **text}


def _media(name: str) -> Json:
    return {"schema": {"$ref": _REF.format(model=name)} if name else {"type": "string"}}


def _schemas() -> Json:
    fields: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (kind, "validation") for kind in _BODIES
    ]
    _, bodies = models_json_schema(fields, ref_template=_REF)
    answers: list[tuple[str, Literal["serialization"], TypeAdapter[Any]]] = [
        (kind.__name__, "serialization", TypeAdapter(kind)) for kind in _ANSWERS
    ]
    _, made = TypeAdapter.json_schemas(answers, ref_template=_REF)
    return {**bodies["$defs"], **made["$defs"]}
