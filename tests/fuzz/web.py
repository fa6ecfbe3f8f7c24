"""Fuzzing of HTTP: whole requests, JSON bodies, and header values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import uvicorn
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, Gauge
from uvicorn.server import ServerState

from everlift.request_id import check_qualified
from everlift.trace_context import TraceContext
from everlift.v1 import admin_pb2, chaos_pb2
from everlift.v1 import inference_pb2 as pb
from router.api import service
from router.api.anthropic.conversation import conversation_of
from router.api.anthropic.fields import CountTokensFields, MessagesFields
from router.api.http import body
from router.api.http.connection import Connection
from router.api.http.event_id import EventId
from router.api.http.fields import Fields, parse
from router.api.openai import fields, submissions
from router.api.openai.batches.fields import BatchFields
from router.api.openai.batches.record import window_s
from router.api.openai.conversations.fields import ConversationFields
from router.api.openai.conversations.record import ConversationRecord, shown_item
from router.api.openai.responses.fields import InputTokensFields, ResponseFields
from router.api.openai.responses.items import input_turns, tool_use
from router.api.openai.responses.record import Record
from router.auth.access import Table
from router.auth.caller import Scope
from router.auth.document import Document
from router.auth.key import Key, hash_of, join_key
from router.console.actions import check_own_page, message_of
from router.observability.metrics.http_server import MAX_HEAD_BYTES, MetricsServer, encoder
from tests.fuzz.mutation import json_reshaped, parts_reshaped
from tests.fuzz.served import Served, Transport, ended, served
from tests.fuzz.target import CASE_S, Finding, Run, Target, event_loop
from tests.fuzz.uploads import UPLOADS
from tests.support.router.batch_client import FORM

CHAT = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "outside",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"$ref": "#/$defs/c"}},
                    "$defs": {"c": {"type": "string"}},
                },
            },
        }
    ],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "max_completion_tokens": 5,
    "prompt_logprobs": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PLAIN_CHAT = {
    "messages": [{"role": "user", "content": "Hello"}],
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "seed": 7,
    "documents": [{"title": "a", "text": "b"}],
    "reasoning_effort": "none",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "skip_special_tokens": False,
}
COMPLETION = {
    "prompt": ["Hello", "world"],
    "max_tokens": 5,
    "n": 2,
    "best_of": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.1,
    "stop": ["end"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 1.5},
    "logprobs": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "priority": 1,
    "timeout_ms": 60000,
    "ttft_target_ms": 100,
    "on_disconnect": "grace",
    "cache_salt": "s",
    "structured_outputs": {"choice": ["a", "b"]},
    "return_token_ids": True,
    "truncate_prompt_tokens": -1,
}
TOKENS = {"prompt": [[1, 2], [3]], "echo": True, "stream": True, "regex": "a+"}
SCORED = {
    "prompt": ["Hello", "world"],
    "echo": True,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "max_tokens": 0,
}
CONVERSATION = {
    "items": [
        {"role": "user", "content": "Hello"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ],
    "metadata": {"topic": "weather"},
}
TOKENIZED = {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True}
DETOKENIZED = {"tokens": [1, 255, 1023]}
BATCH = {
    "input_file_id": f"file-{'0' * 32}",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "metadata": {"a": "b"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
_PERSON = {"type": "json_schema", "schema": {"type": "object"}}
RESPONSE = {
    "model": "fake",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ],
    "tools": [{"type": "function", "name": "weather", "parameters": _SCHEMA, "strict": True}],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "text": {"format": {**_PERSON, "name": "n"}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 5,
    "truncation": "auto",
    "background": True,
}
MESSAGE = {
    "model": "fake",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "d"}]},
    ],
    "tools": [{"name": "weather", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"format": _PERSON},
    "stop_sequences": ["end"],
    "metadata": {"user_id": "u"},
    "stream": True,
}
COUNTED = {name: MESSAGE[name] for name in ("model", "messages", "tools")}

#: Bodies of clients' requests, by path.
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        COMPLETION,
        TOKENS,
        SCORED,
        {"prompt": "a", "max_tokens": 1, "json_schema": {"type": "object"}},
        {"prompt": "a", "ebnf": "root ::= x", "add_special_tokens": False},
        {"prompt": "a", "allowed_token_ids": [1, 2], "bad_words": ["a b"], "min_tokens": 1},
    ),
    "/v1/chat/completions": (CHAT, PLAIN_CHAT),
    "/v1/responses": (
        RESPONSE,
        {"input": "a", "store": False, "previous_response_id": "resp_a"},
        {"input": "a", "conversation": {"id": "conv_a"}},
    ),
    "/v1/responses/input_tokens": ({"input": "a"},),
    "/v1/messages": (MESSAGE,),
    "/v1/messages/count_tokens": (COUNTED,),
    "/v1/conversations": (CONVERSATION, {"metadata": {}}),
    "/v1/batches": (BATCH,),
    "/v1/load_lora_adapter": ({"lora_name": "sql", "lora_path": "/adapters/sql", "model": "fake"},),
    "/v1/unload_lora_adapter": ({"lora_name": "sql"},),
    "/tokenize": (TOKENIZED, {"messages": PLAIN_CHAT["messages"]}),
    "/detokenize": (DETOKENIZED,),
}


# bodies: a path, a line feed, JSON

_KINDS: dict[str, type[Fields]] = {
    "/v1/completions": fields.CompletionFields,
    "/v1/chat/completions": fields.ChatFields,
    "/v1/responses": ResponseFields,
    "/v1/responses/input_tokens": InputTokensFields,
    "/v1/messages": MessagesFields,
    "/v1/messages/count_tokens": CountTokensFields,
    "/v1/conversations": ConversationFields,
    "/v1/batches": BatchFields,
    "/v1/load_lora_adapter": fields.LoadAdapterFields,
    "/v1/unload_lora_adapter": fields.UnloadAdapterFields,
    "/tokenize": fields.TokenizeFields,
    "/detokenize": fields.DetokenizeFields,
}


def _body(data: bytes) -> None:
    path, _, text = data.partition(b"\n")
    kind = _KINDS.get(path.decode("latin-1"), fields.CompletionFields)
    read = parse(kind, body.parse(text))
    if isinstance(read, fields.CompletionFields):
        for message in submissions.of_completion(read):
            message.SerializeToString()
    elif isinstance(read, fields.ChatFields):
        submissions.of_chat(read, "hi", None).SerializeToString()
    if isinstance(read, CountTokensFields):
        conversation_of(read)
    if isinstance(read, InputTokensFields):
        input_turns(read.input)
        tool_use(read)
    if isinstance(read, ConversationFields):
        _conversation(read)
    if isinstance(read, BatchFields):
        window_s(read.completion_window)
    if isinstance(read, ResponseFields):
        record = Record.of(read, 1, ["a"])
        again = Record.from_bytes(record.to_bytes())
        if again.body != record.body:
            raise Finding("a stored response differs")
    if isinstance(read, MessagesFields | ResponseFields):
        submissions.of_chat(read.generation, "hi", None).SerializeToString()


def _conversation(read: ConversationFields) -> None:
    given = read.items or []
    turns = input_turns(given, "items") if given else []
    items = tuple(shown_item(item, f"i{at}") for at, item in enumerate(given))
    stored = ConversationRecord(1, read.metadata or {}, items)
    again = ConversationRecord.from_bytes(stored.to_bytes())
    if again != stored or (given and input_turns(items) != turns):
        raise Finding("a stored conversation differs")


def _body_reshaped(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    path, _, text = data.partition(b"\n")
    return path + b"\n" + json_reshaped(rng, text, [seed.partition(b"\n")[2] for seed in seeds])


_BODIES = tuple(
    path.encode() + b"\n" + json.dumps(each).encode()
    for path, bodies in BODIES.items()
    for each in bodies
)


# messages of operators: the name of the message, a line feed, JSON

_MESSAGES: dict[str, tuple[type[Message], tuple[dict[str, Any], ...]]] = {
    "drain": (admin_pb2.DrainRequest, ({"worker_id": "ab12"},)),
    "policy": (
        admin_pb2.SetPolicyRequest,
        (
            {"order": "hrrn", "max_queued": 7, "undated_due": 1.5, "fair_share": True},
            {"reset": ["order", "ageing_factor"], "class_floor": "0.1"},
            {"engine_policy": "magnus", "tpot_target": 0.05},
        ),
    ),
    "chaos": (
        chaos_pb2.Fault,
        ({"kind": "FAULT_KIND_SLOW", "target": "leader", "seconds": 1, "delay_s": 0.5},),
    ),
}
_SAID = tuple(
    name.encode() + b"\n" + json.dumps(each).encode()
    for name, (_, all_) in _MESSAGES.items()
    for each in all_
)


def _operator(data: bytes) -> None:
    name, _, text = data.partition(b"\n")
    kind, _ = _MESSAGES.get(name.decode("latin-1"), _MESSAGES["policy"])
    message_of(kind, body.parse(text)).SerializeToString()


# whole requests


def request(path: str, content: bytes, more: str = "", method: str = "POST") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{more}\r\n"
    )
    return head.encode() + content


def chunked(path: str, content: bytes) -> bytes:
    half = len(content) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(it), it) for it in (content[:half], content[half:]))
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + chunks + b"0\r\nx-trailer: a\r\n\r\n"


_JSON_TYPE, _FORM_TYPE = b"application/json", FORM["content-type"].encode()
_CONTENT = json.dumps(COMPLETION).encode()
_MORE = "x-request-id: r\r\naccept: */*\r\norigin: http://page\r\ntraceparent: 00-a-b-01\r\n"
REQUESTS = (
    *(request(path, json.dumps(each).encode()) for path, all_ in BODIES.items() for each in all_),
    *(chunked(path, json.dumps(all_[0]).encode()) for path, all_ in BODIES.items()),
    request("/v1/completions", _CONTENT, _MORE) + request("/v1/models/fake", b"", method="GET"),
    request("/v1/completions", _CONTENT, "last-event-id: r/12.57,7.30e\r\nidempotency-key: r\r\n"),
    request("/metrics", b"", "accept: application/openmetrics-text; version=1.0.0\r\n", "GET"),
    request("/v1/models", b"", "access-control-request-method: POST\r\n", "OPTIONS"),
    request("/v1/models/%66ake?a=b#c", b"", "upgrade: h2c\r\nconnection: upgrade\r\n", "GET"),
    request("/v1/requests/r:1/explanation", b"", method="GET"),
    request("/health", b"", "expect: 100-continue\r\n", "HEAD"),
    *(
        request("/v1/files", each, "idempotency-key: k\r\n").replace(_JSON_TYPE, _FORM_TYPE, 1)
        for each in UPLOADS
    ),
    request("/v1/files?limit=2&order=asc&purpose=batch", b"", method="GET"),
    request(f"/v1/files/{BATCH['input_file_id']}/content", b"", method="GET"),
    request(f"/v1/files/{BATCH['input_file_id']}", b"", method="DELETE"),
    request("/v1/batches?limit=2&after=batch_1", b"", method="GET"),
    request(f"/v1/batches/batch_{'0' * 32}/cancel", b""),
)
ODD_LINES = (
    *(b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"content-length: 5"),
    *(b"content-length: -1", b"content-length: 99999999999999999999", b"content-encoding: gzip"),
    *(b"content-type: text/plain", b"connection: upgrade", b"upgrade: websocket", b"host: ["),
    *(
        b"x: \xff",
        b": ",
        b" folded",
        b"x-slo-ttft-ms: nan",
        b"idempotency-key: \xff",
        b"0",
        b"ffff",
    ),
    *(b"last-event-id: r/1.1", b"accept: application/openmetrics-text;version", b"expect: x"),
    *(b"GET /\xff HTTP/1.1", b"GET //[ HTTP/1.1", b"GET http://[ HTTP/1.1", b"GET * HTTP/1.1"),
    *(b"CONNECT a:1 HTTP/1.1", b"GET /v1/models/%ff%00 HTTP/1.1", b"PRI * HTTP/2.0", b"GET / "),
)


async def _spoken(server: Served, config: uvicorn.Config, data: bytes) -> None:
    state, transport = ServerState(), Transport()
    connection = Connection(config, state, {})
    connection.connection_made(transport)
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        if not transport.is_closing():
            connection.data_received(part)
            await asyncio.sleep(0)
    await ended(_answered(state, connection), server)
    if b"HTTP/1.1 500" in transport.written:
        raise Finding("an answer that says nothing but 500")
    await server.settle()


async def _answered(state: ServerState, connection: Connection) -> None:
    """Let the client read what is available, and disconnect it."""
    for _ in range(20):
        await asyncio.sleep(0)
        if not state.tasks:
            break
    connection.connection_lost(None)
    while state.tasks:
        await asyncio.wait(state.tasks)
    connection._unset_keepalive_if_required()


@contextmanager
def _http() -> Iterator[Run]:
    with served() as server:

        async def configured() -> uvicorn.Config:
            config = uvicorn.Config(
                server.app,
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
            )
            config.load()
            return config

        config = server.runs(configured())
        yield lambda data: server.runs(_spoken(server, config, data))


# requests of Prometheus and of probes


async def _scraped(server: MetricsServer, data: bytes) -> None:
    """Send a request without anything after it; disconnect when the answer is complete."""
    reader, transport = asyncio.StreamReader(limit=MAX_HEAD_BYTES), Transport()
    protocol = asyncio.StreamReaderProtocol(reader, server.connected)
    protocol.connection_made(transport)
    answering = [*server._answering]
    protocol.data_received(data)
    protocol.eof_received()
    async with asyncio.timeout(CASE_S):
        while not transport.is_closing():
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.gather(*answering)
    if b"HTTP/1.1 500" in transport.written:
        raise Finding("an answer that says nothing but 500")


@contextmanager
def _metrics() -> Iterator[Run]:
    with event_loop() as runs:
        server = MetricsServer(_REGISTRY)
        yield lambda data: runs(_scraped(server, data))


_SCRAPES = (
    b"GET /metrics HTTP/1.1\r\nhost: here\r\naccept: application/openmetrics-text\r\n\r\n",
    b"GET /ready?a HTTP/1.0\r\n\r\nmore",
    b"HEAD /live HTTP/1.1\r\n\r\n",
)


# header values and tokens: the kind in the first line, the value in the rest

_KEY = join_key("0123456789ab", "x" * 43)
_REGISTRY = CollectorRegistry()
Gauge("everlift_waiting", "requests that wait", registry=_REGISTRY).set(1)
_TABLE = Table(
    Document(
        {
            "0123456789ab": Key(
                "acme", (Scope.INFER,), hash_of("x" * 43), "2030-01-31T12:00:00Z", None, ""
            )
        }
    )
)


def _submission(text: str) -> None:
    given = dict(line.partition(": ")[::2] for line in text.split("\n"))
    message = pb.GenerateRequest()
    service.apply_headers(message, given)
    service.apply_headers(pb.GenerateRequest(), given, index=3)
    message.SerializeToString()


def _credential(text: str) -> None:
    given = dict(line.partition(": ")[::2] for line in text.split("\n"))
    assert _TABLE.admit(given, now=0.0).tenant == "acme"


def _trace(text: str) -> None:
    parent, _, state = text.partition("\n")
    if (found := TraceContext.parse(parent, state)) is not None:
        assert TraceContext.from_proto(found.to_proto()) == found
        assert len(str(found)) == 55


def _own_page(text: str) -> None:
    given = dict(line.partition(": ")[::2] for line in text.split("\n"))
    check_own_page(given, has_access=False)


def _accept(text: str) -> None:
    encode, content_type = encoder(text)
    encode(_REGISTRY)
    content_type.encode("latin-1")


def _event_id(text: str) -> None:
    assert EventId.parse(text) == EventId.parse(str(EventId.parse(text)))


def _page(text: str) -> None:
    assert service.parse_page_token(
        service.page_token(service.parse_page_token(text))
    ) == service.parse_page_token(text)


_HEADERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "submission": (
        _submission,
        (
            "idempotency-key: r:1\nx-slo-ttft-ms: 100\nx-session-id: a",
            "x-request-id: r\nx-gateway-inference-fairness-id: b\nx-slo-ttft-ms: 1e3",
        ),
    ),
    "credential": (_credential, (f"authorization: Bearer {_KEY}", f"x-api-key: {_KEY}")),
    "trace": (_trace, ("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01\na=b,c@d=e",)),
    "event_id": (_event_id, ("r:1/12.57,7.30e",)),
    "page_token": (_page, (service.page_token(service.Position(17.5, "acme/r:1")),)),
    "own_page": (
        _own_page,
        (
            "content-type: application/json\nhost: localhost:8000\norigin: http://localhost:8000",
            "content-type: application/json\nhost: [::1]:8000",
        ),
    ),
    "request_id": (check_qualified, ("acme/r:1",)),
    "accept": (_accept, ("application/openmetrics-text; version=1.0.0; charset=utf-8,*/*",)),
}


def _header(data: bytes) -> None:
    kind, _, value = data.partition(b"\n")
    read = _HEADERS.get(kind.decode("latin-1"), (_submission, ()))[0]
    read(value.decode("latin-1"))


_ODD_VALUES = (
    *(b"nan", b"inf", b"1e999", b"-1", b"\xff", b"\xb2", b"a" * 200, b"", b'"', b"1_0", b" "),
    *(b"Bearer", b"Bearer ", b"Basic YTpi", b"version", b"version=", b"escaping=", b"q=\xff", b"/"),
)


TARGETS = (
    Target(
        "header",
        lambda: nullcontext(_header),
        tuple(
            f"{kind}\n{value}".encode() for kind, (_, all_) in _HEADERS.items() for value in all_
        ),
        parts_reshaped(b" ", _ODD_VALUES),
        weight=4.0,
    ),
    Target("http_body", lambda: nullcontext(_body), _BODIES, _body_reshaped, weight=4.0),
    Target("http_operators", lambda: nullcontext(_operator), _SAID, _body_reshaped),
    Target("http_metrics", _metrics, _SCRAPES, parts_reshaped(b"\r\n", ODD_LINES)),
    Target("http", _http, REQUESTS, parts_reshaped(b"\r\n", ODD_LINES), weight=2.0),
)
