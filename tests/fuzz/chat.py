"""Fuzzing of chats, model outputs, detokenization, grammars, and the file of API keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from everlift.errors import EverliftError, InvalidGrammar, QueueFull, SettingsError
from everlift.sampling import Grammar, GrammarKind
from everlift.text import Stops, TextState
from router.api.chat_renderer import ChatRenderer
from router.api.http import body
from router.api.http.fields import parse
from router.api.openai import fields, submissions
from router.api.openai.chat_conversation import chat_conversation
from router.auth import document, file_store, key
from router.chat.parsers.hermes import HERMES
from router.chat.parsers.llama3 import LLAMA3
from router.chat.parsers.registry import TOOL_FORMATS
from router.chat.tools import ToolUse
from router.requests.tokenizer import ByteTokenizer, HuggingFaceTokenizer, ServedModel, Tokenizer
from tests.fuzz import web
from tests.fuzz.mutation import json_reshaped, parts_reshaped, torn
from tests.fuzz.served import template
from tests.fuzz.target import Finding, Run, Target, event_loop
from tests.support.router import chat_support
from tests.support.router.parser_examples import FRAGMENTS, TOOL_EXAMPLES, TOOLS
from worker.grammar.json_schema import NotEnforceable, lark_of_schema, parse_schema

_DEMO_MODEL = Path(__file__).resolve().parents[2] / "cluster" / "demo_model"


# chats, with each of the templates


_MODEL = ServedModel.load("fake")


async def _conversed(renderer: ChatRenderer, data: bytes) -> None:
    read = parse(fields.ChatFields, body.parse(data))
    rendered = await renderer.render(_MODEL, await chat_conversation(read))
    submissions.of_chat(read, rendered.prompt, rendered.grammar)
    parser = rendered.parser("r", 0)
    parser.feed('<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    parser.finish()


@contextmanager
def _chats() -> Iterator[Run]:
    texts = (chat_support.HERMES, chat_support.LLAMA3, chat_support.MISTRAL)
    with event_loop() as runs, ExitStack() as stack:
        templates = [stack.enter_context(template(text)) for text in texts]
        all_ = [ChatRenderer({_MODEL.name: each}) for each in templates]
        yield lambda data: runs(_conversed(all_[len(data) % len(all_)], data))
        for each in templates:
            runs(each.close())


# model outputs: the first byte selects the parser, the second the place where the text is split

_CALLED = {"type": "function", "function": {"name": "weather"}}
_READINGS = (
    *((HERMES, "auto", True), (HERMES, "auto", False), (LLAMA3, "auto", True)),
    *((None, "required", True), (None, _CALLED, True), (HERMES, "none", True)),
    *((form, "auto", True) for form in TOOL_FORMATS if form not in (HERMES, LLAMA3)),
)


def _written(data: bytes) -> None:
    form, choice, is_parallel = _READINGS[data[0] % len(_READINGS) if data else 0]
    cut = data[1] if len(data) > 1 else 0
    text = data[2:].decode(errors="replace")
    use = ToolUse.of([*chat_support.TOOLS, *TOOLS], choice, is_parallel)
    whole, parts = use.parser(form, "r", 0), use.parser(form, "r", 0)
    if chat_support.parsed(whole, [text]) != chat_support.parsed(parts, [text[:cut], text[cut:]]):
        raise Finding("a cut makes a difference")


_OUTPUTS = tuple(
    bytes((reading, cut)) + text.encode()
    for reading, cut, text in (
        (
            0,
            9,
            'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>',
        ),
        (1, 3, '<tool_call>{"arguments": "{}", "name": "search"}</tool_call> <tool_call>{"a": 1}'),
        (
            2,
            20,
            '{"name": "weather", "parameters": {"city": "\\ud83d\\ude00"}}; {"name": "search"}',
        ),
        (
            3,
            5,
            '[{"name": "search", "arguments": {}}, {"name": "weather", "arguments": {"c": [1]}}]',
        ),
        (4, 5, '{"city": "a\\"b", "days": 3}'),
        *(
            (reading, 12, example.text)
            for reading, (form, _, _) in enumerate(_READINGS[6:], 6)
            if form is not None
            for example in TOOL_EXAMPLES[form.name]
        ),
    )
)
_MARKS = tuple(
    mark.encode()
    for mark in (
        *'<tool_call> </tool_call> <|python_tag|> { } [ ] ; , : " \\ \\ud83d {} null'.split(),
        *(mark for form in TOOL_FORMATS for mark in form.marks),
        *(text for form in TOOL_FORMATS for text in FRAGMENTS[form.name]),
    )
)


# tokens: the first stop string, a line feed, two bytes for each token

_STOP = "."


def _detokenized(tokenizer: Tokenizer, vocab_size: int, data: bytes) -> None:
    head, _, rest = data.partition(b"\n")
    ids = [int.from_bytes(rest[i : i + 2], "big") % vocab_size for i in range(0, len(rest), 2)]
    plain = TextState(tokenizer)
    text = "".join(map(plain.push, ids)) + plain.finish()
    if text != tokenizer.decode(ids):
        raise Finding("pieces are another text than the whole")
    stop = head.decode(errors="replace")[:64] or _STOP
    stops = Stops((stop, stop[::-1]), frozenset(ids[:1]), len(head) % 4)
    stopping = TextState(tokenizer, stops)
    delivered = "".join(map(stopping.push, _until_its_end(ids, stops))) + stopping.finish()
    if stopping.stopped and len(delivered) > len(text):
        raise Finding("a stopped text is longer than the whole")


def _until_its_end(ids: list[int], stops: Stops) -> list[int]:
    """Return the ids up to and including the first stop token after ``min_tokens``."""
    may_end = enumerate(ids[stops.min_tokens :], stops.min_tokens + 1)
    return ids[: next((end for end, each in may_end if each in stops.token_ids), len(ids))]


@contextmanager
def _tokens() -> Iterator[Run]:
    tokenizers = (
        (ByteTokenizer(), ByteTokenizer.vocab_size),
        (HuggingFaceTokenizer(_DEMO_MODEL / "tokenizer.json"), 600),
    )
    yield lambda data: _detokenized(*tokenizers[len(data) % 2], data)


# grammars

_SCHEMAS: tuple[Any, ...] = (
    {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 2}, "b": {"$ref": "#/$defs/n"}},
        "required": ["a", "z"],
        "$defs": {"n": {"type": ["integer", "null"], "enum": [1, None, True]}},
    },
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"anyOf": [{"maximum": 1}, {}]}},
    {"oneOf": [{"type": "string", "pattern": "^a+$"}, {"type": "number", "multipleOf": 2}]},
    {"patternProperties": {"^a": {"type": "null"}}, "maxProperties": 3, "not": {}},
)
_FORMS = (
    *(b"json_schema\n" + json.dumps(schema).encode() for schema in _SCHEMAS),
    *(b"regex\n[a-z]{2,5}(x|y)*", b"regex\n\\d+(?=a)\\p{L}", b"choice\nyes\nno"),
    *(b'ebnf\nroot ::= "a" root | b\nb ::= [0-9]+', b'ebnf\nroot ::= (root root)* | "a"?'),
)


def _schema(data: bytes) -> None:
    lark_of_schema(parse_schema(data.decode(errors="replace")))


@contextmanager
def _processes() -> Iterator[Run]:
    # This module loads torch, which the other targets do not need.
    from tests.support.worker.grammar_support import grammar_service

    with grammar_service(compile_timeout=5.0) as service:

        def compile_(data: bytes) -> None:
            name, _, text = data.decode(errors="replace").partition("\n")
            kind = GrammarKind(name) if name in set(GrammarKind) else GrammarKind.JSON_SCHEMA
            texts = tuple(text.split("\n")) if kind is GrammarKind.CHOICE else (text,)
            Grammar(kind, texts)
            result = service.order(kind, *texts).result(60)
            if isinstance(result, EverliftError) and not isinstance(
                result, InvalidGrammar | QueueFull
            ):
                raise result
            if "cannot be handled" in str(result):
                raise Finding("a grammar that the grammar process did not foresee")

        yield compile_


# API keys

_ACCESS = b"""\
keys:
  3f9a1c2b4d5e:
    tenant: acme
    scopes: [infer, metrics]
    sha256: %s
    created: 2030-01-31T12:00:00Z
    expires: "2031-01-31T12:00:00+01:00"
    name: for people
tenants:
  "*": {max_concurrent: 100}
  acme: {requests_per_minute: 600, max_concurrent: null, max_priority: 3}
""" % (b"ab" * 32)


def _keys(data: bytes) -> None:
    if data[:1] == b"@":
        with suppress(ValueError):
            key.duration(data[1:].decode(errors="replace"))
        return
    read = file_store.parse(data.decode(errors="replace"))
    assert document.from_records(read.to_records()) == read
    for each in read.keys.values():
        each.has_expired(0.0)


_ODD_SETTINGS = (
    *(
        b"null",
        b"[]",
        b"{}",
        b"1e999",
        b"2030-01-31",
        b"!!binary YQ==",
        b"&a [*a]",
        b"? [1]",
        b"1:",
    ),
    *(b"9999-12-31T23:59:59Z", b"0001-01-01T00:00:00+14:00", b"~", b"<<", b"\xff", b"{1: 2}"),
)


TARGETS = (
    Target(
        "chat",
        _chats,
        tuple(json.dumps(each).encode() for each in (web.CHAT, web.PLAIN_CHAT)),
        json_reshaped,
        weight=3.0,
    ),
    Target(
        "tool_output", lambda: nullcontext(_written), _OUTPUTS, parts_reshaped(b'"', _MARKS), 4.0
    ),
    Target("tokens", _tokens, (b".\n" + bytes(range(60)), b"ab\n\0\xe2\0\x82\0\xac\0a"), torn, 3.0),
    Target(
        "grammar_schema",
        lambda: nullcontext(_schema),
        tuple(json.dumps(schema).encode() for schema in _SCHEMAS),
        json_reshaped,
        weight=4.0,
        refusals=(NotEnforceable,),
    ),
    Target("grammar", _processes, _FORMS, parts_reshaped(b" ", (b"{,}", b"|", b"(?<", b"*")), 0.02),
    Target(
        "access",
        lambda: nullcontext(_keys),
        (_ACCESS, b"@90d", b"@12h"),
        parts_reshaped(b" ", _ODD_SETTINGS),
        weight=0.5,
        refusals=(SettingsError,),
    ),
)
